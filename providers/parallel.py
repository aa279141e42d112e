"""How a job divides its ranks: the parallel sizes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pydantic import PositiveInt

from runtime_di.errors import Problem
from runtime_di.providers.grid_sizes import Order, size_problems
from runtime_di.providers.rank_grid import EmbeddingRule, RankGrid
from runtime_di.section import Section

_NAMES = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert", "etp": "expert_tensor"}


class ParallelSettings(Section):
    """Ranks along each axis; the data-parallel size is what is left of the world."""

    tensor: PositiveInt = 1
    """Ranks that share each layer."""
    pipeline: PositiveInt = 1
    """Stages that the layers are divided into."""
    context: PositiveInt = 1
    """Ranks that share each sequence."""
    expert: PositiveInt = 1
    """Ranks that the experts of a layer are divided over."""
    expert_tensor: PositiveInt | None = None
    """Ranks that share each expert; as many as share a layer unless set."""
    order: Order = "tp-cp-ep-dp-pp"
    """Axes of the world, fastest first: ranks of the first axis are neighbours."""

    def grid(self, world_size: int, embedding: EmbeddingRule | None = None) -> RankGrid:
        """Lay a world out.

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
        """Count the data-parallel ranks: those that see different samples."""
        return self.grid(world_size).sizes["dp"]

    def problems(self, world_size: int) -> Iterable[Problem]:
        """Tell which sizes do not fit a world, and the nearest that do; whoever knows the sources adds the values."""
        sizes = {axis: getattr(self, name) for axis, name in _NAMES.items()}
        found = size_problems(world_size, sizes, self.order, _NAMES, prefix="parallel.")
        return [replace(problem, value=None) for problem in found]
