"""What a training run has whose world is divided among several grids; the base of RL and MiMo."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar

from runtime_di.containers.training import TrainingContainer, TrainingRuntime, TrainingSettings
from runtime_di.containers.worker import WorkerSettings
from runtime_di.errors import Problem
from runtime_di.phases import Phase
from runtime_di.providers.grid_settings import GridsSettings
from runtime_di.providers.grids import Grids, open_grids
from runtime_di.providers.module_rngs import open_module_rngs
from runtime_di.providers.parallel import ParallelSettings
from runtime_di.providers.rank_grid import RankGrid
from runtime_di.providers.rng_streams import RandomStreams
from runtime_di.section import Mark
from runtime_di.services import service


class SplitSettings(TrainingSettings):
    """Settings of a run on several grids, each divided by sizes of its own."""

    leading: ClassVar[str]
    """The grid that has the vocabulary and takes the micro batches."""

    grids: Annotated[GridsSettings, Mark.NOT_PORTABLE] = GridsSettings()
    """Ranks of each grid."""

    @property
    def layout(self) -> Mapping[str, RankGrid]:
        """Grids by name."""
        return self.grids.layout(self.launch.world_size)

    @property
    def data_parallel(self) -> int:
        """Ranks of the leading grid that see different samples."""
        return self.layout[self.leading].sizes["dp"]

    @property
    def tensor_parallel(self) -> int:
        """Ranks of the leading grid that share the embedding."""
        return self.grids.named[self.leading].parallel.tensor

    def rules(self) -> Iterable[Problem]:
        if self.parallel != ParallelSettings():
            fix = f"set grids.{self.leading}.parallel, and that of each other grid"
            yield Problem("parallel", "divides no grid: each of them is divided by its own sizes", fix=fix)
        elif wrong := [*self.grids.problems(self.launch.world_size)]:
            yield from (*WorkerSettings.rules(self), *wrong)
        else:
            yield from super().rules()
            leading, *others = dict.fromkeys([self.data_parallel, *(grid.sizes["dp"] for grid in self.layout.values())])
            told = [*self.batch.problems(leading)]
            yield from (problem for other in others if not told for problem in self.batch.problems(other))


class SplitContainer(TrainingContainer):
    """Services of a run on several grids; ``process_groups`` and ``mesh`` are those of the undivided world."""

    grids = service(
        Phase.DISTRIBUTED,
        open_grids,
        TrainingContainer.settings.provided.grids,
        TrainingContainer.settings.provided.distributed,
        TrainingContainer.settings.provided.launch,
        TrainingContainer.process_groups,
        TrainingContainer.embedding,
    )
    rngs = service(
        Phase.RNG, open_module_rngs, TrainingContainer.settings.provided.rng, grids, TrainingContainer.device
    )


class SplitRuntime(TrainingRuntime, container=SplitContainer):
    """What a run on several grids holds."""

    settings: SplitSettings
    grids: Grids
    rngs: Mapping[str, RandomStreams]
