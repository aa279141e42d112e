"""Tokenizer files of a conversion."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime_di import SettingsError
from runtime_di.containers import (
    InferenceRuntime,
    InferenceSettings,
    TrainingSettings,
)
from runtime_di.providers.checkpoint.format.snapshot import find_checkpoint, read_snapshot
from tests.support.checkpoints.conversions import convert, save
from tests.support.checkpoints.tiny import NUM_TOKENS, TinyCheckpoint, train_tiny_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return train_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def tokenizer_sections(folder: Path, corpus: Path) -> list[dict[str, Any]]:
    """Return a section of every kind with files, which are in ``folder``, and one of a kind without files."""
    for name in ("vocab.json", "merges.txt", "vocab.txt", "my pieces.model", "o200k.tiktoken"):
        (folder / name).write_text(name)
    return [
        {"kind": "file", "path": corpus},
        {"kind": "file", "path": corpus / "tokenizer.json", "eod": "<unk>"},
        {"kind": "gpt2_bpe", "vocab_file": folder / "vocab.json", "merges_file": folder / "merges.txt"},
        {"kind": "wordpiece", "vocab_file": folder / "vocab.txt", "lowercase": False},
        {"kind": "sentencepiece", "path": folder / "my pieces.model"},
        {"kind": "tiktoken", "path": folder / "o200k.tiktoken", "pattern": ".", "size": 2000},
        {"kind": "byte"},
    ]


def test_settings_name_the_tokenizer_beside_the_result(
    tiny: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that takes its settings from the moved result uses the copied files, for every kind.

    Another conversion copies them again.
    """
    sections = tokenizer_sections(tmp_path, tiny.corpus)
    load = save(tmp_path / "run", 5, torch.randn(8, 2))

    for number, section in enumerate(sections):
        original = TrainingSettings(tokenizer=section).tokenizer
        first = convert(load, tmp_path / f"first-{number}", tokenizer=section, single_file=True)
        moved = first.rename(tmp_path / f"moved-{number}")
        monkeypatch.chdir(moved)
        taken = settings_of(moved)
        monkeypatch.chdir(tmp_path)
        again = settings_of(convert(moved, tmp_path / f"again-{number}", tokenizer=taken.tokenizer))

        for found, folder in ((taken, moved), (again, tmp_path / f"again-{number}")):
            assert found.tokenizer == original.model_copy(update=copies(original, folder))
            for name, copy in copies(original, folder).items():
                assert copy.read_bytes() == (original.file if section["kind"] == "file" else section[name]).read_bytes()
                line = f"tokenizer.{name} = {copy} (from checkpoint {folder})"
                assert str(found.explain(f"tokenizer.{name}")).splitlines()[0] == line


def copies(tokenizer: Any, folder: Path) -> dict[str, Path]:
    if tokenizer.kind == "file":
        return {"path": folder / "tokenizer.json"}
    return {name: folder / value.name for name, value in dict(tokenizer).items() if isinstance(value, Path)}


def settings_of(checkpoint: Path) -> TrainingSettings:
    return TrainingSettings.load(["--checkpoint.load", str(checkpoint), "--checkpoint.load_settings"])


def test_tokenizer_beside_the_result_is_opened(
    tiny: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another folder, after the training run's own files are deleted, a worker encodes with the copies."""
    corpus = shutil.copytree(tiny.corpus, tmp_path / "corpus")
    load = shutil.copytree(find_checkpoint(tiny.checkpoints) or tmp_path, tmp_path / "run")
    snapshot = (load / "snapshot.json").read_text()
    (load / "snapshot.json").write_text(snapshot.replace(json.dumps(str(tiny.corpus)), json.dumps(str(corpus))))
    convert(load, tmp_path / "single", tokenizer=corpus, single_file=True)
    shutil.rmtree(corpus)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    flags = ["--checkpoint.load", "../single", "--checkpoint.load_settings"]
    with InferenceRuntime.open(InferenceSettings.load(flags)) as runtime:
        tokenizer = runtime.tokenizer

    assert (tokenizer.size, tokenizer.decode(tokenizer.encode("def main("))) == (NUM_TOKENS, "def main(")


def test_ordinary_paths_of_a_checkpoint_stay(tiny: TinyCheckpoint) -> None:
    """The path in the snapshot of a training run is used unchanged."""
    assert settings_of(tiny.checkpoints).tokenizer.path == tiny.corpus


def test_result_without_a_tokenizer_names_no_file(tmp_path: Path) -> None:
    """After another conversion without its tokenizer, the result does not name files that it does not have."""
    (tmp_path / "vocab.txt").write_text("[UNK]")
    section = {"kind": "wordpiece", "vocab_file": tmp_path / "vocab.txt"}
    first = convert(save(tmp_path / "run", 5, torch.randn(8, 2)), tmp_path / "first", tokenizer=section)

    second = convert(first, tmp_path / "second")

    assert read_snapshot(first).files == {"tokenizer": {"vocab_file": "vocab.txt"}}
    assert (read_snapshot(second).files, "tokenizer" in read_snapshot(second).settings) == ({}, False)


@pytest.mark.parametrize("name", ["../vocab.txt", "/etc/passwd", "..", "sub/vocab.txt"])
def test_file_outside_the_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    """A snapshot that names a file outside its folder is refused, and the error names the setting."""
    checkpoint = save(tmp_path / "run", 5, torch.randn(8, 2))
    snapshot = json.loads((checkpoint / "snapshot.json").read_text())
    snapshot["files"] = {"tokenizer": {"vocab_file": name}}
    (checkpoint / "snapshot.json").write_text(json.dumps(snapshot))

    with pytest.raises(
        SettingsError, match=r"files\.tokenizer\.vocab_file: .* is not the name of a file in the checkpoint"
    ):
        settings_of(checkpoint)
