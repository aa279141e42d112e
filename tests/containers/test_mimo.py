"""The MiMo entrypoint and example: modules on their own grids, their losses, and their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from gpt.training_state import resume_or_load_pretrained
from mimo.caption_data import CAPTION_LENGTH, NUM_DIGITS, CaptionFileSettings, Captions
from mimo.modules import CaptionTrainer
from mimo.pictures import WIDTH, draw_samples, glyphs
from runtime_di import CapabilityError, SettingsError, VocabularyError
from runtime_di.containers import (
    InferenceRuntime,
    InferenceSettings,
    MimoContainer,
    MimoGridsSettings,
    MimoRuntime,
    MimoSettings,
)
from runtime_di.providers.grids.settings import GridSettings
from runtime_di.providers.vocabulary import Vocabulary
from runtime_di.testing.fakes import FakeWriter
from runtime_di.testing.ranks import run_ranks
from tests.support.checkpoints.tiny import NUM_TOKENS, TinyCheckpoint, train_tiny_checkpoint
from train_mimo import PICTURE_WIDTH, CaptionRuntime, CaptionSettings, train

SMALL: dict[str, Any] = {
    "model": {"num_layers": 1, "width": 32, "context_length": 32},
    "vocabulary": {"divisible_by": 64},  # so that one rank and two have the rows of the checkpoint
    "vision": {"hidden_width": 32},
    "device": {"kind": "cpu"},
    "log": {"level": "ERROR"},
    "distributed": {"timeout_s": 60},
    "batch": {"global_size": 16, "micro_size": 4},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return train_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def settings(tiny: TinyCheckpoint, grids: dict[str, Any], folder: Path | None = None, **more: Any) -> CaptionSettings:
    checkpoint = {"load": tiny.checkpoints, "folder": folder, "every": 2}
    return CaptionSettings(**SMALL | more, grids=grids, captions={"folder": tiny.corpus}, checkpoint=checkpoint)


def losses(
    tiny: TinyCheckpoint, grids: dict[str, Any], steps: int, folder: Path | None = None, **more: Any
) -> list[tuple[int, float]]:
    """Run the example on this rank; return steps and losses."""
    writer = FakeWriter()
    learn = {"steps": steps, "learning_rate": 0.01}
    with CaptionRuntime.open(
        settings(tiny, grids, folder, learn=learn, **more), overrides={"writer": writer}
    ) as runtime:
        train(runtime)
    return list(writer.scalars["loss"])


# Start from a checkpoint


def test_language_starts_from_the_checkpoint(tiny: TinyCheckpoint) -> None:
    """Weights and vocabulary are those of pretrain_gpt.py's checkpoint, and no tokenizer is built."""
    saved = torch.zeros(384, 32)
    with InferenceRuntime.open(InferenceSettings(checkpoint={"load": tiny.checkpoints})) as inference:
        inference.checkpointer.load({"trainer": {"model": {"head.weight": saved}}})

    with CaptionRuntime.open(settings(tiny, {})) as runtime:
        trainer = CaptionTrainer(runtime.start())
        first = resume_or_load_pretrained(runtime, trainer.state)

        assert first == 0
        assert trainer.language is not None
        assert torch.equal(trainer.language.model.head.weight, saved)
        assert (runtime.vocabulary.size, runtime.vocabulary.origin.partition(" ")[0]) == (NUM_TOKENS, "checkpoint")
        assert "tokenizer" in runtime.disabled


