"""Settings of tokenizers, one section a kind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from runtime_di.settings.capabilities import Module, ReadableFile, Requirement
from runtime_di.settings.section import Section

if TYPE_CHECKING:
    from collections.abc import Iterable

    from runtime_di.settings.launch import LaunchSettings


class FileTokenizerSettings(Section):
    """A Hugging Face ``tokenizer.json``, with the files beside it."""

    kind: Literal["file"] = "file"
    path: Path
    """The tokenizer.json, or its folder."""
    eod: str | None = None
    """Token that ends a document; by default the eos_token that the files beside tokenizer.json name."""

    @property
    def file(self) -> Path:
        """Path of the tokenizer.json itself; checks on the file system whether ``path`` is a folder."""
        return self.path / "tokenizer.json" if self.path.is_dir() else self.path

    def requires(self, launch: LaunchSettings) -> Iterable[Requirement]:
        yield ReadableFile("path", self.file)


class Gpt2BpeTokenizerSettings(Section):
    """The byte-level BPE of GPT-2; ``<|endoftext|>`` ends a document."""

    kind: Literal["gpt2_bpe"] = "gpt2_bpe"
    vocab_file: Path
    """The vocab.json."""
    merges_file: Path
    """The merges.txt."""

    def requires(self, launch: LaunchSettings) -> Iterable[Requirement]:
        yield ReadableFile("vocab_file", self.vocab_file)
        yield ReadableFile("merges_file", self.merges_file)


class WordPieceTokenizerSettings(Section):
    """The WordPiece of BERT; ``[SEP]`` ends a document."""

    kind: Literal["wordpiece"] = "wordpiece"
    vocab_file: Path
    """The vocab.txt, one token a line."""
    lowercase: bool = True
    """Whether the vocabulary is lower-case: if so, encoding drops case and accents."""

    def requires(self, launch: LaunchSettings) -> Iterable[Requirement]:
        yield ReadableFile("vocab_file", self.vocab_file)


class SentencePieceTokenizerSettings(Section):
    """A SentencePiece model; its end-of-sentence piece ends a document."""

    kind: Literal["sentencepiece"] = "sentencepiece"
    path: Path
    """The .model file."""

    def requires(self, launch: LaunchSettings) -> Iterable[Requirement]:
        yield Module("kind", "sentencepiece", extra="sentencepiece")
        yield ReadableFile("path", self.path)


class TiktokenTokenizerSettings(Section):
    """A tiktoken vocabulary, preceded by Megatron's special tokens; ``</s>`` ends a document."""

    kind: Literal["tiktoken"] = "tiktoken"
    path: Path
    """The ranks file: one token in base64 and its rank a line."""
    pattern: str
    """Regular expression that splits a text before its bytes are merged."""
    num_special_tokens: Annotated[int, Field(ge=3)] = 1000
    """Ids before the ranks: <unk>, <s>, </s>, then <SPECIAL_3> and so on."""
    size: PositiveInt | None = None
    """Number of tokens, special ones included; further ranks are dropped. By default all ranks of the file are used."""

    def requires(self, launch: LaunchSettings) -> Iterable[Requirement]:
        yield Module("kind", "tiktoken", extra="tiktoken")
        yield ReadableFile("path", self.path)

    @model_validator(mode="after")
    def _size_exceeds_the_special_tokens(self) -> Self:
        if self.size is not None and self.size <= self.num_special_tokens:
            raise ValueError(
                f"size {self.size} must be larger than num_special_tokens {self.num_special_tokens}: "
                "raise size, or lower num_special_tokens"
            )
        return self


class ByteTokenizerSettings(Section):
    """Bytes of UTF-8, and tokens for end of document and padding; needs no file."""

    kind: Literal["byte"] = "byte"


class NullTokenizerSettings(Section):
    """Ids written as numbers, for mock data; the last id ends a document, and there is no padding token."""

    kind: Literal["null"] = "null"
    size: PositiveInt
    """Number of tokens, the end of document included."""


def _null_is_a_kind(value: object) -> object:
    """Read ``kind: null`` as the kind ``null``, since flags, environment and YAML parse it as ``None``."""
    return {**value, "kind": "null"} if isinstance(value, dict) and value.get("kind", "") is None else value


TokenizerSettings = Annotated[
    FileTokenizerSettings
    | Gpt2BpeTokenizerSettings
    | WordPieceTokenizerSettings
    | SentencePieceTokenizerSettings
    | TiktokenTokenizerSettings
    | ByteTokenizerSettings
    | NullTokenizerSettings,
    Field(discriminator="kind"),
    BeforeValidator(_null_is_a_kind),
]
