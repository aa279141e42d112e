"""What the ranks of one meeting write down on its store."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime_di.providers.agreement import Deviation

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_CHUNK = 256
"""Keys that a store is asked for at once."""


@dataclass(frozen=True)
class Minutes:
    """What ranks write down in one meeting."""

    store: Store
    number: int | str

    def set(self, key: str, text: str) -> None:
        """Write an entry."""
        self.store.set(f"{self.number}/{key}", text)

    def get(self, key: str) -> str:
        """Read an entry that is there."""
        return self.store.get(f"{self.number}/{key}").decode()

    def has(self, *keys: str) -> bool:
        """Whether all of these entries are there."""
        return self.store.check([f"{self.number}/{key}" for key in keys])

    def count(self, key: str, more: int = 0) -> int:
        """Add to a counter and tell where it stands."""
        return self.store.add(f"{self.number}/{key}", more)

    def arrive(self, rank: int) -> str:
        """Note this process as that rank, unless another is; tell which is."""
        return self.store.compare_set(f"{self.number}/arrived/{rank}", "", process()).decode()

    def object(self, rank: int, deviation: Deviation, twice: str) -> None:
        """Tell what a rank has otherwise than rank 0, and which processes are that rank if it is more than one."""
        self.set(f"objection/{self.count('objections', 1)}", json.dumps([rank, deviation, twice]))

    def objections(self) -> Iterator[tuple[int, Deviation, str]]:
        """Read what was objected, one after the other."""
        for key in (f"objection/{index}" for index in range(1, self.count("objections") + 1)):
            if self.has(key):  # else it is still being written, by a rank that is not counted yet
                rank, deviation, twice = json.loads(self.get(key))
                yield rank, deviation, twice

    def absent(self, num_ranks: int) -> Iterator[int]:
        """List the ranks that have not arrived."""
        for first in range(0, num_ranks, _CHUNK):
            chunk = range(first, min(first + _CHUNK, num_ranks))
            if not self.has(*(f"arrived/{rank}" for rank in chunk)):
                yield from (rank for rank in chunk if not self.has(f"arrived/{rank}"))


def process() -> str:
    """Name this process among those of all hosts."""
    return f"{socket.gethostname()} process {os.getpid()}"
