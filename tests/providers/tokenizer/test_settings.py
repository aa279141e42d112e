"""Settings of tokenizers, and what they require of this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from runtime_di.providers.tokenizer.service import open_tokenizer
from runtime_di.providers.tokenizer.settings import (
    ByteTokenizerSettings,
    FileTokenizerSettings,
    Gpt2BpeTokenizerSettings,
    NullTokenizerSettings,
    TiktokenTokenizerSettings,
    TokenizerSettings,
)
from runtime_di.settings.model import RuntimeSettings
from tests.support.tokenizer_files import (
    KINDS,
    PATTERN,
    problems_of,
    settings_of,
)


class AnyTokenizer(RuntimeSettings):
    """An entrypoint's settings with a tokenizer."""

    tokenizer: TokenizerSettings | None = ByteTokenizerSettings()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_chosen_by_its_name(kind: str, files: Path):
    """Settings parsed from JSON, as from a file, choose the same section class."""
    section = settings_of(kind, files)

    chosen = TypeAdapter(TokenizerSettings).validate_json(section.model_dump_json())

    assert chosen == section
    assert type(chosen) is type(section)


@pytest.mark.parametrize("size", [1, 1000])
def test_tiktoken_vocabulary_is_larger_than_its_special_tokens(size: int):
    """A size that leaves no room for ranks is refused before any file is read."""
    rule = f"size {size} must be larger than num_special_tokens 1000: raise size, or lower num_special_tokens"

    with pytest.raises(ValidationError, match=rule):
        TiktokenTokenizerSettings(path=Path("ranks"), pattern=PATTERN, size=size)


def test_missing_files_are_reported_together(tmp_path: Path):
    """All missing files are reported together, with the files that their folder contains."""
    (tmp_path / "tokenizer.model").touch()
    (tmp_path / "config.json").touch()
    section = Gpt2BpeTokenizerSettings(vocab_file=tmp_path / "vocab.json", merges_file=tmp_path / "merges.txt")

    problems = problems_of(section)

    found, fix = "found there: config.json, tokenizer.model", "set the path of an existing file"
    assert problems == [
        ("vocab_file", f"no such file: {tmp_path / 'vocab.json'}; {found}", fix),
        ("merges_file", f"no such file: {tmp_path / 'merges.txt'}; {found}", fix),
    ]


def test_folder_without_tokenizer_json_is_reported(tmp_path: Path):
    """If a folder has no tokenizer.json, the error names it and the first files of the folder."""
    for number in range(10):
        (tmp_path / f"shard-{number}").touch()
    names = ", ".join(f"shard-{number}" for number in range(8))

    problems = problems_of(FileTokenizerSettings(path=tmp_path))

    what = f"no such file: {tmp_path / 'tokenizer.json'}; found there: {names} and more"
    assert problems == [("path", what, "set the path of an existing file")]


@pytest.mark.parametrize("kind", KINDS)
def test_existing_files_and_packages_are_sufficient(kind: str, files: Path):
    """If its files and packages exist, no kind reports a missing requirement."""
    assert problems_of(settings_of(kind, files)) == []


@pytest.mark.parametrize("kind", ["sentencepiece", "tiktoken"])
def test_missing_package_is_reported(kind: str, files: Path, monkeypatch: pytest.MonkeyPatch):
    """B70: a missing optional package is reported before opening, and opening raises an ImportError."""
    monkeypatch.setitem(sys.modules, kind, None)

    problems = problems_of(settings_of(kind, files))

    fix = f"pip install 'runtime-di[{kind}]'"
    assert problems == [("kind", f"needs the package '{kind}', which is not installed", fix)]
    with pytest.raises(ImportError, match=kind):
        open_tokenizer(settings_of(kind, files))


def test_null_kind_comes_from_flags_and_environment(monkeypatch: pytest.MonkeyPatch):
    """``null`` as a kind means the null tokenizer, while ``null`` as the whole section means none."""
    by_flag = AnyTokenizer.load(["--tokenizer.kind", "null", "--tokenizer.size", "5"]).tokenizer
    none = AnyTokenizer.load(["--tokenizer", "null"]).tokenizer
    monkeypatch.setenv("RUNTIME_DI_TOKENIZER__KIND", "null")
    monkeypatch.setenv("RUNTIME_DI_TOKENIZER__SIZE", "5")
    by_environment = AnyTokenizer.load([]).tokenizer

    assert by_flag == by_environment == NullTokenizerSettings(size=5)
    assert none is None
