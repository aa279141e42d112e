"""Captions service: token ids of every number's caption, from the file that prepare_corpus.py writes."""

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
"""Tokens of a caption: one for each digit of the number, and the end-of-document token."""
CAPTIONS_FILE = "captions.bin"


@dataclass(frozen=True)
class CaptionsFile:
    """Requirement: a folder has the captions file."""

    field: str
    folder: Path

    def lacking(self) -> tuple[str, str] | None:
        if (self.folder / CAPTIONS_FILE).is_file():
            return None
        return f"has no {CAPTIONS_FILE}", "name the folder that examples/prepare_corpus.py wrote, or run it again"


class CaptionFileSettings(Section):
    """Location of the captions file."""

    folder: Annotated[Path, Mark.NOT_PORTABLE] = Path("runs/corpus")
    """Folder of captions.bin, written by prepare_corpus.py."""

    def requires(self, launch: LaunchSettings) -> Iterable[Requirement]:
        return [CaptionsFile("folder", self.folder)]


class Captions:
    """Captions of all numbers: memory-mapped token ids (10 ** NUM_DIGITS, CAPTION_LENGTH)."""

    def __init__(self, settings: CaptionFileSettings, vocabulary: Vocabulary) -> None:
        """Memory-map the file.

        Raises:
            VocabularyError: a caption has a token that is outside the vocabulary.
        """
        import numpy as np

        file = settings.folder / CAPTIONS_FILE
        self._tokens = np.memmap(file, dtype="<u2", mode="r", shape=(10**NUM_DIGITS, CAPTION_LENGTH))
        if (largest := int(self._tokens.max())) >= vocabulary.size:
            what = f"has the token {largest}, but the vocabulary of {vocabulary.origin} has {vocabulary.size} tokens"
            fix = "name the corpus that the checkpoint was trained on"
            raise VocabularyError(
                "The captions were written with another vocabulary.", [Problem(str(file), what, fix=fix)]
            )

    def tokens(self, numbers: Tensor) -> Tensor:
        """Look up the captions of numbers (sample,): token ids (sample, CAPTION_LENGTH)."""
        import torch

        return torch.from_numpy(self._tokens[numbers.numpy()].astype("int64"))
