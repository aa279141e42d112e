"""Rewrites a checkpoint: for another tensor-parallel size, or as one file of weights with the tokenizer beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import PositiveInt

from runtime_di.capabilities import WritableFolder
from runtime_di.providers.tokenizer_hugging_face import SIDE_FILES
from runtime_di.providers.tokenizer_settings import FileTokenizerSettings, TokenizerSettings
from runtime_di.section import Section

if TYPE_CHECKING:
    from runtime_di.capabilities import Requirement
    from runtime_di.launch import LaunchSettings
    from runtime_di.providers.vocabulary import Vocabulary


class ConversionSettings(Section):
    """What a checkpoint becomes."""

    folder: Path | None = None
    """The checkpoint to make; nothing may be there yet."""
    tensor: PositiveInt = 1
    """Tensor-parallel size that the vocabulary's rows are padded for."""
    single_file: bool = False
    """Keep the model's weights alone, by their own names in one model.safetensors; optimizer and random state go."""
    model: str = "trainer.model."
    """How the paths of the model's weights begin."""
    vocabulary_rows: tuple[str, ...] = ("*.embedding.weight*", "*.head.weight*")
    """Patterns of the paths of tensors with a row for each token, the optimizer's state for them included."""

    def requires(self, launch: LaunchSettings) -> Iterable[Requirement]:
        if self.folder is not None:
            yield NothingThere("folder", self.folder)
            yield WritableFolder("folder", self.folder.parent)


@dataclass(frozen=True, slots=True)
class NothingThere:
    """A path at which nothing is, so that nothing is overwritten."""

    field: str
    path: Path

    def lacking(self) -> tuple[str, str] | None:
        """Tell what is there."""
        if not self.path.exists() and not self.path.is_symlink():
            return None
        return f"there is something at {self.path} already, and nothing is overwritten", "give the path of a new folder"


class Converter(Protocol):
    """Rewrites the checkpoint that it was opened for."""

    def convert(self) -> Path:
        """Write the new checkpoint, complete or not at all, and return its folder; the old one stays as it is.

        Its settings name the tokenizer's files beside it; without a tokenizer, they name none of those that lay beside
        the old one.

        Tensors with a row for each token get the rows of `Vocabulary.padded_size`: those beyond are cut, and added
        ones repeat the last row if no token has it, else are zero. What is cut and could not be made again is kept
        aside in the new checkpoint, and comes back when that is converted back.

        Raises:
            CheckpointError: the checkpoint cannot be read, does not fit its own vocabulary, has more tokens than the
                wanted one, or the folder is there or cannot be made.
        """
        ...


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a tokenizer is opened from, as this machine sees the disk now.

    Attributes:
        named: field of its section to the file that it names.
        beside: files that are found beside those.
        rest: the fields that name no file.
    """

    named: Mapping[str, Path]
    beside: tuple[Path, ...]
    rest: Mapping[str, Any]


def open_converter(
    load: Path,
    folder: Path,
    settings: ConversionSettings,
    vocabulary: Vocabulary | None,
    tokenizer: TokenizerFiles | None,
    *,
    divisible_by: int,
) -> Converter:
    """Make the converter; nothing is read or written yet.

    Args:
        load: a checkpoint, or a folder of checkpoints, of which the latest is taken.
        folder: the checkpoint to make.
        settings: what it becomes.
        vocabulary: the rows that it gets; without one, rows stay as they are.
        tokenizer: files that are copied into it.
        divisible_by: what rows are padded by, told to runs that take their settings from the new checkpoint.
    """
    from runtime_di.providers.folder_converter import FolderConverter

    return FolderConverter(load, folder, settings, vocabulary, tokenizer, divisible_by=divisible_by)


def tokenizer_files(settings: TokenizerSettings) -> TokenizerFiles:
    """The files that a tokenizer is opened from."""
    named = {name: value for name, value in settings if isinstance(value, Path)}
    sides: tuple[str, ...] = ()
    if isinstance(settings, FileTokenizerSettings):
        named, sides = {"path": settings.file}, SIDE_FILES
    beside = (file.with_name(side) for file in named.values() for side in sides)
    rest = settings.model_dump(mode="json", exclude={*named})
    return TokenizerFiles(named, tuple(file for file in beside if file.exists()), rest)
