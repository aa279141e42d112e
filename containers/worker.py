"""What every process that joins a world with others has; the base of the entrypoints that train or generate."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

from runtime_di.errors import Problem
from runtime_di.phases import Phase
from runtime_di.providers.checkpoint_source import checkpoint_layers
from runtime_di.providers.checkpointer import CheckpointSettings, open_checkpointer
from runtime_di.providers.device import DeviceSettings, open_device
from runtime_di.providers.log import LogSettings, open_log
from runtime_di.providers.mesh import open_mesh
from runtime_di.providers.parallel import ParallelSettings
from runtime_di.providers.process_groups import ProcessGroups, open_process_groups
from runtime_di.providers.rng import Rng, RngSettings, open_rng
from runtime_di.providers.tokenizer import ByteTokenizerSettings, Tokenizer, TokenizerSettings, open_tokenizer
from runtime_di.providers.vocabulary import Vocabulary, VocabularySettings, resolve_vocabulary
from runtime_di.providers.world import DistributedSettings
from runtime_di.providers.writer import Writer, WriterSettings, open_writer
from runtime_di.runtime import Runtime
from runtime_di.section import Mark
from runtime_di.services import RuntimeContainer, service
from runtime_di.settings import RuntimeSettings
from runtime_di.sources import Layer

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from runtime_di.providers.checkpointer import Checkpointer


class WorkerSettings(RuntimeSettings):
    """Settings of a process among others."""

    parallel: Annotated[ParallelSettings, Mark.NOT_PORTABLE] = ParallelSettings()
    """How the world is split."""
    tokenizer: TokenizerSettings | None = ByteTokenizerSettings()
    """How text becomes tokens."""
    vocabulary: VocabularySettings = VocabularySettings()
    """Rows of the embedding."""
    rng: RngSettings = RngSettings()
    """Seeds."""
    log: Annotated[LogSettings, Mark.NOT_PORTABLE] = LogSettings()
    """The log on standard error."""
    writer: Annotated[WriterSettings, Mark.NOT_PORTABLE] = WriterSettings()
    """Metrics on disk."""
    device: Annotated[DeviceSettings, Mark.NOT_PORTABLE] = DeviceSettings()
    """The device of this rank."""
    distributed: Annotated[DistributedSettings, Mark.NOT_PORTABLE] = DistributedSettings()
    """torch.distributed."""
    checkpoint: Annotated[CheckpointSettings, Mark.NOT_PORTABLE] = CheckpointSettings()
    """Where the run saves, and what it starts from."""

    def rules(self) -> Iterable[Problem]:
        yield from self.parallel.problems(self.launch.world_size)
        yield from self.writer.problems(self.launch)

    @classmethod
    def checkpoint_layers(cls, stronger: Sequence[Layer]) -> Iterable[Layer]:
        return checkpoint_layers(cls, stronger)


class WorkerContainer(RuntimeContainer):
    """Services of a process among others."""

    settings = RuntimeContainer.settings
    tokenizer = service(Phase.TOKENIZER, open_tokenizer, settings.provided.tokenizer)
    vocabulary = service(
        Phase.VOCABULARY,
        resolve_vocabulary,
        settings.provided.vocabulary,
        settings.provided.parallel.tensor,
        settings.provided.checkpoint.start,
        tokenizer,
    )
    log = service(Phase.RUNTIME, open_log, settings.provided.log, settings.provided.launch, vocabulary)
    writer = service(
        Phase.RUNTIME, open_writer, settings.provided.writer, settings.provided.launch, settings.provided.shown
    )
    device = service(Phase.DISTRIBUTED, open_device, settings.provided.device, settings.provided.launch)
    process_groups = service(
        Phase.DISTRIBUTED,
        open_process_groups,
        settings.provided.distributed,
        settings.provided.parallel,
        settings.provided.launch,
        device,
    )
    mesh = service(Phase.DISTRIBUTED, open_mesh, process_groups)
    checkpointer = service(
        Phase.DISTRIBUTED,
        open_checkpointer,
        settings.provided.checkpoint,
        process_groups,
        vocabulary,
        settings.provided.portable,
    )
    rng = service(Phase.RNG, open_rng, settings.provided.rng, process_groups, device)


class WorkerRuntime(Runtime, container=WorkerContainer):
    """What a process among others holds."""

    settings: WorkerSettings
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    log: logging.Logger
    writer: Writer
    device: torch.device
    process_groups: ProcessGroups
    mesh: DeviceMesh
    checkpointer: Checkpointer
    rng: Rng
