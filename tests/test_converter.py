"""The converter: another tensor-parallel size or one file, bit for bit and back, and nothing where it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from converting import convert, names, same, save, tensors
from runtime_di import VocabularyError
from runtime_di.containers import (
    ConverterRuntime,
    ConverterSettings,
    InferenceRuntime,
    InferenceSettings,
)
from runtime_di.providers.snapshot import CheckpointError, find_checkpoint, read_snapshot
from runtime_di.testing import run_ranks
from tiny_checkpoint import NUM_TOKENS, Tiny, make_tiny, train_here


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def test_wider_and_back_is_the_same_bit_for_bit(tiny: Tiny, tmp_path: Path) -> None:
    """Rows are added to every tensor of the vocabulary, the optimizer's too, and a way back gives what was there."""
    wide = convert(tiny.checkpoints, tmp_path / "wide", tensor=2)

    back = convert(wide, tmp_path / "back", tensor=1)

    rows = {path: len(tensor) for path, tensor in tensors(wide).items() if "embedding" in path and tensor.dim()}
    assert rows == {
        "trainer.model.embedding.weight": 512,
        "trainer.optimizer.state.embedding.weight.exp_avg": 512,
        "trainer.optimizer.state.embedding.weight.exp_avg_sq": 512,
    }
    assert same(tensors(back), tensors(tiny.checkpoints))
    assert read_snapshot(back) == read_snapshot(tiny.checkpoints)


def test_narrower_and_back_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    """Rows of a padding that training has changed are kept aside when they are cut, and come back."""
    rows = torch.cat([torch.randn(8, 2), torch.randn(7, 2), torch.tensor([[-0.0, float("nan")]])])
    load = save(tmp_path / "run", 5, rows, tensor_parallel=4)

    narrow = convert(load, tmp_path / "narrow", tensor=1)
    back = convert(narrow, tmp_path / "back", tensor=4)

    assert len(tensors(narrow)["trainer.model.embedding.weight"]) == 8
    assert same(tensors(back), tensors(load))


def test_what_is_kept_aside_is_converted_on(tmp_path: Path) -> None:
    """By way of two other sizes, rows are still the same bit for bit."""
    load = save(tmp_path / "run", 5, torch.randn(16, 2), tensor_parallel=4)

    first = convert(load, tmp_path / "first", tensor=1)
    second = convert(first, tmp_path / "second", tensor=3)
    back = convert(second, tmp_path / "back", tensor=4)

    assert len(tensors(second)["trainer.model.embedding.weight"]) == 12
    assert same(tensors(back), tensors(load))


@pytest.mark.parametrize(("size", "added"), [(8, [[0.0, 0.0]] * 4), (7, [[14.0, 15.0]] * 4)])
def test_added_rows(size: int, added: list[list[float]], tmp_path: Path) -> None:
    """They are like the last row if no token has it, which training has made improbable; else zero."""
    load = save(tmp_path / "run", size, torch.arange(16.0).view(8, 2))

    wide = convert(load, tmp_path / "wide", tensor=3)

    assert tensors(wide)["trainer.model.embedding.weight"][8:].tolist() == added


def test_tensors_of_the_same_height_stay(tmp_path: Path) -> None:
    """A layer that has as many rows as the vocabulary is no vocabulary."""
    load = save(tmp_path / "run", 7, torch.randn(8, 2))

    wide = convert(load, tmp_path / "wide", tensor=3)

    assert tensors(wide)["trainer.model.up.weight"].shape == (8, 4)


def test_snapshot_tells_the_new_rows_and_the_old_ranks(tiny: Tiny, tmp_path: Path) -> None:
    """The new snapshot has the new vocabulary; settings, step, and the layout that random state belongs to stay."""
    before = (find_checkpoint(tiny.checkpoints) or tmp_path).joinpath("snapshot.json").read_bytes()

    wide = read_snapshot(convert(tiny.checkpoints, tmp_path / "wide", tensor=2))

    old = read_snapshot(tiny.checkpoints)
    sizes = {"size": NUM_TOKENS, "padded_size": 512, "tensor_parallel": 2, "dummy_rows": 212}
    assert wide.vocabulary == {**(old.vocabulary or {}), **sizes}
    assert (wide.step, wide.settings, wide.layout) == (old.step, old.settings, old.layout)
    assert (find_checkpoint(tiny.checkpoints) or tmp_path).joinpath("snapshot.json").read_bytes() == before


