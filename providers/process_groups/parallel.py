"""Settings of the parallel sizes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pydantic import PositiveInt

from runtime_di.errors import Problem
from runtime_di.providers.process_groups.rank_grid import EmbeddingRule, RankGrid
from runtime_di.providers.process_groups.sizes import Order, size_problems
from runtime_di.settings.section import Section

_NAMES = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert", "etp": "expert_tensor"}


class ParallelSettings(Section):
    """Ranks along each axis; the data-parallel size follows from the world size."""

    tensor: PositiveInt = 1
    """Ranks that share each layer."""
    pipeline: PositiveInt = 1
    """Stages that divide the layers among them."""
    context: PositiveInt = 1
    """Ranks that share each sequence."""
    expert: PositiveInt = 1
    """Ranks that divide the experts of a layer among them."""
    expert_tensor: PositiveInt | None = None
    """Ranks that share each expert; ``tensor`` unless set."""
    order: Order = "tp-cp-ep-dp-pp"
    """Axes of the world, fastest first: ranks along the first axis are consecutive."""

    def grid(self, world_size: int, embedding: EmbeddingRule | None = None) -> RankGrid:
        """Lay out a world of this size.

        Raises:
            SettingsError: the sizes do not fit the world.
        """
        return RankGrid(
            world_size=world_size,
            tp=self.tensor,
            pp=self.pipeline,
            cp=self.context,
            ep=self.expert,
            etp=self.expert_tensor,
            order=self.order,
            embedding=embedding,
        )

    def data(self, world_size: int) -> int:
        """Return the data-parallel size: the number of ranks with different samples."""
        return self.grid(world_size).sizes["dp"]

    def problems(self, world_size: int) -> Iterable[Problem]:
        """Report sizes that do not fit a world, and the nearest that do; the caller adds values and sources."""
        sizes = {axis: getattr(self, name) for axis, name in _NAMES.items()}
        found = size_problems(world_size, sizes, self.order, _NAMES, prefix="parallel.")
        return [replace(problem, value=None) for problem in found]
