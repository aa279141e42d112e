"""Conversions that are refused and leave no files, and the services of the converter's container."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from runtime_di import CapabilityError, SettingsError
from runtime_di.containers import (
    ConverterRuntime,
    ConverterSettings,
)
from runtime_di.providers.checkpoint.format.snapshot import CheckpointError
from tests.support.checkpoints.conversions import convert, names, save
from tests.support.checkpoints.tiny import TinyCheckpoint, train_tiny_checkpoint
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return train_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("name", ["snapshot.json", "tensors.json", "values-00000.json"])
def test_tokenizer_named_as_a_file_of_the_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    """A tokenizer file never replaces another file of the checkpoint."""
    load = save(tmp_path / "run", 5, torch.randn(8, 2))
    (tmp_path / name).write_text("")

    with pytest.raises(CheckpointError, match=f"{name}: has the name of another file of the checkpoint"):
        convert(load, tmp_path / "new", tokenizer={"kind": "wordpiece", "vocab_file": tmp_path / name})

    assert names(tmp_path) == sorted(["run", name])


def test_nothing_is_overwritten(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """An existing folder, even an empty one, is refused before any service is opened."""
    (tmp_path / "there").mkdir()

    with pytest.raises(CapabilityError) as caught:
        convert(tiny.checkpoints, tmp_path / "there")

    assert str(caught.value) == (
        "This machine lacks what ConverterRuntime needs with these settings.\n"
        f"  conversion.folder = {tmp_path}/there (from constructor): {tmp_path}/there already exists and is not "
        "overwritten\n"
        "    fix: name a new folder"
    )
    assert names(tmp_path) == ["there"]


def test_folder_created_after_the_opening_is_not_overwritten(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """A folder that is created after the opening is refused as well."""
    settings = ConverterSettings(checkpoint={"load": tiny.checkpoints}, conversion={"folder": tmp_path / "new"})

    with ConverterRuntime.open(settings) as runtime, pytest.raises(CheckpointError, match="already exists"):
        (tmp_path / "new").mkdir()
        runtime.converter.convert()

    assert names(tmp_path / "new") == []


@pytest.mark.parametrize("new", ["new", "p/q/new"])
def test_failed_conversion_leaves_nothing(new: str, tmp_path: Path) -> None:
    """If tensors cannot be read, the error names the file, and no new folder or parent folder is left."""
    load = save(tmp_path / "run", 5, torch.randn(8, 2))
    (file,) = load.glob("tensors-*.safetensors")
    file.write_bytes(file.read_bytes()[:-8])

    with pytest.raises(CheckpointError, match=file.name):
        convert(load, tmp_path / new)

    assert names(tmp_path) == ["run"]


def test_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    """Where the system refuses a file or folder, the error names it and a fix."""
    load = save(tmp_path / "run", 5, torch.randn(8, 2))
    settings = ConverterSettings(checkpoint={"load": load}, conversion={"folder": tmp_path / "p" / "new"})

    with ConverterRuntime.open(settings) as runtime, pytest.raises(CheckpointError) as caught:
        (tmp_path / "p").touch()
        runtime.converter.convert()

    assert str(caught.value) == (
        "The checkpoint was not converted; nothing was written.\n"
        f"  {tmp_path}/p: File exists\n"
        "    fix: name a conversion.folder that can be created, on a disk with room for the checkpoint"
    )


def test_wrong_pattern_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """The error for a matching tensor with other rows names the tensor and both numbers."""
    load = save(tmp_path / "run", 5, torch.randn(8, 2), head=torch.randn(3, 2))

    with pytest.raises(CheckpointError) as caught:
        convert(load, tmp_path / "new", tensor=2, vocabulary_rows=["*embedding*", "*head"])

    assert str(caught.value) == (
        "The checkpoint was not converted; nothing was written.\n"
        "  conversion.vocabulary_rows: trainer.head has 3 rows, and the checkpoint's vocabulary 8\n"
        "    fix: set it to the patterns of the tensors with one row a token"
    )
    assert names(tmp_path) == ["run"]


def test_missing_tokenizer_file_is_reported(tmp_path: Path) -> None:
    """Missing tokenizer files fail the conversion, not the opening, because the tokenizer is never opened."""
    load = save(tmp_path / "run", 5, torch.randn(8, 2))

    with pytest.raises(CheckpointError, match="tokenizer: no such file"):
        convert(load, tmp_path / "new", tokenizer=tmp_path / "lost.json", single_file=True)

    assert names(tmp_path) == ["run"]


def test_several_ranks_are_refused() -> None:
    """Under torchrun with more than one process, settings are refused with the source of the world size."""
    with pytest.raises(SettingsError, match=r"launch\.world_size = 2 .*: a conversion runs in one process"):
        ConverterSettings(launch={"rank": 1, "world_size": 2, "local_world_size": 2, "local_rank": 1})


# Services of the container


def test_plan_is_short() -> None:
    """The plan has no tokenizer, process groups, seeds or writers."""
    assert ConverterRuntime.plan().order == ("vocabulary", "log", "converter")


def test_converter_without_a_checkpoint_is_disabled() -> None:
    """Without a checkpoint and a folder the converter is disabled, with the missing setting as the reason."""
    with ConverterRuntime.open() as runtime:
        runtime.start()

        assert runtime.built == ("log",)
        assert "fix: set 'checkpoint.load'" in runtime.disabled["converter"]


SCRIPT = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from convert_checkpoint import ConvertRuntime, convert
def body(runtime):
    convert(runtime)
    import torch
    print(torch.distributed.is_initialized(), torch.cuda.is_initialized(), "tokenizers" in sys.modules)
ConvertRuntime.main(body)
"""


@pytest.mark.processes
def test_example_runs_light(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """The example takes tokenizer and padding from the checkpoint, and opens no process group, GPU or tokenizer."""
    flags = ["--checkpoint.load", str(tiny.checkpoints), "--conversion.folder", str(tmp_path / "new")]

    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(ROOT / "examples"), *flags, "--conversion.tensor", "2"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout) == (
        0,
        f"{tiny.checkpoints}/step-00000002 -> {tmp_path}/new\nFalse False False\n",
    ), done.stderr
    assert "tokenizer.json" in names(tmp_path / "new")
    assert json.loads((tmp_path / "new" / "snapshot.json").read_text())["vocabulary"]["padded_size"] == 512
