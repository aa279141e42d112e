"""The byte tokenizer: bytes of UTF-8, without a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """Bytes of UTF-8; ids from 256 on have no text, and bytes that are not UTF-8 decode to U+FFFD."""

    NUM_BYTES: ClassVar[int] = 256
    size: int = NUM_BYTES + 2
    eod: int = NUM_BYTES
    pad: int | None = NUM_BYTES + 1

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(id_ for id_ in ids if id_ < self.NUM_BYTES).decode(errors="replace")
