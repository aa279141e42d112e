"""The keys of one generation: how each is named, written and read. `protocol` says who does so, and when."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from runtime_di.errors import AgreementError, Problem, ProblemsError, ServiceError
from runtime_di.providers.distributed.agreement import Differences

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_CHUNK = 256
"""Keys that one request to the store checks."""


@dataclass(frozen=True)
class RendezvousKeys:
    """The keys of one generation on the store of a job.

    Attributes:
        store: shared by all ranks.
        generation: first part of every key. A barrier uses its own name here, and the keys of arrivals alone.
    """

    store: Store
    generation: int | str

    def set(self, key: str, text: str) -> None:
        """Write a key."""
        self.store.set(f"{self.generation}/{key}", text)

    def get(self, key: str) -> str:
        """Read a key that exists."""
        return self.store.get(f"{self.generation}/{key}").decode()

    def has(self, *keys: str) -> bool:
        """Whether all these keys exist."""
        return self.store.check([f"{self.generation}/{key}" for key in keys])

    def count(self, key: str, more: int = 0) -> int:
        """Add to a counter and return its value."""
        return self.store.add(f"{self.generation}/{key}", more)

    def arrive(self, rank: int) -> str:
        """Register this process as ``rank`` unless another process is; return the name of the registered process."""
        return self.store.compare_set(f"{self.generation}/arrived/{rank}", "", process_name()).decode()

    def missing(self, num_ranks: int) -> Iterator[int]:
        """List the ranks that have not arrived."""
        for first in range(0, num_ranks, _CHUNK):
            chunk = range(first, min(first + _CHUNK, num_ranks))
            if not self.has(*(f"arrived/{rank}" for rank in chunk)):
                yield from (rank for rank in chunk if not self.has(f"arrived/{rank}"))

    def report_mismatch(self, rank: int, differences: Differences, duplicates: str) -> None:
        """Report the values in which a rank differs from rank 0, and the processes that share this rank, if any do."""
        number = self.count("mismatch_count", 1)
        self.set(f"mismatch/{number}", json.dumps([rank, differences, duplicates]))

    def mismatches(self) -> Iterator[tuple[int, Differences, str]]:
        """Read the reports of `report_mismatch`, in order."""
        for key in (f"mismatch/{number}" for number in range(1, self.count("mismatch_count") + 1)):
            if self.has(key):  # otherwise a rank that is not counted yet is still writing it
                rank, differences, duplicates = json.loads(self.get(key))
                yield rank, differences, duplicates

    def decide(self, error: ProblemsError | None) -> None:
        """Publish the decision of rank 0: the error that every rank raises, or ``None`` where all may start."""
        text = ""
        if error is not None:
            problems = [asdict(problem) for problem in error.problems]
            text = json.dumps([isinstance(error, AgreementError), error.heading, problems])
        self.set("decision", text)

    def decision(self) -> ProblemsError | None:
        """Read the decision that rank 0 has published."""
        if not (text := self.get("decision")):
            return None
        is_disagreement, heading, problems = json.loads(text)
        kind = AgreementError if is_disagreement else ServiceError
        return kind(heading, [Problem(**problem) for problem in problems])


def process_name() -> str:
    """Name this process by its host and its process id."""
    return f"{socket.gethostname()} process {os.getpid()}"
