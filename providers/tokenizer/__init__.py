"""Tokenizers: text to token ids and back."""

from runtime_di.providers.tokenizer.byte import ByteTokenizer
from runtime_di.providers.tokenizer.null import NullTokenizer
from runtime_di.providers.tokenizer.protocol import Tokenizer
from runtime_di.providers.tokenizer.service import open_tokenizer
from runtime_di.providers.tokenizer.settings import (
    ByteTokenizerSettings,
    FileTokenizerSettings,
    Gpt2BpeTokenizerSettings,
    NullTokenizerSettings,
    SentencePieceTokenizerSettings,
    TiktokenTokenizerSettings,
    TokenizerSettings,
    WordPieceTokenizerSettings,
)

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