@pytest.mark.parametrize("missing", ["checkpoint", "captions"])
def test_checkpoint_and_captions_are_required(missing: str, tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """A missing checkpoint or captions file is an error before anything is built."""
    folders = {"checkpoint": tiny.checkpoints, "captions": tiny.corpus, missing: tmp_path}
    incomplete = CaptionSettings(checkpoint={"load": folders["checkpoint"]}, captions={"folder": folders["captions"]})

    with pytest.raises(CapabilityError) as refused:
        CaptionRuntime.open(incomplete)

    assert [problem.where.partition(".")[0] for problem in refused.value.problems] == [missing]


def test_captions_of_another_vocabulary_are_refused(tiny: TinyCheckpoint) -> None:
    """Captions with a token outside the checkpoint's vocabulary are an error."""
    vocabulary = Vocabulary(size=20, padded_size=64, origin="checkpoint runs/other")

    with pytest.raises(VocabularyError, match=r"has the token \d+, but the vocabulary of checkpoint runs/other has 20"):
        Captions(CaptionFileSettings(folder=tiny.corpus), vocabulary)


# Training


@pytest.mark.processes
@pytest.mark.parametrize(
    ("num_ranks", "grids"),
    [
        (2, {"vision": {"size": 1}}),
        (2, {}),
        (4, {"vision": {"size": 2}, "language": {"parallel": {"tensor": 2}}}),
        (4, {"language": {"parallel": {"tensor": 2}}}),
    ],
    ids=["2 separate", "2 shared", "4 separate", "4 shared"],
)
def test_losses_do_not_depend_on_the_grids(num_ranks: int, grids: dict[str, Any], tiny: TinyCheckpoint) -> None:
    """On any division of the ranks, the losses are those of one rank."""
    alone = losses(tiny, {}, 4)

    losses_by_rank = run_ranks(losses, num_ranks, tiny, grids, 4, timeout_s=100)

    for rank_losses in losses_by_rank:
        assert dict(rank_losses) == pytest.approx(dict(alone), abs=2e-4)


@pytest.mark.processes
def test_the_loss_falls(tiny: TinyCheckpoint) -> None:
    """With vision and language on separate ranks, the loss falls."""
    written = run_ranks(losses, 2, tiny, {"vision": {"size": 1}}, 25, timeout_s=100)

    assert written[0][0][1] > 5.3
    assert written[0][-1][1] < 2.6


def test_language_uses_the_features(tiny: TinyCheckpoint) -> None:
    """The loss falls below the entropy of random digits, so language reads the features of vision."""
    loss_without_features = NUM_DIGITS * torch.tensor(10.0).log().item() / CAPTION_LENGTH

    written = losses(tiny, {}, 150, batch={"global_size": 32, "micro_size": 32})

    assert written[-1][1] < 0.9 * loss_without_features


def run_whole_and_interrupted(
    tiny: TinyCheckpoint, grids: dict[str, Any], folder: Path
) -> list[list[tuple[int, float]]]:
    """On one rank: the losses of a whole run, of a run of two steps, and of the run that resumes it."""
    return [losses(tiny, grids, 4), losses(tiny, grids, 2, folder), losses(tiny, grids, 4, folder)]


@pytest.mark.processes
def test_the_example_resumes(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """Modules on separate ranks are saved together, and the resumed run has the losses of an uninterrupted one."""
    grids = {"vision": {"size": 2}, "language": {"parallel": {"tensor": 2}}}

    whole, start, rest = run_ranks(run_whole_and_interrupted, 4, tiny, grids, tmp_path, timeout_s=100)[0]

    assert [*start, *rest] == whole


# Samples and settings


def test_pictures_show_their_numbers() -> None:
    """Up to noise, a picture has the glyphs of its number at one height; equal seeds give equal pictures."""
    pictures, numbers = draw_samples(3, 5)

    assert torch.equal(pictures, draw_samples(3, 5)[0])
    for picture, number in zip(pictures, numbers.tolist(), strict=True):
        digits = [int(digit) for digit in f"{number:04}"]
        word = torch.cat([torch.nn.functional.pad(glyphs()[digit], (0, 1)) for digit in digits], dim=1)
        distances = [(picture[top : top + 5] - word).abs().mean() for top in range(4)]
        assert min(distances) < 0.25


def test_captions_name_the_numbers(tiny: TinyCheckpoint) -> None:
    """The corpus's tokenizer decodes the caption of a number to its digits."""
    vocabulary = Vocabulary(size=NUM_TOKENS, padded_size=384, origin="checkpoint")

    captions = Captions(CaptionFileSettings(folder=tiny.corpus), vocabulary).tokens(torch.tensor([7, 9042]))

    tokenizer = Tokenizer.from_file(str(tiny.corpus / "tokenizer.json"))
    assert captions.shape == (2, CAPTION_LENGTH)
    assert tokenizer.decode_batch(captions.tolist()) == ["0007", "9042"]


def test_settings_have_the_width_of_the_pictures() -> None:
    """The width that the settings validate with, without importing torch, is that of the pictures."""
    assert PICTURE_WIDTH == WIDTH


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"vision": {"patch_width": 3}}, "vision.patch_width = 3 (from constructor): does not divide the picture's 16"),
        ({"model": {"context_length": 7}}, "model.context_length = 7 (from constructor): features and caption need 8"),
        ({"grids": {"language": {"parallel": {"pipeline": 2}}}}, "this module supports data parallelism alone"),
        ({"grids": {"language": {"parallel": {"tensor": 8}}}}, "cannot share 4 attention heads"),
    ],
    ids=["patch", "context", "pipeline", "heads"],
)
def test_wrong_settings_are_refused(values: dict[str, Any], problem: str) -> None:
    """A setting that the example does not support is an error that names it."""
    with pytest.raises(SettingsError) as refused:
        CaptionSettings(**values, launch={"world_size": 8}, batch={"global_size": 8, "micro_size": 1})

    assert problem in str(refused.value)


