"""The interface of a checkpoint converter."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class Converter(Protocol):
    """Converts the checkpoint for which it was opened."""

    def convert(self) -> Path:
        """Write the new checkpoint, complete or not at all, and return its folder; the old one stays unchanged.

        The settings of the new checkpoint name the tokenizer's files in its folder. Without a tokenizer, they name no
        file of the old checkpoint's folder.

        Tensors with one row a token get `Vocabulary.padded_size` rows. Rows beyond are cut. Added rows repeat the last
        row if no token has it, and else are zero. Cut rows that could not be computed again are stored beside the
        tensor in the new checkpoint, and are restored when that is converted back.

        Raises:
            CheckpointError: the checkpoint cannot be read, contradicts its own vocabulary or has more tokens than the
                new one, or the new folder exists or cannot be created.
        """
        ...