def test_training_continues_on_two_ranks(tiny: Tiny, tmp_path: Path) -> None:
    """Two tensor-parallel ranks train on from the converted checkpoint, optimizer state included."""
    wide = convert(tiny.checkpoints, tmp_path / "wide", tensor=2)
    argv = tiny.training("--parallel.tensor", "2", "--train.steps", "3", "--checkpoint.load", str(wide))

    ranks = run_ranks(train_here, 2, [*argv, "--checkpoint.folder", str(tmp_path / "run")])

    assert (
        ranks
        == [
            [
                str(tmp_path / "run" / "step-00000003"),
                f"vocabulary of 300 tokens (from checkpoint {wide}): 512 embedding rows, 212 of them without a token",
            ]
        ]
        * 2
    )


def test_explicit_rows(tmp_path: Path) -> None:
    """An explicit padded size wins over the padding of the tensor-parallel size, unless tokens would be lost."""
    load = save(tmp_path / "run", 5, torch.randn(8, 2))
    settings = ConverterSettings(
        checkpoint={"load": load}, conversion={"folder": tmp_path / "new"}, vocabulary={"padded_size": 6}
    )

    with ConverterRuntime.open(settings) as runtime:
        new = runtime.converter.convert()
    small = {"vocabulary": {"padded_size": 4}, "conversion": {"folder": tmp_path / "small"}}
    with (
        ConverterRuntime.open(settings.model_copy(update=small)) as runtime,
        pytest.raises(VocabularyError, match="room for 4 tokens"),
    ):
        runtime.start()

    assert len(tensors(new)["trainer.model.embedding.weight"]) == 6


def test_fewer_tokens_than_the_checkpoint_has_are_refused(tmp_path: Path) -> None:
    """An explicit size that cuts tokens off, which the tokenizer beside the result still gives out, writes nothing."""
    load = save(tmp_path / "run", 5, torch.randn(8, 2))
    settings = ConverterSettings(
        checkpoint={"load": load},
        conversion={"folder": tmp_path / "new", "single_file": True},
        vocabulary={"size": 4, "padded_size": 4},
    )

    with ConverterRuntime.open(settings) as runtime, pytest.raises(CheckpointError) as caught:
        runtime.converter.convert()

    assert str(caught.value) == (
        "The checkpoint was not converted; nothing was written.\n"
        "  vocabulary.size: room for 4 tokens, while the checkpoint has 5\n"
        "    fix: raise it, or leave it out"
    )
    assert names(tmp_path) == ["run"]


def test_snapshot_tells_the_padding_that_was_asked_for(tmp_path: Path) -> None:
    """What is made with another ``divisible_by`` gives it to runs that take their settings from the result."""
    load = save(tmp_path / "run", 5, torch.randn(8, 2))
    conversion = {"folder": tmp_path / "new", "tensor": 2}
    settings = ConverterSettings(checkpoint={"load": load}, conversion=conversion, vocabulary={"divisible_by": 3})

    with ConverterRuntime.open(settings) as runtime:
        new = runtime.converter.convert()

    assert read_snapshot(new).settings == {"vocabulary": {"divisible_by": 3}}


def serve_rows(load: Path, **vocabulary: int) -> Tensor:
    """What one rank, without settings of the checkpoint but its divisor, has as its embedding."""
    values = {"divisible_by": 4, **vocabulary}
    settings = InferenceSettings(checkpoint={"load": load}, tokenizer=None, vocabulary=values)
    with InferenceRuntime.open(settings) as runtime:
        model = {"embedding.weight": torch.zeros(runtime.vocabulary.padded_size, 2), "up.weight": torch.zeros(7, 4)}
        rows = model["embedding.weight"]
        if vocabulary:
            del model["up.weight"]
        runtime.checkpointer.load({"trainer": {"model": model}})
    return rows


