"""Conversion to another tensor-parallel size, and back bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime_di import VocabularyError
from runtime_di.containers import (
    ConverterRuntime,
    ConverterSettings,
    InferenceRuntime,
    InferenceSettings,
)
from runtime_di.providers.checkpoint.format.snapshot import CheckpointError, find_checkpoint, read_snapshot
from runtime_di.testing import run_ranks
from tests.support.checkpoints.conversions import convert, names, same, save, tensors
from tests.support.checkpoints.tiny import NUM_TOKENS, TinyCheckpoint, train_in_process, train_tiny_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return train_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def test_wider_and_back_is_the_same_bit_for_bit(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """Every vocabulary tensor, the optimizer's too, gets more rows, and converting back restores the checkpoint."""
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
    """Padding rows that training has changed are stored separately when cut, and restored when converted back."""
    rows = torch.cat([torch.randn(8, 2), torch.randn(7, 2), torch.tensor([[-0.0, float("nan")]])])
    load = save(tmp_path / "run", 5, rows, tensor_parallel=4)

    narrow = convert(load, tmp_path / "narrow", tensor=1)
    back = convert(narrow, tmp_path / "back", tensor=4)

    assert len(tensors(narrow)["trainer.model.embedding.weight"]) == 8
    assert same(tensors(back), tensors(load))


def test_stored_cut_rows_survive_further_conversions(tmp_path: Path) -> None:
    """After conversion to two other sizes and back, rows are the same bit for bit."""
    load = save(tmp_path / "run", 5, torch.randn(16, 2), tensor_parallel=4)

    first = convert(load, tmp_path / "first", tensor=1)
    second = convert(first, tmp_path / "second", tensor=3)
    back = convert(second, tmp_path / "back", tensor=4)

    assert len(tensors(second)["trainer.model.embedding.weight"]) == 12
    assert same(tensors(back), tensors(load))


@pytest.mark.parametrize(("size", "added"), [(8, [[0.0, 0.0]] * 4), (7, [[14.0, 15.0]] * 4)])
def test_added_rows(size: int, added: list[list[float]], tmp_path: Path) -> None:
    """Added rows copy the last row if no token has it, because training lowers its probability; else they are zero."""
    load = save(tmp_path / "run", size, torch.arange(16.0).view(8, 2))

    wide = convert(load, tmp_path / "wide", tensor=3)

    assert tensors(wide)["trainer.model.embedding.weight"][8:].tolist() == added


def test_other_tensors_with_equally_many_rows_stay(tmp_path: Path) -> None:
    """A layer that has as many rows as the vocabulary, but does not match a pattern, is not changed."""
    load = save(tmp_path / "run", 7, torch.randn(8, 2))

    wide = convert(load, tmp_path / "wide", tensor=3)

    assert tensors(wide)["trainer.model.up.weight"].shape == (8, 4)


