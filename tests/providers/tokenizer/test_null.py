"""The null tokenizer."""

from __future__ import annotations

import pytest

from runtime_di.providers.tokenizer.service import open_tokenizer
from runtime_di.providers.tokenizer.settings import (
    NullTokenizerSettings,
)


def test_null_size_includes_the_end_of_document():
    """B31: the null tokenizer's size counts its end of document, which is the last id; there is no padding."""
    tokenizer = open_tokenizer(NullTokenizerSettings(size=100))

    assert (tokenizer.size, tokenizer.eod, tokenizer.pad) == (100, 99, None)
    assert tokenizer.encode("0 99") == [0, 99]


@pytest.mark.parametrize("text", ["100", "-1", "fox", "1.5"])
def test_null_refuses_words_that_are_not_ids(text: str):
    """The null tokenizer reads only ids below its size."""
    tokenizer = open_tokenizer(NullTokenizerSettings(size=100))

    with pytest.raises(ValueError, match=f"reads numbers below 100 between spaces, not '{text}'"):
        tokenizer.encode(f"1 {text}")
