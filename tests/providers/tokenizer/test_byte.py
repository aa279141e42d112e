"""The byte tokenizer."""

from __future__ import annotations

from runtime_di.providers.tokenizer.service import open_tokenizer
from runtime_di.providers.tokenizer.settings import (
    ByteTokenizerSettings,
)


def test_byte_needs_no_file():
    """Bytes are their own ids; end of document and padding follow and have no text."""
    tokenizer = open_tokenizer(ByteTokenizerSettings())

    assert tokenizer.encode("aé") == [0x61, 0xC3, 0xA9]
    assert (tokenizer.size, tokenizer.eod, tokenizer.pad) == (258, 256, 257)
    assert tokenizer.decode([0x61, 256, 0xC3, 257]) == "a\N{REPLACEMENT CHARACTER}"