def test_rows_of_another_tensor_parallel_size_are_told_with_both_ways_out(tmp_path: Path) -> None:
    """Rows that were padded for other ranks are told with the conversion and the setting that fit, which do fit."""
    wide = convert(save(tmp_path / "run", 5, torch.randn(8, 2)), tmp_path / "wide", tensor=3)

    with pytest.raises(CheckpointError) as caught:
        serve_rows(wide)

    assert str(caught.value) == (
        f"{wide} does not hold this state.\n"
        "  state trainer.model.embedding.weight: of size [8, 2] here, and [12, 2] in the checkpoint\n"
        "    fix: convert the checkpoint for tensor-parallel size 1, or set vocabulary.padded_size to 12\n"
        "  state trainer.model.up.weight: of size [7, 4] here, and [8, 4] in the checkpoint\n"
        "    fix: give the model the shape that it was saved with; checkpoint.load_settings takes it from there"
    )
    assert torch.equal(serve_rows(wide, padded_size=12), tensors(wide)["trainer.model.embedding.weight"])


def convert_without_vocabulary(tmp_path: Path, vocabulary: dict[str, int], **more: Tensor) -> Path:
    """Convert a checkpoint whose snapshot tells no vocabulary."""
    load = save(tmp_path / "run", 7, torch.arange(16.0).view(8, 2), **more)
    told = json.loads((load / "snapshot.json").read_text())
    (load / "snapshot.json").write_text(json.dumps({**told, "vocabulary": None}))
    conversion = {"folder": tmp_path / "new", "tensor": 2, "vocabulary_rows": ["*embedding*", "*head"]}
    settings = ConverterSettings(checkpoint={"load": load}, conversion=conversion, vocabulary=vocabulary)
    with ConverterRuntime.open(settings) as runtime:
        return runtime.converter.convert()


@pytest.mark.parametrize(
    ("vocabulary", "rows", "told"),
    [
        ({"size": 7, "divisible_by": 8}, [*range(0, 16, 2), *[14] * 8], (7, 16, "vocabulary.size")),
        ({"size": 3, "divisible_by": 2}, [0, 2, 4, 6], (3, 4, "vocabulary.size")),
        ({"padded_size": 10}, [*range(0, 16, 2), 0, 0], (10, 10, "vocabulary.padded_size")),
    ],
)
def test_explicit_vocabulary_of_a_checkpoint_without_one(
    vocabulary: dict[str, int], rows: list[int], told: tuple[int, int, str], tmp_path: Path
) -> None:
    """A checkpoint that tells no vocabulary has as many rows as its tensors, and the result tells the explicit one."""
    new = convert_without_vocabulary(tmp_path, vocabulary)

    snapshot = read_snapshot(new).vocabulary or {}
    assert tensors(new)["trainer.model.embedding.weight"][:, 0].tolist() == rows
    assert (snapshot["size"], snapshot["padded_size"], snapshot["origin"]) == told
    assert (snapshot["tensor_parallel"], snapshot["dummy_rows"]) == (2, told[1] - told[0])


def test_rows_that_disagree_are_told(tmp_path: Path) -> None:
    """Where no vocabulary is told, tensors that are named as having its rows must have equally many."""
    with pytest.raises(CheckpointError) as caught:
        convert_without_vocabulary(tmp_path, {"size": 7}, head=torch.randn(3, 2))

    assert str(caught.value) == (
        "The checkpoint was not converted; nothing was written.\n"
        "  conversion.vocabulary_rows: trainer.head has 3 rows, and trainer.model.embedding.weight 8\n"
        "    fix: give the patterns of the tensors with a row for each token"
    )
    assert names(tmp_path) == ["run"]


def test_patterns_that_fit_nothing_are_told(tmp_path: Path) -> None:
    """Rows that are to change are not left as they are because no tensor was found to have them."""
    load = save(tmp_path / "run", 5, torch.randn(8, 2))

    with pytest.raises(CheckpointError, match=r"no tensor of the checkpoint fits \*\.wte, and 16 rows are wanted"):
        convert(load, tmp_path / "new", tensor=4, vocabulary_rows=["*.wte"])

    assert names(tmp_path) == ["run"]
