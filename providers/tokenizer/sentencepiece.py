"""The tokenizer that a SentencePiece model defines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime_di.providers.tokenizer.files import reading, tokenizer_file_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sentencepiece import SentencePieceProcessor

    from runtime_di.providers.tokenizer.settings import SentencePieceTokenizerSettings


@dataclass(frozen=True, slots=True)
class SentencePieceTokenizer:
    """A SentencePiece model; encoding adds neither a beginning nor an end of sentence."""

    size: int
    eod: int
    pad: int | None
    backend: SentencePieceProcessor = field(repr=False)

    def encode(self, text: str) -> list[int]:
        return list(self.backend.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.backend.decode(list(ids)))


def open_sentencepiece(settings: SentencePieceTokenizerSettings) -> SentencePieceTokenizer:
    """Open a .model file."""
    from sentencepiece import SentencePieceProcessor

    with reading("path", settings.path):
        backend = SentencePieceProcessor(model_file=str(settings.path))
    if backend.eos_id() < 0:
        what = f"{settings.path} has no end-of-sentence piece, so the end of a document is unknown"
        raise tokenizer_file_error("path", what, "train the model with an eos_id, or name another model")
    pad = backend.pad_id()
    return SentencePieceTokenizer(backend.get_piece_size(), backend.eos_id(), pad if pad >= 0 else None, backend)
