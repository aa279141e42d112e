"""Conversion to one file of weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from converting import convert, loader_of, names, same, save, tensors
from runtime_di.containers import (
    InferenceRuntime,
    InferenceSettings,
)
from runtime_di.providers.snapshot import CheckpointError, find_checkpoint, read_snapshot
from tiny_checkpoint import Tiny, make_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def test_single_file_has_the_weights_and_the_tokenizer(tiny: Tiny, tmp_path: Path) -> None:
    """The weights lie under their own names in one file, the tokenizer beside it, and nothing else of the run."""
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


def test_single_file_and_back_is_the_same_bit_for_bit(tiny: Tiny, tmp_path: Path) -> None:
    """A checkpoint made of the single file has the same weights."""
    single = convert(tiny.checkpoints, tmp_path / "single", single_file=True)

    back = convert(single, tmp_path / "back")

    assert same(tensors(back), tensors(single))
    assert "tensors-00000-00000.safetensors" in names(back)


def test_single_file_of_several_ranks_is_loaded_by_one(tiny: Tiny, tmp_path: Path) -> None:
    """The weights alone have nothing that belongs to a rank: a checkpoint of two ranks is served from one file."""
    source = tmp_path / "two"
    shutil.copytree(find_checkpoint(tiny.checkpoints) or tmp_path, source)
    (source / "values-00001.json").write_text("{}")
    told = json.loads((source / "snapshot.json").read_text())
    (source / "snapshot.json").write_text(json.dumps({**told, "world_size": 2}))
    single = convert(source, tmp_path / "single", single_file=True)
    weight = torch.zeros(384, 32)

    with InferenceRuntime.open(InferenceSettings(checkpoint={"load": single}, tokenizer=None)) as runtime:
        step = runtime.checkpointer.load({"trainer": {"model": {"embedding.weight": weight}}})

    assert step == 2
    assert torch.equal(weight, tensors(source)["trainer.model.embedding.weight"])


def test_single_file_is_told_from_a_whole_state(tiny: Tiny, tmp_path: Path) -> None:
    """Its snapshot and its loader tell that it holds the weights alone, and so does what is made of it."""
    single = convert(tiny.checkpoints, tmp_path / "single", single_file=True)
    back = convert(single, tmp_path / "back")

    told = [loader_of(folder).weights_only for folder in (tiny.checkpoints, single, back)]

    assert told == [False, True, True]
    assert [read_snapshot(folder).weights for folder in (tiny.checkpoints, single)] == [None, "trainer.model."]


def test_state_that_is_more_than_weights_is_told(tiny: Tiny, tmp_path: Path) -> None:
    """Loading more than the weights says so in one line, beside what does not fit of the weights themselves."""
    single = convert(tiny.checkpoints, tmp_path / "single", single_file=True)
    model = {"embedding.weight": torch.zeros(384, 16), "bias": torch.zeros(1)}
    state = {"trainer": {"model": model, "optimizer": {"a": torch.zeros(1), "b": torch.zeros(2), "lr": 0.1}}, "seed": 1}

    with pytest.raises(CheckpointError) as caught:
        loader_of(single).load(state)

    assert str(caught.value) == (
        f"{single} does not hold this state.\n"
        "  state: the checkpoint holds the weights alone, trainer.model.*, and nothing such as trainer.optimizer.a\n"
        "    fix: where checkpointer.weights_only says so, load the model's part alone and start the rest afresh\n"
        "  state trainer.model.embedding.weight: of size [384, 16] here, and [384, 32] in the checkpoint\n"
        "    fix: give the model the shape that it was saved with; checkpoint.load_settings takes it from there\n"
        "  state trainer.model.bias: a tensor here, and not in the checkpoint\n"
        "    fix: load a checkpoint that has it, or leave it out of the state that is loaded"
    )


def test_files_have_the_mode_of_any_file(tmp_path: Path) -> None:
    """Whoever may read a file that this user makes may read a checkpoint, saved or converted, the tensors included."""
    load = save(tmp_path / "run", 5, torch.randn(8, 2))
    new = [convert(load, tmp_path / "wide", tensor=2), convert(load, tmp_path / "single", single_file=True)]
    (tmp_path / "any").touch()

    modes = {file.stat().st_mode for folder in (load, *new) for file in folder.iterdir()}

    assert modes == {(tmp_path / "any").stat().st_mode}
