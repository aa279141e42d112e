"""The interface of tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def size(self) -> int:
        """Number of tokens, added and special ones included: the highest id plus 1."""
        ...

    @property
    def eod(self) -> int:
        """Id that ends a document."""
        ...

    @property
    def pad(self) -> int | None:
        """Id that pads, or ``None`` if there is none."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""
        ...
