"""The converter entrypoint: one process on the CPU, without tokenizer, torch.distributed, seeds and writers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Annotated

from runtime_di.errors import Problem
from runtime_di.phases import Phase
from runtime_di.plan import RuntimeContainer, service
from runtime_di.providers.checkpoint import LoadSettings, checkpoint_layers
from runtime_di.providers.converter import (
    ConversionSettings,
    Converter,
    TokenizerFiles,
    open_converter,
    tokenizer_files,
)
from runtime_di.providers.log import LogSettings, open_log
from runtime_di.providers.tokenizer import TokenizerSettings
from runtime_di.providers.vocabulary import Vocabulary, VocabularySettings, resolve_vocabulary
from runtime_di.runtime import Runtime
from runtime_di.settings import Layer, Mark, RuntimeSettings


class ConverterSettings(RuntimeSettings):
    """Settings of a conversion."""

    checkpoint: Annotated[LoadSettings, Mark.NOT_PORTABLE] = LoadSettings()
    """Checkpoint to convert."""
    conversion: Annotated[ConversionSettings, Mark.NOT_PORTABLE] = ConversionSettings()
    """Format and folder of the result."""
    vocabulary: VocabularySettings = VocabularySettings()
    """Size and padding of the vocabulary; from the checkpoint unless set."""
    tokenizer: TokenizerSettings | None = None
    """Tokenizer whose files are copied to the result; it is never opened."""
    log: Annotated[LogSettings, Mark.NOT_PORTABLE] = LogSettings()
    """Log on standard error."""

    @property
    def tokenizer_files(self) -> TokenizerFiles | None:
        """Paths of the tokenizer's files on this machine's disk."""
        return None if self.tokenizer is None else tokenizer_files(self.tokenizer)

    def rules(self) -> Iterable[Problem]:
        if self.launch.world_size > 1:
            yield Problem("launch.world_size", "a conversion runs in one process", fix="start it without torchrun")

    @classmethod
    def checkpoint_layers(cls, stronger: Sequence[Layer]) -> Iterable[Layer]:
        return checkpoint_layers(cls, stronger)


class ConverterContainer(RuntimeContainer):
    """Services of a conversion; nothing is inherited.

    VOCABULARY vocabulary; RUNTIME log, converter.
    """

    settings = RuntimeContainer.settings
    vocabulary = service(
        Phase.VOCABULARY,
        resolve_vocabulary,
        settings.provided.vocabulary,
        settings.provided.conversion.tensor,
        settings.provided.checkpoint.start,
        tokenizer=None,
    )
    log = service(Phase.RUNTIME, open_log, settings.provided.log, settings.provided.launch, vocabulary)
    converter = service(
        Phase.RUNTIME,
        open_converter,
        settings.provided.checkpoint.load,
        settings.provided.conversion.folder,
        settings.provided.conversion,
        vocabulary,
        settings.provided.tokenizer_files,
        divisible_by=settings.provided.vocabulary.divisible_by,
    )


class ConverterRuntime(Runtime, container=ConverterContainer):
    """The services of a conversion, as attributes."""

    settings: ConverterSettings
    vocabulary: Vocabulary
    log: logging.Logger
    converter: Converter
