"""The tokenizer: text to token ids and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from runtime_di.providers.tokenizer_hugging_face import open_file, open_gpt2_bpe, open_wordpiece
from runtime_di.providers.tokenizer_sentencepiece import open_sentencepiece
from runtime_di.providers.tokenizer_settings import (
    ByteTokenizerSettings,
    FileTokenizerSettings,
    Gpt2BpeTokenizerSettings,
    NullTokenizerSettings,
    SentencePieceTokenizerSettings,
    TiktokenTokenizerSettings,
    TokenizerSettings,
    WordPieceTokenizerSettings,
)
from runtime_di.providers.tokenizer_tiktoken import open_tiktoken

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "ByteTokenizer",
    "ByteTokenizerSettings",
    "FileTokenizerSettings",
    "Gpt2BpeTokenizerSettings",
    "NullTokenizer",
    "NullTokenizerSettings",
    "SentencePieceTokenizerSettings",
    "TiktokenTokenizerSettings",
    "Tokenizer",
    "TokenizerSettings",
    "WordPieceTokenizerSettings",
    "open_tokenizer",
]


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def size(self) -> int:
        """Tokens, added and special ones included: one more than the highest id."""
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


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """Bytes of UTF-8; ids from 256 on have no text, and bytes that are no UTF-8 decode to U+FFFD."""

    NUM_BYTES: ClassVar[int] = 256
    size: int = NUM_BYTES + 2
    eod: int = NUM_BYTES
    pad: int | None = NUM_BYTES + 1

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(id_ for id_ in ids if id_ < self.NUM_BYTES).decode(errors="replace")


@dataclass(frozen=True, slots=True)
class NullTokenizer:
    """Ids written as numbers between spaces; ``size`` counts the end of document, its last id."""

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


def open_tokenizer(settings: TokenizerSettings) -> Tokenizer:  # noqa: PLR0911 - one kind a line
    """Open the tokenizer of any kind, from local files alone.

    Raises:
        SettingsError: a file cannot be read as what its kind says, or nothing tells the end of a document.
    """
    match settings:
        case FileTokenizerSettings():
            return open_file(settings)
        case Gpt2BpeTokenizerSettings():
            return open_gpt2_bpe(settings)
        case WordPieceTokenizerSettings():
            return open_wordpiece(settings)
        case SentencePieceTokenizerSettings():
            return open_sentencepiece(settings)
        case TiktokenTokenizerSettings():
            return open_tiktoken(settings)
        case ByteTokenizerSettings():
            return ByteTokenizer()
        case NullTokenizerSettings():
            return NullTokenizer(settings.size)
