"""The files of a tokenizer, which a conversion copies into the new checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime_di.providers.tokenizer.hugging_face import SIDE_FILES
from runtime_di.providers.tokenizer.settings import FileTokenizerSettings, TokenizerSettings


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The files from which a tokenizer is opened, as this machine sees the disk now.

    Attributes:
        named: field of the tokenizer section to the file that it names.
        beside: files found beside those.
        rest: the fields that name no file.
    """

    named: Mapping[str, Path]
    beside: tuple[Path, ...]
    rest: Mapping[str, Any]


def tokenizer_files(settings: TokenizerSettings) -> TokenizerFiles:
    """Return the files from which a tokenizer is opened."""
    named = {name: value for name, value in settings if isinstance(value, Path)}
    sides: tuple[str, ...] = ()
    if isinstance(settings, FileTokenizerSettings):
        named, sides = {"path": settings.file}, SIDE_FILES
    beside = (file.with_name(side) for file in named.values() for side in sides)
    rest = settings.model_dump(mode="json", exclude={*named})
    return TokenizerFiles(named, tuple(file for file in beside if file.exists()), rest)
