"""Corpus service: random windows of the token files that prepare_corpus.py writes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from runtime_di import LaunchSettings, Mark, Requirement, Section

if TYPE_CHECKING:
    from torch import Tensor

SPLITS = ("train", "validation")


@dataclass(frozen=True)
class CorpusFiles:
    """Requirement: a folder has the token file of every split."""

    field: str
    folder: Path

    def lacking(self) -> tuple[str, str] | None:
        if all((self.folder / f"{split}.bin").is_file() for split in SPLITS):
            return None
        return "has no corpus", "run examples/prepare_corpus.py, or name the folder that it wrote"


class CorpusSettings(Section):
    """Location of the token files."""

    folder: Annotated[Path, Mark.NOT_PORTABLE] = Path("runs/corpus")
    """Folder of train.bin and validation.bin, written by prepare_corpus.py."""

    def requires(self, launch: LaunchSettings) -> Iterable[Requirement]:
        return [CorpusFiles("folder", self.folder)]


class Corpus:
    """Random windows of the token files, which are memory-mapped."""

    def __init__(self, settings: CorpusSettings) -> None:
        import numpy as np

        self._tokens = {split: np.memmap(settings.folder / f"{split}.bin", dtype="<u2", mode="r") for split in SPLITS}

    def batch(self, split: str, seed: int, size: int, length: int) -> Tensor:
        """Read ``size`` windows of ``length + 1`` tokens, the same for equal seeds: (size, length + 1)."""
        import torch

        tokens = self._tokens[split]
        starts = torch.randint(len(tokens) - length, (size,), generator=torch.Generator().manual_seed(seed))
        return torch.stack([torch.from_numpy(tokens[start : start + length + 1].astype("int64")) for start in starts])
