"""The training entrypoint: the services of worker.py, and what a training loop needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from runtime_di.containers.worker import WorkerContainer, WorkerRuntime, WorkerSettings
from runtime_di.errors import Problem
from runtime_di.phases import Phase
from runtime_di.plan import service
from runtime_di.providers.checkpoint import Checkpointer, CheckpointSettings, open_checkpointer
from runtime_di.providers.microbatches import BatchSettings, MicrobatchCalculator, open_microbatches
from runtime_di.providers.timers import Timers, TimerSettings, open_timers
from runtime_di.settings import Mark


class TrainingSettings(WorkerSettings):
    """Settings of a training run."""

    checkpoint: Annotated[CheckpointSettings, Mark.NOT_PORTABLE] = CheckpointSettings()
    """Folder that the run saves to, and checkpoint that it starts from."""
    batch: BatchSettings = BatchSettings()
    """Batch sizes of a step."""
    timers: Annotated[TimerSettings, Mark.NOT_PORTABLE] = TimerSettings()
    """Timers of the training loop."""

    @property
    def data_parallel(self) -> int:
        """Number of data-parallel ranks."""
        return self.parallel.data(self.launch.world_size)

    def rules(self) -> Iterable[Problem]:
        yield from super().rules()
        if not list(self.parallel.problems(self.launch.world_size)):
            yield from self.batch.problems(self.data_parallel)


class TrainingContainer(WorkerContainer):
    """Services of a training run.

    Inherited from worker.py: TOKENIZER tokenizer; VOCABULARY vocabulary; RUNTIME log, writer, store, embedding;
    DISTRIBUTED device, process_groups, mesh, shard_mesh, expert_mesh; RNG rng.
    Declared here: RUNTIME timers, microbatches; DISTRIBUTED checkpointer, which saves, in place of the loader.
    """

    checkpointer = service(
        Phase.DISTRIBUTED,
        open_checkpointer,
        WorkerContainer.settings.provided.checkpoint,
        WorkerContainer.process_groups,
        WorkerContainer.vocabulary,
        WorkerContainer.settings.provided.portable,
        WorkerContainer.settings.provided.layout,
    )
    timers = service(Phase.RUNTIME, open_timers, WorkerContainer.settings.provided.timers)
    microbatches = service(
        Phase.RUNTIME,
        open_microbatches,
        WorkerContainer.settings.provided.batch,
        WorkerContainer.settings.provided.data_parallel,
    )


class TrainingRuntime(WorkerRuntime, container=TrainingContainer):
    """The services of a training run, as attributes."""

    settings: TrainingSettings
    checkpointer: Checkpointer
    timers: Timers
    microbatches: MicrobatchCalculator
