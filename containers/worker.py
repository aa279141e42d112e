"""What every process that joins a world with others has; the base of the entrypoints that train or generate."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from dependency_injector import providers

from runtime_di.errors import Problem
from runtime_di.phases import Phase
from runtime_di.providers.agreement import agreement_of
from runtime_di.providers.checkpoint_loader import CheckpointLoader, LoadSettings, open_checkpoint_loader
from runtime_di.providers.checkpoint_source import checkpoint_layers
from runtime_di.providers.device import DeviceSettings, open_device
from runtime_di.providers.given import no_embedding, no_store
from runtime_di.providers.log import LogSettings, open_log
from runtime_di.providers.mesh import open_expert_mesh, open_mesh, open_shard_mesh
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
    from torch.distributed.distributed_c10d import Store

    from runtime_di.providers.rank_grid import EmbeddingRule, RankGrid


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
    log: Annotated[LogSettings, Mark.NOT_PORTABLE, Mark.PER_RANK] = LogSettings()
    """The log on standard error."""
    writer: Annotated[WriterSettings, Mark.NOT_PORTABLE] = WriterSettings()
    """Metrics on disk."""
    device: Annotated[DeviceSettings, Mark.NOT_PORTABLE] = DeviceSettings()
    """The device of this rank."""
    distributed: Annotated[DistributedSettings, Mark.NOT_PORTABLE] = DistributedSettings()
    """torch.distributed."""
    checkpoint: Annotated[LoadSettings, Mark.NOT_PORTABLE] = LoadSettings()
    """What the run starts from."""

    @property
    def tensor_parallel(self) -> int:
        """Ranks that share the embedding."""
        return self.parallel.tensor

    @property
    def layout(self) -> Mapping[str, RankGrid]:
        """Grids that divide the world, by name."""
        return {}

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
        settings.provided.tensor_parallel,
        settings.provided.checkpoint.start,
        tokenizer,
    )
    log = service(Phase.RUNTIME, open_log, settings.provided.log, settings.provided.launch, vocabulary)
    writer = service(
        Phase.RUNTIME, open_writer, settings.provided.writer, settings.provided.launch, settings.provided.shown
    )
    store = service(Phase.RUNTIME, no_store)
    embedding = service(Phase.RUNTIME, no_embedding)
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
    """What a process among others holds."""

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
