"""What the converter refuses, what it leaves then, and what it is built of."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from converting import convert, names, save
from runtime_di import CapabilityError, SettingsError
from runtime_di.containers import (
    ConverterRuntime,
    ConverterSettings,
)
from runtime_di.providers.snapshot import CheckpointError
from tiny_checkpoint import Tiny, make_tiny

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("name", ["snapshot.json", "tensors.json", "values-00000.json"])
def test_tokenizer_named_as_a_file_of_the_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    """Files of the tokenizer take the place of no other file."""
    load = save(tmp_path / "run", 5, torch.randn(8, 2))
    (tmp_path / name).write_text("")

    with pytest.raises(CheckpointError, match=f"{name}: has the name of another file of the checkpoint"):
        convert(load, tmp_path / "new", tokenizer={"kind": "wordpiece", "vocab_file": tmp_path / name})

    assert names(tmp_path) == sorted(["run", name])


def test_nothing_is_overwritten(tiny: Tiny, tmp_path: Path) -> None:
    """A folder that is there is refused before anything is opened, even an empty one."""
    (tmp_path / "there").mkdir()

    with pytest.raises(CapabilityError) as caught:
        convert(tiny.checkpoints, tmp_path / "there")

    assert str(caught.value) == (
        "This machine lacks what ConverterRuntime needs as set.\n"
        f"  conversion.folder = {tmp_path}/there (from constructor): there is something at {tmp_path}/there already, "
        "and nothing is overwritten\n"
        "    fix: give the path of a new folder"
    )
    assert names(tmp_path) == ["there"]


def test_folder_that_comes_meanwhile_is_not_overwritten(tiny: Tiny, tmp_path: Path) -> None:
    """A folder that appears after the opening is refused, too."""
    settings = ConverterSettings(checkpoint={"load": tiny.checkpoints}, conversion={"folder": tmp_path / "new"})

    with ConverterRuntime.open(settings) as runtime, pytest.raises(CheckpointError, match="there is something at"):
        (tmp_path / "new").mkdir()
        runtime.converter.convert()

    assert names(tmp_path / "new") == []


@pytest.mark.parametrize("new", ["new", "p/q/new"])
def test_failed_conversion_leaves_nothing(new: str, tmp_path: Path) -> None:
    """A checkpoint whose tensors cannot be read gives an error that names the file, and no folder, parents included."""
    load = save(tmp_path / "run", 5, torch.randn(8, 2))
    (file,) = load.glob("tensors-*.safetensors")
    file.write_bytes(file.read_bytes()[:-8])

    with pytest.raises(CheckpointError, match=file.name):
        convert(load, tmp_path / new)

    assert names(tmp_path) == ["run"]


def test_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    """Where the system refuses a file or folder, the error says which and what to do."""
    load = save(tmp_path / "run", 5, torch.randn(8, 2))
    settings = ConverterSettings(checkpoint={"load": load}, conversion={"folder": tmp_path / "p" / "new"})

    with ConverterRuntime.open(settings) as runtime, pytest.raises(CheckpointError) as caught:
        (tmp_path / "p").touch()
        runtime.converter.convert()

    assert str(caught.value) == (
        "The checkpoint was not converted; nothing was written.\n"
        f"  {tmp_path}/p: File exists\n"
        "    fix: name a conversion.folder that can be made, on a disk with room for the checkpoint"
    )


def test_wrong_pattern_is_told_before_anything_is_written(tmp_path: Path) -> None:
    """A tensor that is named as a vocabulary and has other rows is named, with both numbers."""
    load = save(tmp_path / "run", 5, torch.randn(8, 2), head=torch.randn(3, 2))

    with pytest.raises(CheckpointError) as caught:
        convert(load, tmp_path / "new", tensor=2, vocabulary_rows=["*embedding*", "*head"])

    assert str(caught.value) == (
        "The checkpoint was not converted; nothing was written.\n"
        "  conversion.vocabulary_rows: trainer.head has 3 rows, and the checkpoint's vocabulary 8\n"
        "    fix: give the patterns of the tensors with a row for each token"
    )
    assert names(tmp_path) == ["run"]


def test_lacking_tokenizer_is_told(tmp_path: Path) -> None:
    """Files of a tokenizer that are not there stop the conversion, not the opening: they are never opened."""
    load = save(tmp_path / "run", 5, torch.randn(8, 2))

    with pytest.raises(CheckpointError, match="tokenizer: no such file"):
        convert(load, tmp_path / "new", tokenizer=tmp_path / "lost.json", single_file=True)

    assert names(tmp_path) == ["run"]


def test_several_ranks_are_refused() -> None:
    """Under torchrun with more than one process, settings are refused with the source of the world size."""
    with pytest.raises(SettingsError, match=r"launch\.world_size = 2 .*: a conversion is one process"):
        ConverterSettings(launch={"rank": 1, "world_size": 2, "local_world_size": 2, "local_rank": 1})


# What it is built of


def test_plan_is_short() -> None:
    """Neither tokenizer, process groups, seeds nor writers exist in it."""
    assert ConverterRuntime.plan().order == ("vocabulary", "log", "converter")


def test_nothing_to_convert_is_told() -> None:
    """Without a checkpoint and a folder the converter is off, and says which setting is missing."""
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


def test_example_runs_light(tiny: Tiny, tmp_path: Path) -> None:
    """The example takes tokenizer and padding from the checkpoint, and starts neither world, GPU nor tokenizer."""
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
