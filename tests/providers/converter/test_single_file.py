"""Conversion to one file of weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from runtime_di.containers import (
    InferenceRuntime,
    InferenceSettings,
)
from runtime_di.providers.checkpoint.format.snapshot import CheckpointError, find_checkpoint, read_snapshot
from tests.support.checkpoints.conversions import convert, loader_of, names, same, save, tensors
from tests.support.checkpoints.tiny import TinyCheckpoint, train_tiny_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return train_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def test_single_file_has_the_weights_and_the_tokenizer(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """The folder contains the weights in one file under their own names, the tokenizer, and nothing else of the run."""
    folder = convert(tiny.checkpoints, tmp_path / "weights", tokenizer=tiny.corpus, single_file=True)

    weights = load_file(folder / "model.safetensors")
    model = {path: t for path, t in tensors(tiny.checkpoints).items() if path.startswith("trainer.model.")}
    assert same({f"trainer.model.{name}": tensor for name, tensor in weights.items()}, model)
    assert names(folder) == [
        "model.safetensors",
        "snapshot.json",
        "tensors.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "values-00000.json",
    ]
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (folder / file).read_bytes() == (tiny.corpus / file).read_bytes()


def test_single_file_and_back_is_the_same_bit_for_bit(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """A checkpoint converted from the single file has the same weights."""
    single = convert(tiny.checkpoints, tmp_path / "single", single_file=True)

    back = convert(single, tmp_path / "back")

    assert same(tensors(back), tensors(single))
    assert "tensors-00000-00000.safetensors" in names(back)


def test_single_file_of_several_ranks_is_loaded_by_one(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """The weights alone have no values by rank: one rank can load the single file of a checkpoint of two ranks."""
    source = tmp_path / "two"
    shutil.copytree(find_checkpoint(tiny.checkpoints) or tmp_path, source)
    (source / "values-00001.json").write_text("{}")
    snapshot = json.loads((source / "snapshot.json").read_text())
    (source / "snapshot.json").write_text(json.dumps({**snapshot, "world_size": 2}))
    single = convert(source, tmp_path / "single", single_file=True)
    weight = torch.zeros(384, 32)

    with InferenceRuntime.open(InferenceSettings(checkpoint={"load": single}, tokenizer=None)) as runtime:
        step = runtime.checkpointer.load({"trainer": {"model": {"embedding.weight": weight}}})

    assert step == 2
    assert torch.equal(weight, tensors(source)["trainer.model.embedding.weight"])


def test_single_file_is_marked_as_weights_only(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """Its snapshot and its loader report that it contains the weights alone, also after converting it again."""
    single = convert(tiny.checkpoints, tmp_path / "single", single_file=True)
    back = convert(single, tmp_path / "back")

    weights_only = [loader_of(folder).weights_only for folder in (tiny.checkpoints, single, back)]

    assert weights_only == [False, True, True]
    assert [read_snapshot(folder).weights for folder in (tiny.checkpoints, single)] == [None, "trainer.model."]


def test_state_with_more_than_weights_is_refused(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """One problem names that the state has more than weights; further problems name weights that do not fit."""
    single = convert(tiny.checkpoints, tmp_path / "single", single_file=True)
    model = {"embedding.weight": torch.zeros(384, 16), "bias": torch.zeros(1)}
    state = {"trainer": {"model": model, "optimizer": {"a": torch.zeros(1), "b": torch.zeros(2), "lr": 0.1}}, "seed": 1}

    with pytest.raises(CheckpointError) as caught:
        loader_of(single).load(state)

    assert str(caught.value) == (
        f"{single} does not contain this state.\n"
        "  state: the checkpoint contains the weights alone, trainer.model.*, and nothing such as trainer.optimizer.a\n"
        "    fix: if checkpointer.weights_only, load the model's part alone and start the rest anew\n"
        "  state trainer.model.embedding.weight: of size [384, 16] here, and [384, 32] in the checkpoint\n"
        "    fix: give the model the shape that it was saved with; checkpoint.load_settings takes it from there\n"
        "  state trainer.model.bias: a tensor here, and not in the checkpoint\n"
        "    fix: load a checkpoint that has it, or leave it out of the state that is loaded"
    )


def test_files_have_the_default_mode(tmp_path: Path) -> None:
    """All files of saved and converted checkpoints have the default mode of new files, the tensors included."""
    load = save(tmp_path / "run", 5, torch.randn(8, 2))
    new = [convert(load, tmp_path / "wide", tensor=2), convert(load, tmp_path / "single", single_file=True)]
    (tmp_path / "any").touch()

    modes = {file.stat().st_mode for folder in (load, *new) for file in folder.iterdir()}

    assert modes == {(tmp_path / "any").stat().st_mode}
