"""Errors of malformed tokenizer files, of every kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime_di.errors import SettingsError
from runtime_di.providers.tokenizer.service import open_tokenizer
from tests.support.tokenizer_files import (
    settings_of,
)


@pytest.mark.parametrize(
    ("source", "content", "message"),
    [
        (("gpt2_bpe", "vocab.json"), b"[]", "vocab_file: .*contains a JSON list, not an object"),
        (("gpt2_bpe", "vocab.json"), b"{", "vocab_file: .*cannot be read"),
        (("gpt2_bpe", "vocab.json"), b'{"a": 0}', r"vocab_file: .*has no <\|endoftext\|>"),
        (("gpt2_bpe", "vocab.json"), b'{"<|endoftext|>": "0"}', "vocab_file: .*cannot be read"),
        (("gpt2_bpe", "merges.txt"), b"one two three", "merges_file: .*cannot be read.* invalid at line 1"),
        (("gpt2_bpe", "merges.txt"), b"#version: 0.2\nzz qq\n", "merges_file: .*Token `zz` out of vocabulary"),
        (("wordpiece", "vocab.txt"), b"\xff\xfe", "vocab_file: .*cannot be read"),
        (("wordpiece", "vocab.txt"), b"a\nb\n", r"vocab_file: .*has no \[UNK\] and no \[SEP\]"),
        (("sentencepiece", "spm.model"), b"no model", "path: .*cannot be read.*could not parse ModelProto"),
        (("tiktoken", "ranks.tiktoken"), b"YQ== 0\nYg==\n", "path: .*line 2 is not a token in base64 and its rank"),
        (("tiktoken", "ranks.tiktoken"), b"YQ== 1\n", "path: .*are not 0, 1, 2 and so on, each once"),
        (("tiktoken", "ranks.tiktoken"), b"YQ== 0\n", "path: .*255 of the 256 single bytes are not among the 1 ranks"),
        (("tiktoken", "ranks.tiktoken"), b"", "path: .*256 of the 256 single bytes are not among the 0 ranks"),
    ],
)
def test_malformed_files_are_reported(
    source: tuple[str, str], content: bytes, message: str, files: Path, tmp_path: Path
):
    """A malformed file of any kind is an error that names the setting, never a crash of a library."""
    kind, file = source
    for good in files.iterdir():
        (tmp_path / good.name).write_bytes(content if good.name == file else good.read_bytes())

    with pytest.raises(SettingsError, match=f"tokenizer.{message}") as caught:
        open_tokenizer(settings_of(kind, tmp_path))

    assert str(tmp_path / file) in str(caught.value)
