"""The entrypoint of a model of several modules, such as one that sees and speaks, each on a grid of its own."""

from __future__ import annotations

from typing import Annotated, ClassVar

from runtime_di.containers.split import SplitContainer, SplitRuntime, SplitSettings
from runtime_di.providers.grid_settings import GridSettings, GridsSettings
from runtime_di.providers.tokenizer import TokenizerSettings
from runtime_di.section import Mark


class MimoGridsSettings(GridsSettings):
    """The modules: what vision makes of the samples is passed on to language."""

    links: ClassVar = {"activations": ("vision", "language")}

    vision: GridSettings = GridSettings()
    """Ranks of the module that sees."""
    language: GridSettings = GridSettings()
    """Ranks of the module that has the vocabulary and the loss."""


class MimoSettings(SplitSettings):
    """Settings of a run of several modules; samples come with tokens, so that no tokenizer is built by default."""

    leading: ClassVar = "language"

    grids: Annotated[MimoGridsSettings, Mark.NOT_PORTABLE] = MimoGridsSettings()
    """Ranks of each module."""
    tokenizer: TokenizerSettings | None = None
    """How text becomes tokens; without one, ``vocabulary`` or a checkpoint states the size of the vocabulary."""


class MimoContainer(SplitContainer):
    """Services of a run of several modules."""


class MimoRuntime(SplitRuntime, container=MimoContainer):
    """What a run of several modules holds."""

    settings: MimoSettings
