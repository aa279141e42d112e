"""The null tokenizer: token ids written as numbers, for mock data and tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NullTokenizer:
    """Ids written as numbers between spaces; ``size`` includes the end of document, which is the last id."""

    size: int
    pad: None = None

    @property
    def eod(self) -> int:
        return self.size - 1

    def encode(self, text: str) -> list[int]:
        if wrong := [word for word in text.split() if not word.isdecimal() or int(word) >= self.size]:
            raise ValueError(f"the null tokenizer reads numbers below {self.size} between spaces, not {wrong[0]!r}")
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))