def test_snapshot_records_the_new_rows_and_the_old_ranks(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """The new snapshot has the new vocabulary; settings, step and the layout of the random state are unchanged."""
    before = (find_checkpoint(tiny.checkpoints) or tmp_path).joinpath("snapshot.json").read_bytes()

    wide = read_snapshot(convert(tiny.checkpoints, tmp_path / "wide", tensor=2))

    old = read_snapshot(tiny.checkpoints)
    sizes = {"size": NUM_TOKENS, "padded_size": 512, "tensor_parallel": 2, "dummy_rows": 212}
    assert wide.vocabulary == {**(old.vocabulary or {}), **sizes}
    assert (wide.step, wide.settings, wide.layout) == (old.step, old.settings, old.layout)
    assert (find_checkpoint(tiny.checkpoints) or tmp_path).joinpath("snapshot.json").read_bytes() == before


@pytest.mark.processes
def test_training_continues_on_two_ranks(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """Two tensor-parallel ranks resume training from the converted checkpoint, optimizer state included."""
    wide = convert(tiny.checkpoints, tmp_path / "wide", tensor=2)
    argv = tiny.training("--parallel.tensor", "2", "--train.steps", "3", "--checkpoint.load", str(wide))

    ranks = run_ranks(train_in_process, 2, [*argv, "--checkpoint.folder", str(tmp_path / "run")])

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
    """An explicit padded size takes precedence over the computed padding, unless tokens would be lost."""
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
    """An explicit size below the checkpoint's is refused, because the tokenizer still produces the lost tokens."""
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


def test_snapshot_records_the_requested_padding(tmp_path: Path) -> None:
    """The new checkpoint records its ``divisible_by`` for runs that take their settings from it."""
    load = save(tmp_path / "run", 5, torch.randn(8, 2))
    conversion = {"folder": tmp_path / "new", "tensor": 2}
    settings = ConverterSettings(checkpoint={"load": load}, conversion=conversion, vocabulary={"divisible_by": 3})

    with ConverterRuntime.open(settings) as runtime:
        new = runtime.converter.convert()

    assert read_snapshot(new).settings == {"vocabulary": {"divisible_by": 3}}


def serve_rows(load: Path, **vocabulary: int) -> Tensor:
    """Load a checkpoint on one rank with its divisor as the only equal setting; return the embedding."""
    values = {"divisible_by": 4, **vocabulary}
    settings = InferenceSettings(checkpoint={"load": load}, tokenizer=None, vocabulary=values)
    with InferenceRuntime.open(settings) as runtime:
        model = {"embedding.weight": torch.zeros(runtime.vocabulary.padded_size, 2), "up.weight": torch.zeros(7, 4)}
        rows = model["embedding.weight"]
        if vocabulary:
            del model["up.weight"]
        runtime.checkpointer.load({"trainer": {"model": model}})
    return rows


def test_error_for_rows_of_another_tensor_parallel_size_names_both_fixes(tmp_path: Path) -> None:
    """The error for rows with other padding names the conversion and the setting that fix it, and the setting works."""
    wide = convert(save(tmp_path / "run", 5, torch.randn(8, 2)), tmp_path / "wide", tensor=3)

    with pytest.raises(CheckpointError) as caught:
        serve_rows(wide)

    assert str(caught.value) == (
        f"{wide} does not contain this state.\n"
        "  state trainer.model.embedding.weight: of size [8, 2] here, and [12, 2] in the checkpoint\n"
        "    fix: convert the checkpoint for tensor-parallel size 1, or set vocabulary.padded_size to 12\n"
        "  state trainer.model.up.weight: of size [7, 4] here, and [8, 4] in the checkpoint\n"
        "    fix: give the model the shape that it was saved with; checkpoint.load_settings takes it from there"
    )
    assert torch.equal(serve_rows(wide, padded_size=12), tensors(wide)["trainer.model.embedding.weight"])


def convert_without_vocabulary(tmp_path: Path, vocabulary: dict[str, int], **more: Tensor) -> Path:
    """Convert a checkpoint whose snapshot has no vocabulary."""
    load = save(tmp_path / "run", 7, torch.arange(16.0).view(8, 2), **more)
    snapshot = json.loads((load / "snapshot.json").read_text())
    (load / "snapshot.json").write_text(json.dumps({**snapshot, "vocabulary": None}))
    conversion = {"folder": tmp_path / "new", "tensor": 2, "vocabulary_rows": ["*embedding*", "*head"]}
    settings = ConverterSettings(checkpoint={"load": load}, conversion=conversion, vocabulary=vocabulary)
    with ConverterRuntime.open(settings) as runtime:
        return runtime.converter.convert()


@pytest.mark.parametrize(
    ("vocabulary", "rows", "recorded"),
    [
        ({"size": 7, "divisible_by": 8}, [*range(0, 16, 2), *[14] * 8], (7, 16, "vocabulary.size")),
        ({"size": 3, "divisible_by": 2}, [0, 2, 4, 6], (3, 4, "vocabulary.size")),
        ({"padded_size": 10}, [*range(0, 16, 2), 0, 0], (10, 10, "vocabulary.padded_size")),
    ],
)
def test_explicit_vocabulary_of_a_checkpoint_without_one(
    vocabulary: dict[str, int], rows: list[int], recorded: tuple[int, int, str], tmp_path: Path
) -> None:
    """Without a recorded vocabulary, the old rows are those of the tensors; the result records the explicit one."""
    new = convert_without_vocabulary(tmp_path, vocabulary)

    snapshot = read_snapshot(new).vocabulary or {}
    assert tensors(new)["trainer.model.embedding.weight"][:, 0].tolist() == rows
    assert (snapshot["size"], snapshot["padded_size"], snapshot["origin"]) == recorded
    assert (snapshot["tensor_parallel"], snapshot["dummy_rows"]) == (2, recorded[1] - recorded[0])


def test_different_numbers_of_rows_are_refused(tmp_path: Path) -> None:
    """Without a recorded vocabulary, all tensors that match the patterns must have equally many rows."""
    with pytest.raises(CheckpointError) as caught:
        convert_without_vocabulary(tmp_path, {"size": 7}, head=torch.randn(3, 2))

    assert str(caught.value) == (
        "The checkpoint was not converted; nothing was written.\n"
        "  conversion.vocabulary_rows: trainer.head has 3 rows, and trainer.model.embedding.weight 8\n"
        "    fix: set it to the patterns of the tensors with one row a token"
    )
    assert names(tmp_path) == ["run"]


def test_patterns_without_a_match_are_refused(tmp_path: Path) -> None:
    """If the number of rows changes and no tensor matches the patterns, the conversion fails."""
    load = save(tmp_path / "run", 5, torch.randn(8, 2))

    with pytest.raises(CheckpointError, match=r"no tensor of the checkpoint matches \*\.wte, and 16 rows are needed"):
        convert(load, tmp_path / "new", tensor=4, vocabulary_rows=["*.wte"])

    assert names(tmp_path) == ["run"]
