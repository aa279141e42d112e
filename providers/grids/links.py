"""Links between two grids: they transfer rows of samples, and weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from runtime_di.errors import Problem, ServiceError
from runtime_di.providers.process_groups.rank_grid import RankGrid

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.distributed_c10d import ProcessGroup

Route: TypeAlias = tuple[int, int, int]
"""A block of samples, the rank that sends it, and a rank that receives it."""


@dataclass(frozen=True)
class Link:
    """A group of the ranks of two grids, of which one sends to the other.

    Each grid divides the samples in order among its data-parallel ranks; one data-parallel size is a multiple of the
    other. The last pipeline stage of the source sends, and the first of the target receives.
    """

    name: str
    source: RankGrid
    target: RankGrid
    rank: int
    group: ProcessGroup | None = None
    backward: bool = False

    @property
    def back(self) -> Link:
        """The link in the other direction, for gradients: the stage that received rows sends."""
        return Link(self.name, self.target, self.source, self.rank, self.group, not self.backward)

    @property
    def num_blocks(self) -> int:
        """Blocks that the samples of a step are split into; each has one data-parallel rank on either side."""
        return max(self.source.sizes["dp"], self.target.sizes["dp"])

    def carry(self, rows: Tensor | None, into: Tensor | None) -> None:
        """Send each sample's rows to the ranks that need them; call it on every rank of both grids.

        Args:
            rows: of this rank's samples, along the first dim, on the ranks that send.
            into: filled with the rows of this rank's samples, on the ranks that receive.

        Raises:
            ServiceError: this rank sends or receives, and ``rows`` or ``into`` is missing or does not split evenly.
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
        """Broadcast a tensor that is equal on all ranks of the source; on the target it is overwritten in place."""
        import torch.distributed as dist

        if self.source.offset != self.target.offset:  # otherwise both grids have the same ranks
            dist.broadcast(tensor, self.source.offset, self._group)

    def routes(self) -> Iterator[Route]:
        """List what this rank sends and receives, in the same order on all ranks."""
        source_stage, target_stage = self._stages
        for block in sorted({*self._own_blocks(self.source), *self._own_blocks(self.target)}):
            senders = self._replicas(self.source, block, source_stage)
            receivers = self._replicas(self.target, block, target_stage)
            for index, receiver in enumerate(receivers):
                sender = senders[index % len(senders)]
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
                "A link cannot be used:",
                [Problem(f"link '{self.name}'", what, fix="use it on their ranks only")],
            )
        return self.group

    def _own_blocks(self, grid: RankGrid) -> range:
        coordinates = grid.coordinates(self.rank)
        num = self.num_blocks // grid.sizes["dp"]
        return range(coordinates["dp"] * num, (coordinates["dp"] + 1) * num) if coordinates else range(0)

    def _replicas(self, grid: RankGrid, block: int, stage: int) -> tuple[int, ...]:
        """Ranks of a stage that have the samples of a block."""
        return grid.group_of(grid.rank_at(dp=block * grid.sizes["dp"] // self.num_blocks, pp=stage), "tp_cp")

    def _part(self, rows: Tensor | None, grid: RankGrid, block: int) -> Tensor:
        own = self._own_blocks(grid)
        if rows is None or len(rows) % len(own):
            got = "none" if rows is None else len(rows)
            what = f"rank {self.rank} needs rows that split into {len(own)} equal blocks, and got {got}"
            raise ServiceError("A link cannot be used:", [Problem(f"link '{self.name}'", what, fix="pass all rows")])
        return rows.chunk(len(own))[block - own.start]
