"""The base of RL and MiMo: a training run whose world is divided among several grids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar

from runtime_di.containers.training import TrainingContainer, TrainingRuntime, TrainingSettings
from runtime_di.containers.worker import WorkerSettings
from runtime_di.errors import Problem
from runtime_di.phases import Phase
from runtime_di.plan import service
from runtime_di.providers.grids import Grids, GridsSettings, open_grids, open_module_rngs
from runtime_di.providers.process_groups import ParallelSettings, RankGrid
from runtime_di.providers.rng import RandomStreams
from runtime_di.settings import Mark


class SplitSettings(TrainingSettings):
    """Settings of a run on several grids, each with its own parallel sizes."""

    leading: ClassVar[str]
    """Name of the grid whose sizes pad the vocabulary and divide the global batch."""

    grids: Annotated[GridsSettings, Mark.NOT_PORTABLE] = GridsSettings()
    """Ranks and parallel sizes of each grid."""

    @property
    def layout(self) -> Mapping[str, RankGrid]:
        """Rank grid of each name."""
        return self.grids.layout(self.launch.world_size)

    @property
    def data_parallel(self) -> int:
        """Number of data-parallel ranks of the leading grid."""
        return self.layout[self.leading].sizes["dp"]

    @property
    def tensor_parallel(self) -> int:
        """Tensor-parallel size of the leading grid."""
        return self.grids.named[self.leading].parallel.tensor

    def rules(self) -> Iterable[Problem]:
        if self.parallel != ParallelSettings():
            fix = f"set grids.{self.leading}.parallel, and that of each other grid"
            yield Problem("parallel", "has no effect: each grid has its own parallel sizes", fix=fix)
        elif wrong := [*self.grids.problems(self.launch.world_size)]:
            yield from (*WorkerSettings.rules(self), *wrong)
        else:
            yield from super().rules()
            leading, *others = dict.fromkeys([self.data_parallel, *(grid.sizes["dp"] for grid in self.layout.values())])
            found = [*self.batch.problems(leading)]
            yield from (problem for other in others if not found for problem in self.batch.problems(other))


class SplitContainer(TrainingContainer):
    """Services of a run on several grids.

    Inherited from training.py and worker.py: TOKENIZER tokenizer; VOCABULARY vocabulary; RUNTIME log, writer, store,
    embedding, timers, microbatches; DISTRIBUTED device, process_groups, mesh, shard_mesh, expert_mesh, checkpointer;
    RNG rng. Declared here: DISTRIBUTED grids; RNG rngs.
    ``process_groups``, the meshes and ``rng`` are those of the undivided world; ``grids`` has each grid's own.
    """

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
    """The services of a run on several grids, as attributes."""

    settings: SplitSettings
    grids: Grids
    rngs: Mapping[str, RandomStreams]
