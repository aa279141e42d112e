"""Opens the checkpoint converter."""

from __future__ import annotations

from pathlib import Path

from runtime_di.providers.converter.protocol import Converter
from runtime_di.providers.converter.settings import ConversionSettings
from runtime_di.providers.converter.tokenizer_files import TokenizerFiles
from runtime_di.providers.vocabulary import Vocabulary


def open_converter(
    load: Path,
    folder: Path,
    settings: ConversionSettings,
    vocabulary: Vocabulary | None,
    tokenizer: TokenizerFiles | None,
    *,
    divisible_by: int,
) -> Converter:
    """Create the converter; nothing is read or written yet.

    It pads a checkpoint for another tensor-parallel size, or reduces it to one file of weights with the tokenizer's
    files beside it.

    Args:
        load: a checkpoint, or a folder of checkpoints, of which the latest is converted.
        folder: the new checkpoint's folder.
        settings: the form into which the checkpoint is converted.
        vocabulary: sizes of the new vocabulary; without one, all rows stay as they are.
        tokenizer: files that are copied into the new checkpoint.
        divisible_by: padding unit of the rows, recorded for runs that take their settings from the new checkpoint.
    """
    from runtime_di.providers.converter.folder import FolderConverter

    return FolderConverter(load, folder, settings, vocabulary, tokenizer, divisible_by=divisible_by)
