"""The tiktoken tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiktoken

from runtime_di.errors import SettingsError
from runtime_di.providers.tokenizer.service import open_tokenizer
from runtime_di.providers.tokenizer.settings import (
    TiktokenTokenizerSettings,
)
from tests.support.tokenizer_files import (
    PATTERN,
    RANKS,
    TEXT,
    settings_of,
    write_ranks,
)


def test_tiktoken_puts_special_tokens_before_the_ranks(files: Path):
    """Ids are tiktoken's own, shifted by the number of special tokens, which no text can produce."""
    library = tiktoken.Encoding("plain", pat_str=PATTERN, mergeable_ranks=RANKS, special_tokens={})
    text = f"{TEXT} </s>"

    tokenizer = open_tokenizer(settings_of("tiktoken", files))

    assert tokenizer.encode(text) == [1000 + value for value in library.encode(text)]
    assert tokenizer.decode([0, 1, 2, 3, 999]) == "<unk><s></s><SPECIAL_3><SPECIAL_999>"
    assert (tokenizer.size, tokenizer.eod, tokenizer.pad) == (1000 + len(RANKS), 2, None)


def test_tiktoken_cuts_the_ranks_to_the_size(files: Path):
    """An explicit size uses the first ranks only."""
    tokenizer = open_tokenizer(
        TiktokenTokenizerSettings(path=files / "ranks.tiktoken", pattern=PATTERN, num_special_tokens=3, size=260)
    )

    assert tokenizer.size == 260
    assert tokenizer.encode("hell") == [3 + 256, 3 + ord("l"), 3 + ord("l")]


def test_tiktoken_reads_the_current_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The ranks file is read without a cache, which would miss a change of the file."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
    section = TiktokenTokenizerSettings(path=tmp_path / "ranks", pattern=PATTERN)
    write_ranks(section.path, RANKS)
    before = open_tokenizer(section).size

    write_ranks(section.path, {**RANKS, b"new": len(RANKS)})
    after = open_tokenizer(section).size

    assert after == before + 1
    assert not cache.exists()


@pytest.mark.parametrize(
    ("values", "where", "what"),
    [
        ({"pattern": "("}, "pattern", "not a regular expression: .*parenthesis"),
        ({"size": 2000}, "size", "2000 tokens are more than the 1260 of .* together"),
        ({"size": 1100}, "path", "156 of the 256 single bytes are not among the 100 ranks"),
    ],
)
def test_invalid_tiktoken_values_are_reported(values: dict[str, Any], where: str, what: str, files: Path):
    """An invalid pattern, or a size that does not fit the ranks file, is an error that names the setting."""
    section = TiktokenTokenizerSettings(**{"path": files / "ranks.tiktoken", "pattern": PATTERN, **values})

    with pytest.raises(SettingsError, match=f"tokenizer.{where}: .*{what}"):
        open_tokenizer(section)
