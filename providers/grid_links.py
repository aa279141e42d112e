"""What passes between two grids: rows of samples, and weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from runtime_di.errors import Problem, ServiceError
from runtime_di.providers.rank_grid import RankGrid

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.distributed_c10d import ProcessGroup

Route: TypeAlias = tuple[int, int, int]
"""A block of samples, the rank that sends it and a rank that receives it."""


@dataclass(frozen=True)
class Link:
    """A group over the ranks of two grids, of which one sends to the other.

    Samples are shared out in order over the data-parallel ranks of each grid, of which one side has a multiple of the
    other's; they leave the source's last pipeline stage for the target's first.
    """

    name: str
    source: RankGrid
    target: RankGrid
    rank: int
    group: ProcessGroup | None = None
    backward: bool = False

    @property
    def back(self) -> Link:
        """The same way in the other direction, for gradients: they leave the stage where the rows arrived."""
        return Link(self.name, self.target, self.source, self.rank, self.group, not self.backward)

    @property
    def num_blocks(self) -> int:
        """Parts into which the samples of a step are cut, so that each has one place on either side."""
        return max(self.source.sizes["dp"], self.target.sizes["dp"])

    def carry(self, rows: Tensor | None, into: Tensor | None) -> None:
        """Bring each sample's rows to the ranks that want them; call it on every rank of both grids.

        Args:
            rows: of this rank's share of the samples, along the first dim, on the ranks that send.
            into: filled with the rows of this rank's share, on the ranks that receive.

        Raises:
            ServiceError: this rank sends or receives, and was given nothing to send or to fill.
        """
        import torch.distributed as dist

        for block, sender, receiver in self.routes():
            outgoing = self._part(rows, self.source, block) if sender == self.rank else None
            incoming = self._part(into, self.target, block) if receiver == self.rank else None
            if outgoing is not None and incoming is not None:
                incoming.copy_(outgoing)
            elif outgoing is not None:
                dist.send(outgoing.contiguous(), receiver, self._group)
            elif incoming is not None:
                dist.recv(incoming, sender, self._group)

    def publish(self, tensor: Tensor) -> None:
        """Give every rank of the target what all ranks of the source have; it is overwritten there, in place."""
        import torch.distributed as dist

        if self.source.offset != self.target.offset:  # else the ranks are the same, and have it
            dist.broadcast(tensor, self.source.offset, self._group)

    def routes(self) -> Iterator[Route]:
        """What this rank sends and receives, in the one order that all ranks keep to."""
        source_stage, target_stage = self._stages
        for block in sorted({*self._own_blocks(self.source), *self._own_blocks(self.target)}):
            senders = self._holders(self.source, block, source_stage)
            receivers = self._holders(self.target, block, target_stage)
            for place, receiver in enumerate(receivers):
                sender = senders[place % len(senders)]
                if self.rank in (sender, receiver):
                    yield block, sender, receiver

    @property
    def _stages(self) -> tuple[int, int]:
        if self.backward:
            return 0, self.target.sizes["pp"] - 1
        return self.source.sizes["pp"] - 1, 0

    @property
    def _group(self) -> ProcessGroup:
        if self.group is None:
            what = f"rank {self.rank} is on neither of its grids"
            raise ServiceError(
                "A link cannot be used:", [Problem(f"link '{self.name}'", what, fix="use it there only")]
            )
        return self.group

    def _own_blocks(self, grid: RankGrid) -> range:
        place = grid.coordinates(self.rank)
        num = self.num_blocks // grid.sizes["dp"]
        return range(place["dp"] * num, (place["dp"] + 1) * num) if place else range(0)

    def _holders(self, grid: RankGrid, block: int, stage: int) -> tuple[int, ...]:
        """Ranks of a stage that have the same samples."""
        return grid.group_of(grid.rank_at(dp=block * grid.sizes["dp"] // self.num_blocks, pp=stage), "tp_cp")

    def _part(self, rows: Tensor | None, grid: RankGrid, block: int) -> Tensor:
        own = self._own_blocks(grid)
        if rows is None or len(rows) % len(own):
            got = "none" if rows is None else len(rows)
            what = f"rank {self.rank} needs rows that make {len(own)} equal blocks, and got {got}"
            raise ServiceError("A link cannot be used:", [Problem(f"link '{self.name}'", what, fix="give it all rows")])
        return rows.chunk(len(own))[block - own.start]
