"""Trains small tokenizers of every kind, and names their settings."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from runtime_di.providers.tokenizer.protocol import Tokenizer
from runtime_di.providers.tokenizer.service import open_tokenizer
from runtime_di.providers.tokenizer.settings import (
    ByteTokenizerSettings,
    FileTokenizerSettings,
    Gpt2BpeTokenizerSettings,
    NullTokenizerSettings,
    SentencePieceTokenizerSettings,
    TiktokenTokenizerSettings,
    WordPieceTokenizerSettings,
)
from runtime_di.settings.launch import LaunchSettings
from runtime_di.settings.section import Section

CORPUS = ["hello world", "the quick brown fox jumps over the lazy dog", "she sells sea shells", "Hello Über-world"]
TEXT = "hello quick world"
PATTERN = r"\s?\w+|\s+|[^\s\w]+"
RANKS = {bytes([value]): value for value in range(256)} | {b"he": 256, b"ll": 257, b"hell": 258, b" w": 259}
END = "<|endoftext|>"


def byte_level_bpe() -> tokenizers.Tokenizer:
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(CORPUS, trainer)
    return bpe


def word_pieces() -> list[str]:
    words = sorted({word for line in CORPUS for word in line.split()} | {"world", "uber", "-"})
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    return list(
        dict.fromkeys(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words, *letters, *("##" + c for c in letters)])
    )


def write_ranks(path: Path, ranks: Mapping[bytes, int]) -> None:
    lines = (base64.b64encode(token) + b" " + str(rank).encode() for token, rank in ranks.items())
    path.write_bytes(b"\n".join(lines) + b"\n")


def settings_of(kind: str, files: Path) -> Any:
    return {
        "file": FileTokenizerSettings(path=files),
        "gpt2_bpe": Gpt2BpeTokenizerSettings(vocab_file=files / "vocab.json", merges_file=files / "merges.txt"),
        "wordpiece": WordPieceTokenizerSettings(vocab_file=files / "vocab.txt"),
        "sentencepiece": SentencePieceTokenizerSettings(path=files / "spm.model"),
        "tiktoken": TiktokenTokenizerSettings(path=files / "ranks.tiktoken", pattern=PATTERN),
        "byte": ByteTokenizerSettings(),
        "null": NullTokenizerSettings(size=100),
    }[kind]


def file_tokenizer(
    folder: Path, edit: Callable[[tokenizers.Tokenizer], object] = lambda _: None, **sides: Any
) -> Tokenizer:
    """The tokenizer of a tokenizer.json as ``edit`` leaves it, with these side files beside it."""
    library = byte_level_bpe()
    edit(library)
    library.save(str(folder / "tokenizer.json"))
    for name, content in sides.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return open_tokenizer(FileTokenizerSettings(path=folder))


def problems_of(section: Section) -> list[tuple[str, str, str]]:
    found = ((need.field, need.lacking()) for need in section.requires(LaunchSettings()))
    return [(field, *lacking) for field, lacking in found if lacking is not None]


KINDS = ["file", "gpt2_bpe", "wordpiece", "sentencepiece", "tiktoken", "byte", "null"]
