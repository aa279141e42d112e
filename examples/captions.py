"""The captions of numbers, as the tokens that prepare_corpus.py made of them, as a service."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from runtime_di import LaunchSettings, Mark, Problem, Requirement, Section, VocabularyError
from runtime_di.providers.vocabulary import Vocabulary

if TYPE_CHECKING:
    from torch import Tensor

NUM_DIGITS = 4
CAPTION_LENGTH = NUM_DIGITS + 1
"""Tokens of a caption: the digits of a number, and the end of a document."""
CAPTIONS_FILE = "captions.bin"


@dataclass(frozen=True)
class PreparedCaptions:
    """The file of captions in a folder."""

    field: str
    folder: Path

    def lacking(self) -> tuple[str, str] | None:
        if (self.folder / CAPTIONS_FILE).is_file():
            return None
        return f"holds no {CAPTIONS_FILE}", "name the folder that examples/prepare_corpus.py made, or make it anew"


class CaptionFileSettings(Section):
    """Where the captions are."""

    folder: Annotated[Path, Mark.NOT_PORTABLE] = Path("runs/corpus")
    """Folder of captions.bin, made by prepare_corpus.py."""

    def requires(self, launch: LaunchSettings) -> Iterable[Requirement]:
        return [PreparedCaptions("folder", self.folder)]


class Captions:
    """What each number is called: token ids (10 ** NUM_DIGITS, CAPTION_LENGTH), which stay on the disk."""

    def __init__(self, settings: CaptionFileSettings, vocabulary: Vocabulary) -> None:
        """Map the file.

        Raises:
            VocabularyError: the vocabulary lacks a token of the captions.
        """
        import numpy as np

        file = settings.folder / CAPTIONS_FILE
        self._tokens = np.memmap(file, dtype="<u2", mode="r", shape=(10**NUM_DIGITS, CAPTION_LENGTH))
        if (largest := int(self._tokens.max())) >= vocabulary.size:
            what = f"has the token {largest}, and the vocabulary of {vocabulary.origin} {vocabulary.size} tokens"
            fix = "name the corpus that the checkpoint was trained on"
            raise VocabularyError("The captions are of another vocabulary.", [Problem(str(file), what, fix=fix)])

    def of(self, numbers: Tensor) -> Tensor:
        """Token ids of some numbers: (sample,) to (sample, CAPTION_LENGTH)."""
        import torch

        return torch.from_numpy(self._tokens[numbers.numpy()].astype("int64"))
