"""The index of a checkpoint: its tensors and the files that contain them, as JSON checked against a schema."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field, NonNegativeInt, TypeAdapter

from runtime_di.providers.checkpoint.format.folder import sync
from runtime_di.providers.checkpoint.format.snapshot import malformed

_FILE = "tensors.json"
Sizes = list[NonNegativeInt]


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of a tensor, and the entry of a safetensors file that contains it."""

    offsets: Sizes
    sizes: Sizes
    file: Annotated[str, Field(pattern=r"^[\w-]+\.safetensors$")]
    name: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A whole tensor, and the blocks in which it is saved."""

    dtype: str
    size: Sizes
    pieces: list[Piece]

    def __post_init__(self) -> None:
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"unknown dtype {self.dtype!r}")
        inside = all(
            len(piece.offsets) == len(piece.sizes) == len(self.size)
            and all(o + n <= size for o, n, size in zip(piece.offsets, piece.sizes, self.size, strict=True))
            for piece in self.pieces
        )
        if not inside or sum(math.prod(piece.sizes) for piece in self.pieces) != math.prod(self.size):
            raise ValueError(f"pieces do not make up a tensor of size {self.size}")


Index = dict[str, Entry]
"""Path of each tensor to its entry."""
_INDEX: TypeAdapter[Index] = TypeAdapter(Index)


def read_index(folder: Path) -> Index:
    """Read the index of a checkpoint.

    Raises:
        CheckpointError: the index cannot be read, or is malformed.
    """
    file = folder / _FILE
    try:
        return _INDEX.validate_json(file.read_bytes(), strict=True)
    except (OSError, ValueError) as error:
        raise malformed(file, error) from error


def write_index(folder: Path, index: Index) -> None:
    """Write a checkpoint's index to stable storage."""
    file = folder / _FILE
    file.write_bytes(_INDEX.dump_json(index))
    sync(file)
