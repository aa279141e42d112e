"""Opens a tokenizer of any kind."""

from __future__ import annotations

from runtime_di.providers.tokenizer.byte import ByteTokenizer
from runtime_di.providers.tokenizer.hugging_face import open_file, open_gpt2_bpe, open_wordpiece
from runtime_di.providers.tokenizer.null import NullTokenizer
from runtime_di.providers.tokenizer.protocol import Tokenizer
from runtime_di.providers.tokenizer.sentencepiece import open_sentencepiece
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
from runtime_di.providers.tokenizer.tiktoken import open_tiktoken


def open_tokenizer(settings: TokenizerSettings) -> Tokenizer:  # noqa: PLR0911 - one kind a line
    """Open a tokenizer of any kind, from local files only.

    Raises:
        SettingsError: a file cannot be read as its kind requires, or no file or setting names the end of a document.
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