def test_vocabulary_is_padded_for_the_language_ranks() -> None:
    """Without a tokenizer the vocabulary comes from the settings, padded for language's tensor-parallel ranks."""
    settings = MimoSettings(
        vocabulary={"size": 50257},
        grids={"vision": {"size": 1}, "language": {"size": 2, "parallel": {"tensor": 2}}},
        launch={"world_size": 3},
    )

    with MimoRuntime.open(settings) as runtime:
        vocabulary = runtime.vocabulary

        assert (vocabulary.padded_size, vocabulary.origin, vocabulary.tensor_parallel) == (50432, "vocabulary.size", 2)
        assert "tokenizer" in runtime.disabled


# Checkpoints


def build_state(runtime: MimoRuntime, value: float) -> dict[str, Any]:
    """State of this rank: a weight and a number of each local module, and the random streams."""
    state: dict[str, Any] = {f"{name}_rng": streams for name, streams in runtime.rngs.items()}
    for index, name in enumerate(runtime.grids):
        if runtime.grids[name].is_here:
            state[name] = {"weight": torch.full((3,), value + index), "steps": value + index}
    return state


def save_and_load(folder: Path, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Save on the grids ``before``, load on the grids ``after``; return the loaded values of each module."""
    common = {"device": {"kind": "cpu"}, "log": {"level": "ERROR"}, "distributed": {"timeout_s": 60}}
    for grids, value in ((before, 5.0), (after, 0.0)):
        settings = MimoSettings(**common, batch={"global_size": 2}, grids=grids, checkpoint={"folder": folder})
        with MimoRuntime.open(settings) as runtime:
            state = build_state(runtime.start(), value)
            if value:
                runtime.checkpointer.save(state, 1)
            else:
                runtime.checkpointer.load(state)
    return {
        name: (*set(module["weight"].tolist()), module["steps"]) for name, module in state.items() if "_rng" not in name
    }


def save_and_load_both_ways(folder: Path) -> list[dict[str, Any]]:
    separate: dict[str, Any] = {"vision": {"size": 1}}
    return [save_and_load(folder / "shared", separate, {}), save_and_load(folder / "separate", {}, separate)]


@pytest.mark.processes
def test_checkpoint_loads_on_another_division_of_the_ranks(tmp_path: Path) -> None:
    """Modules that were saved on separate ranks are loaded on shared ones, and the reverse."""
    vision, language = {"vision": (5.0, 5.0)}, {"language": (6.0, 6.0)}

    loaded = run_ranks(save_and_load_both_ways, 2, tmp_path, timeout_s=100)

    assert loaded == [[vision | language, vision], [vision | language, language]]


# A module of the user


class SoundGrids(MimoGridsSettings):
    links = {**MimoGridsSettings.links, "sounds": ("sound", "language")}  # noqa: RUF012

    sound: GridSettings = GridSettings()


class SoundSettings(MimoSettings):
    grids: SoundGrids = SoundGrids()


class SoundRuntime(MimoRuntime, container=MimoContainer):
    settings: SoundSettings


def test_user_adds_a_module() -> None:
    """A field and a link add a module with its grid, groups, random streams and link."""
    with SoundRuntime.open(SoundSettings(device={"kind": "cpu"})) as runtime:
        runtime.start()

        assert list(runtime.grids) == ["vision", "language", "sound"]
        assert sorted(runtime.grids.links) == ["activations", "sounds"]
        assert runtime.grids["sound"].mesh.size() == 1
        assert len({streams.base_seed for streams in runtime.rngs.values()}) == 3
