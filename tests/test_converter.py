"""The converter: another tensor-parallel size or one file, bit for bit and back, and nothing where it fails."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from runtime_di import CapabilityError, SettingsError, VocabularyError
from runtime_di.containers import (
    ConverterRuntime,
    ConverterSettings,
    InferenceRuntime,
    InferenceSettings,
    TrainingSettings,
)
from runtime_di.providers.checkpoint_index import read_index
from runtime_di.providers.checkpoint_loader import CheckpointLoader, LoadSettings, open_checkpoint_loader
from runtime_di.providers.checkpointer import CheckpointSettings, open_checkpointer
from runtime_di.providers.folder_converter import _read
from runtime_di.providers.process_groups import ProcessGroups
from runtime_di.providers.rank_grid import RankGrid
from runtime_di.providers.snapshot import CheckpointError, find_checkpoint, read_snapshot
from runtime_di.providers.vocabulary import Vocabulary
from runtime_di.testing import run_ranks
from tiny_checkpoint import NUM_TOKENS, Tiny, make_tiny, train_here

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def save(folder: Path, size: int, rows: Tensor, tensor_parallel: int = 1, **more: Any) -> Path:
    """A checkpoint of a model that is an embedding and a layer."""
    groups = ProcessGroups.pretend(RankGrid(world_size=1))
    vocabulary = Vocabulary(size, len(rows), "tokenizer", len(rows) - size, tensor_parallel)
    model = {"embedding.weight": rows, "up.weight": torch.randn(len(rows), 4)}
    state = {"trainer": {"model": model, **more}, "seed": 7}
    settings = {"vocabulary": {"divisible_by": 4}}
    return open_checkpointer(CheckpointSettings(folder=folder), groups, vocabulary, settings).save(state, 2)


def convert(load: Path, folder: Path, tokenizer: Any = None, **conversion: Any) -> Path:
    settings = ConverterSettings(
        checkpoint={"load": load},
        vocabulary={"divisible_by": 4 if read_snapshot(load).settings["vocabulary"]["divisible_by"] == 4 else 128},
        conversion={"folder": folder, **conversion},
        tokenizer={"kind": "file", "path": tokenizer} if isinstance(tokenizer, Path) else tokenizer,
    )
    with ConverterRuntime.open(settings) as runtime:
        return runtime.converter.convert()


def tensors(checkpoint: Path) -> dict[str, Tensor]:
    checkpoint = find_checkpoint(checkpoint) or checkpoint
    return {path: _read(checkpoint, path, entry) for path, entry in read_index(checkpoint).items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    bits = [{path: (t.dtype, t.shape, t.numpy().tobytes()) for path, t in held.items()} for held in (one, other)]
    return bits[0] == bits[1]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Another tensor-parallel size


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


# One file


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


def loader_of(checkpoint: Path) -> CheckpointLoader:
    return open_checkpoint_loader(LoadSettings(load=checkpoint), ProcessGroups.pretend(RankGrid(world_size=1)))


def test_files_have_the_mode_of_any_file(tmp_path: Path) -> None:
    """Whoever may read a file that this user makes may read a checkpoint, saved or converted, the tensors included."""
    load = save(tmp_path / "run", 5, torch.randn(8, 2))
    new = [convert(load, tmp_path / "wide", tensor=2), convert(load, tmp_path / "single", single_file=True)]
    (tmp_path / "any").touch()

    modes = {file.stat().st_mode for folder in (load, *new) for file in folder.iterdir()}

    assert modes == {(tmp_path / "any").stat().st_mode}


# The tokenizer beside it


def tokenizer_sections(folder: Path, corpus: Path) -> list[dict[str, Any]]:
    """A section of each kind that has files, which lie in ``folder``, and of one that has none."""
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
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moved anywhere, the result gives a run the files that were copied, whatever the kind; others stay where they are.

    Another conversion takes them along.
    """
    sections = tokenizer_sections(tmp_path, tiny.corpus)
    load = save(tmp_path / "run", 5, torch.randn(8, 2))

    for number, section in enumerate(sections):
        given = TrainingSettings(tokenizer=section).tokenizer
        first = convert(load, tmp_path / f"first-{number}", tokenizer=section, single_file=True)
        moved = first.rename(tmp_path / f"moved-{number}")
        monkeypatch.chdir(moved)
        taken = settings_of(moved)
        monkeypatch.chdir(tmp_path)
        again = settings_of(convert(moved, tmp_path / f"again-{number}", tokenizer=taken.tokenizer))

        for found, folder in ((taken, moved), (again, tmp_path / f"again-{number}")):
            assert found.tokenizer == given.model_copy(update=copies(given, folder))
            for name, copy in copies(given, folder).items():
                assert copy.read_bytes() == (given.file if section["kind"] == "file" else section[name]).read_bytes()
                told = f"tokenizer.{name} = {copy} (from checkpoint {folder})"
                assert str(found.explain(f"tokenizer.{name}")).splitlines()[0] == told


def copies(tokenizer: Any, folder: Path) -> dict[str, Path]:
    if tokenizer.kind == "file":
        return {"path": folder / "tokenizer.json"}
    return {name: folder / value.name for name, value in dict(tokenizer).items() if isinstance(value, Path)}


def settings_of(checkpoint: Path) -> TrainingSettings:
    return TrainingSettings.load(["--checkpoint.load", str(checkpoint), "--checkpoint.load_settings"])


def test_tokenizer_beside_the_result_is_opened(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From another folder, with the training run's own files out of reach, a worker encodes with the copies."""
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


def test_ordinary_paths_of_a_checkpoint_stay(tiny: Tiny) -> None:
    """The path in the snapshot of a training run is taken as it is."""
    assert settings_of(tiny.checkpoints).tokenizer.path == tiny.corpus


def test_result_without_a_tokenizer_names_no_file(tmp_path: Path) -> None:
    """Converted on without its tokenizer, a result does not refer to files that it does not have."""
    (tmp_path / "vocab.txt").write_text("[UNK]")
    section = {"kind": "wordpiece", "vocab_file": tmp_path / "vocab.txt"}
    first = convert(save(tmp_path / "run", 5, torch.randn(8, 2)), tmp_path / "first", tokenizer=section)

    second = convert(first, tmp_path / "second")

    assert read_snapshot(first).files == {"tokenizer": {"vocab_file": "vocab.txt"}}
    assert (read_snapshot(second).files, "tokenizer" in read_snapshot(second).settings) == ({}, False)


@pytest.mark.parametrize("name", ["../vocab.txt", "/etc/passwd", "..", "sub/vocab.txt"])
def test_file_outside_the_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    """A snapshot that refers to a file elsewhere is refused as a whole, and says which setting does."""
    checkpoint = save(tmp_path / "run", 5, torch.randn(8, 2))
    told = json.loads((checkpoint / "snapshot.json").read_text())
    told["files"] = {"tokenizer": {"vocab_file": name}}
    (checkpoint / "snapshot.json").write_text(json.dumps(told))

    with pytest.raises(SettingsError, match=r"files\.tokenizer\.vocab_file: .* is no name of a file in the checkpoint"):
        settings_of(checkpoint)


# What it refuses


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
