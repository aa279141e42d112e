"""The training entrypoint."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from runtime_di.containers.worker import WorkerContainer, WorkerRuntime, WorkerSettings
from runtime_di.errors import Problem
from runtime_di.phases import Phase
from runtime_di.providers.checkpointer import Checkpointer, CheckpointSettings, open_checkpointer
from runtime_di.providers.microbatches import BatchSettings, MicrobatchCalculator, open_microbatches
from runtime_di.providers.timers import Timers, TimerSettings, open_timers
from runtime_di.section import Mark
from runtime_di.services import service


class TrainingSettings(WorkerSettings):
    """Settings of a training run."""

    checkpoint: Annotated[CheckpointSettings, Mark.NOT_PORTABLE] = CheckpointSettings()
    """Where the run saves, and what it starts from."""
    batch: BatchSettings = BatchSettings()
    """Samples a step."""
    timers: Annotated[TimerSettings, Mark.NOT_PORTABLE] = TimerSettings()
    """Timers of the training loop."""

    @property
    def data_parallel(self) -> int:
        """Ranks that see different samples."""
        return self.parallel.data(self.launch.world_size)

    def rules(self) -> Iterable[Problem]:
        yield from super().rules()
        if not list(self.parallel.problems(self.launch.world_size)):
            yield from self.batch.problems(self.data_parallel)


class TrainingContainer(WorkerContainer):
    """Services of a training run."""

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
    """What a training loop holds."""

    settings: TrainingSettings
    checkpointer: Checkpointer
    timers: Timers
    microbatches: MicrobatchCalculator
