"""Tokenizers of the Hugging Face ``tokenizers`` library: tokenizer.json, GPT-2's BPE and BERT's WordPiece."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime_di.providers.tokenizer.files import read_object, reading, tokenizer_file_error

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import tokenizers

    from runtime_di.errors import SettingsError
    from runtime_di.providers.tokenizer.settings import (
        FileTokenizerSettings,
        Gpt2BpeTokenizerSettings,
        WordPieceTokenizerSettings,
    )

GPT2_END = "<|endoftext|>"
BERT_TOKENS = ("[UNK]", "[SEP]", "[PAD]", "[CLS]", "[MASK]")
SIDE_FILES = ("tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True, slots=True)
class HuggingFaceTokenizer:
    """A tokenizer of the ``tokenizers`` library.

    It encodes texts one by one, without the library's batch calls: these start threads, which a process forked
    afterwards, such as a data loader's worker, would lack.
    """

    size: int
    eod: int
    pad: int | None
    backend: tokenizers.Tokenizer = field(repr=False)

    def encode(self, text: str) -> list[int]:
        return list(self.backend.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.backend.decode(list(ids), skip_special_tokens=False))


def open_file(settings: FileTokenizerSettings) -> HuggingFaceTokenizer:
    """Open a tokenizer.json; truncation and padding in the file are switched off, since training texts need neither."""
    from tokenizers import Tokenizer

    file = settings.file
    with reading("path", file):
        backend = Tokenizer.from_file(str(file))
    backend.no_truncation()
    backend.no_padding()
    eod = _side_id(backend, "eos_token", file) if settings.eod is None else backend.token_to_id(settings.eod)
    if eod is None:
        raise _no_eod(backend, settings, file)
    return _wrap(backend, eod, _side_id(backend, "pad_token", file))


def open_gpt2_bpe(settings: Gpt2BpeTokenizerSettings) -> HuggingFaceTokenizer:
    """Open GPT-2's byte-level BPE; its ids are those of the vocabulary file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = read_object("vocab_file", settings.vocab_file)
    if GPT2_END not in vocabulary:
        raise tokenizer_file_error(
            "vocab_file", f"{settings.vocab_file} has no {GPT2_END}, so the end of a document is unknown"
        )
    with reading("vocab_file", settings.vocab_file):
        models.BPE(vocabulary, [])
    with reading("merges_file", settings.merges_file):
        backend = Tokenizer(models.BPE.from_file(str(settings.vocab_file), str(settings.merges_file)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([GPT2_END])
    return _wrap(backend, vocabulary[GPT2_END], None)


def open_wordpiece(settings: WordPieceTokenizerSettings) -> HuggingFaceTokenizer:
    """Open BERT's WordPiece; encoding adds neither ``[CLS]`` nor ``[SEP]``."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    with reading("vocab_file", settings.vocab_file):
        vocabulary = models.WordPiece.read_file(str(settings.vocab_file))
    if missing := [token for token in ("[UNK]", "[SEP]") if token not in vocabulary]:
        raise tokenizer_file_error(
            "vocab_file", f"{settings.vocab_file} has no {' and no '.join(missing)}, which WordPiece needs"
        )
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))  # noqa: S106 - a token, not a secret
    backend.normalizer = normalizers.BertNormalizer(lowercase=settings.lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([token for token in BERT_TOKENS if token in vocabulary])
    return _wrap(backend, vocabulary["[SEP]"], vocabulary.get("[PAD]"))


def _wrap(backend: tokenizers.Tokenizer, eod: int, pad: int | None) -> HuggingFaceTokenizer:
    """Wrap the backend with the highest id plus 1 as its size: an embedding needs that row, even if ids are unused."""
    return HuggingFaceTokenizer(1 + max(backend.get_vocab(with_added_tokens=True).values()), eod, pad, backend)


def _side_id(backend: tokenizers.Tokenizer, role: str, file: Path) -> int | None:
    """Return the id of the token that a file beside tokenizer.json names for a role, or ``None`` if no file does."""
    for side in (file.parent / name for name in SIDE_FILES):
        token = read_object("path", side).get(role) if side.exists() else None
        token = token.get("content") if isinstance(token, dict) else token
        if token is None:
            continue
        found = backend.token_to_id(token) if isinstance(token, str) else None
        if found is None:
            what = f"{side} names the {role} {token!r}, which is not a token of {file}"
            raise tokenizer_file_error("path", what, f"correct {side.name}, or add the token to {file.name}")
        return int(found)
    return None


def _no_eod(backend: tokenizers.Tokenizer, settings: FileTokenizerSettings, file: Path) -> SettingsError:
    special = [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
    fix = f"set tokenizer.eod to a token of {file.name}" + (f", such as {', '.join(special[:5])}" if special else "")
    if settings.eod is not None:
        return tokenizer_file_error("eod", f"{file} has no token {settings.eod!r}", fix)
    return tokenizer_file_error(
        "path", f"nothing beside {file} names an eos_token, so the end of a document is unknown", fix
    )
