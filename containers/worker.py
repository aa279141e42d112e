"""The base of the entrypoints that join a torch.distributed world: their common settings and services."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from dependency_injector import providers

from runtime_di.errors import Problem
from runtime_di.phases import Phase
from runtime_di.plan import RuntimeContainer, service
from runtime_di.providers.checkpoint import CheckpointLoader, LoadSettings, checkpoint_layers, open_checkpoint_loader
from runtime_di.providers.device import DeviceSettings, open_device
from runtime_di.providers.distributed import agreement_of, caller_provided_store
from runtime_di.providers.log import LogSettings, open_log
from runtime_di.providers.process_groups import (
    DistributedSettings,
    ParallelSettings,
    ProcessGroups,
    caller_provided_embedding,
    open_expert_mesh,
    open_mesh,
    open_process_groups,
    open_shard_mesh,
)
from runtime_di.providers.rng import Rng, RngSettings, open_rng
from runtime_di.providers.tokenizer import ByteTokenizerSettings, Tokenizer, TokenizerSettings, open_tokenizer
from runtime_di.providers.vocabulary import Vocabulary, VocabularySettings, resolve_vocabulary
from runtime_di.providers.writer import Writer, WriterSettings, open_writer
from runtime_di.runtime import Runtime
from runtime_di.settings import Layer, Mark, RuntimeSettings

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import Store

    from runtime_di.providers.process_groups import EmbeddingRule, RankGrid


class WorkerSettings(RuntimeSettings):
    """Settings of one rank of a world, common to training and inference."""

    parallel: Annotated[ParallelSettings, Mark.NOT_PORTABLE] = ParallelSettings()
    """Parallel sizes of the world."""
    tokenizer: TokenizerSettings | None = ByteTokenizerSettings()
    """Tokenizer of the run."""
    vocabulary: VocabularySettings = VocabularySettings()
    """Size and padding of the vocabulary."""
    rng: RngSettings = RngSettings()
    """Seeds and determinism."""
    log: Annotated[LogSettings, Mark.NOT_PORTABLE, Mark.PER_RANK] = LogSettings()
    """Log on standard error."""
    writer: Annotated[WriterSettings, Mark.NOT_PORTABLE] = WriterSettings()
    """Writers of metrics."""
    device: Annotated[DeviceSettings, Mark.NOT_PORTABLE] = DeviceSettings()
    """Device of this rank."""
    distributed: Annotated[DistributedSettings, Mark.NOT_PORTABLE] = DistributedSettings()
    """Backend and timeouts of torch.distributed."""
    checkpoint: Annotated[LoadSettings, Mark.NOT_PORTABLE] = LoadSettings()
    """Checkpoint that the run starts from."""

    @property
    def tensor_parallel(self) -> int:
        """Ranks over which the embedding is sharded."""
        return self.parallel.tensor

    @property
    def layout(self) -> Mapping[str, RankGrid]:
        """Rank grids that divide the world, by name; empty if the world is not divided."""
        return {}

    def rules(self) -> Iterable[Problem]:
        yield from self.parallel.problems(self.launch.world_size)
        yield from self.writer.problems(self.launch)

    @classmethod
    def checkpoint_layers(cls, stronger: Sequence[Layer]) -> Iterable[Layer]:
        return checkpoint_layers(cls, stronger)


class WorkerContainer(RuntimeContainer):
    """Services common to training and inference; nothing is inherited.

    Every phase up to RNG: TOKENIZER tokenizer; VOCABULARY vocabulary; RUNTIME log, writer, store, embedding;
    DISTRIBUTED device, process_groups, mesh, shard_mesh, expert_mesh, checkpointer (loads only); RNG rng.
    ``store`` and ``embedding`` are disabled unless the caller overrides them. ``agreement`` is not a service:
    it lists what the ranks compare before they join the world.
    """

    settings = RuntimeContainer.settings
    tokenizer = service(Phase.TOKENIZER, open_tokenizer, settings.provided.tokenizer)
    vocabulary = service(
        Phase.VOCABULARY,
        resolve_vocabulary,
        settings.provided.vocabulary,
        settings.provided.tensor_parallel,
        settings.provided.checkpoint.start,
        tokenizer,
    )
    log = service(Phase.RUNTIME, open_log, settings.provided.log, settings.provided.launch, vocabulary)
    writer = service(
        Phase.RUNTIME, open_writer, settings.provided.writer, settings.provided.launch, settings.provided.masked
    )
    store = service(Phase.RUNTIME, caller_provided_store)
    embedding = service(Phase.RUNTIME, caller_provided_embedding)
    agreement = providers.Factory(
        agreement_of, settings.provided.agreed, settings.provided.explain, RuntimeContainer.plan
    )
    device = service(Phase.DISTRIBUTED, open_device, settings.provided.device, settings.provided.launch)
    process_groups = service(
        Phase.DISTRIBUTED,
        open_process_groups,
        settings.provided.distributed,
        settings.provided.parallel,
        settings.provided.launch,
        device,
        store=store,
        embedding=embedding,
        grids=settings.provided.layout,
        agreement=agreement,
    )
    mesh = service(Phase.DISTRIBUTED, open_mesh, process_groups)
    shard_mesh = service(Phase.DISTRIBUTED, open_shard_mesh, process_groups)
    expert_mesh = service(Phase.DISTRIBUTED, open_expert_mesh, process_groups)
    checkpointer = service(
        Phase.DISTRIBUTED, open_checkpoint_loader, settings.provided.checkpoint, process_groups, vocabulary
    )
    rng = service(Phase.RNG, open_rng, settings.provided.rng, process_groups, device)


class WorkerRuntime(Runtime, container=WorkerContainer):
    """The services common to training and inference, as attributes."""

    settings: WorkerSettings
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    log: logging.Logger
    writer: Writer
    store: Store
    embedding: EmbeddingRule
    device: torch.device
    process_groups: ProcessGroups
    mesh: DeviceMesh
    shard_mesh: DeviceMesh
    expert_mesh: DeviceMesh
    checkpointer: CheckpointLoader
    rng: Rng
