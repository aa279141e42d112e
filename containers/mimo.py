"""The MiMo entrypoint: the services of split.py for a model of several modules, each on its own grid."""

from __future__ import annotations

from typing import Annotated, ClassVar

from runtime_di.containers.split import SplitContainer, SplitRuntime, SplitSettings
from runtime_di.providers.grids import GridSettings, GridsSettings
from runtime_di.providers.tokenizer import TokenizerSettings
from runtime_di.settings import Mark


class MimoGridsSettings(GridsSettings):
    """The grids of the modules; vision sends its activations to language."""

    links: ClassVar = {"activations": ("vision", "language")}

    vision: GridSettings = GridSettings()
    """Ranks of the vision module."""
    language: GridSettings = GridSettings()
    """Ranks of the language module, which has the vocabulary and the loss."""


class MimoSettings(SplitSettings):
    """Settings of a run of several modules; samples contain token ids, so the tokenizer is disabled by default."""

    leading: ClassVar = "language"

    grids: Annotated[MimoGridsSettings, Mark.NOT_PORTABLE] = MimoGridsSettings()
    """Ranks and parallel sizes of each module."""
    tokenizer: TokenizerSettings | None = None
    """Tokenizer of the run; without one, the vocabulary's size comes from ``vocabulary`` or a checkpoint."""


class MimoContainer(SplitContainer):
    """Services of a run of several modules.

    Inherited from split.py, training.py and worker.py: TOKENIZER tokenizer (disabled by default); VOCABULARY
    vocabulary; RUNTIME log, writer, store, embedding, timers, microbatches; DISTRIBUTED device, process_groups, mesh,
    shard_mesh, expert_mesh, checkpointer, grids; RNG rng, rngs. Nothing is declared here.
    """


class MimoRuntime(SplitRuntime, container=MimoContainer):
    """The services of a run of several modules, as attributes."""

    settings: MimoSettings
