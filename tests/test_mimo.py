"""Several modules, each on a grid of its own: the example learns, and is the same however its ranks are divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from captions import CAPTION_LENGTH, NUM_DIGITS, CaptionFileSettings, Captions
from mimo_modules import Captioner
from numerals import WIDTH, draw, glyphs
from runtime_di import CapabilityError, SettingsError, VocabularyError
from runtime_di.containers import (
    InferenceRuntime,
    InferenceSettings,
    MimoContainer,
    MimoGridsSettings,
    MimoRuntime,
    MimoSettings,
)
from runtime_di.providers.grid_settings import GridSettings
from runtime_di.providers.vocabulary import Vocabulary
from runtime_di.testing.fakes import FakeWriter
from runtime_di.testing.ranks import run_ranks
from tiny_checkpoint import NUM_TOKENS, Tiny, make_tiny
from train_mimo import PICTURE_WIDTH, CaptionRuntime, CaptionSettings, train
from trained import resume

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
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def settings(tiny: Tiny, grids: dict[str, Any], folder: Path | None = None, **more: Any) -> CaptionSettings:
    checkpoint = {"load": tiny.checkpoints, "folder": folder, "every": 2}
    return CaptionSettings(**SMALL | more, grids=grids, captions={"folder": tiny.corpus}, checkpoint=checkpoint)


def losses(
    tiny: Tiny, grids: dict[str, Any], steps: int, folder: Path | None = None, **more: Any
) -> list[tuple[int, float]]:
    """Run the example on this rank; return the loss of each step."""
    writer = FakeWriter()
    learn = {"steps": steps, "learning_rate": 0.01}
    with CaptionRuntime.open(
        settings(tiny, grids, folder, learn=learn, **more), overrides={"writer": writer}
    ) as runtime:
        train(runtime)
    return list(writer.scalars["loss"])


# The start


def test_language_starts_from_the_checkpoint(tiny: Tiny) -> None:
    """Weights are those that pretrain_gpt.py saved, the vocabulary is the checkpoint's, and no tokenizer is built."""
    saved = torch.zeros(384, 32)
    with InferenceRuntime.open(InferenceSettings(checkpoint={"load": tiny.checkpoints})) as inference:
        inference.checkpointer.load({"trainer": {"model": {"head.weight": saved}}})

    with CaptionRuntime.open(settings(tiny, {})) as runtime:
        captioner = Captioner(runtime.start())
        first = resume(runtime, captioner.state)

        assert first == 0
        assert captioner.language is not None
        assert torch.equal(captioner.language.model.head.weight, saved)
        assert (runtime.vocabulary.size, runtime.vocabulary.origin.partition(" ")[0]) == (NUM_TOKENS, "checkpoint")
        assert "tokenizer" in runtime.disabled


@pytest.mark.parametrize("missing", ["checkpoint", "captions"])
def test_what_it_starts_from_is_asked_first(missing: str, tiny: Tiny, tmp_path: Path) -> None:
    """Without a checkpoint or captions it is refused before anything is built, with what to run."""
    here = {"checkpoint": tiny.checkpoints, "captions": tiny.corpus, missing: tmp_path}
    lacking = CaptionSettings(checkpoint={"load": here["checkpoint"]}, captions={"folder": here["captions"]})

    with pytest.raises(CapabilityError) as refused:
        CaptionRuntime.open(lacking)

    assert [problem.where.partition(".")[0] for problem in refused.value.problems] == [missing]


def test_captions_of_another_vocabulary_are_refused(tiny: Tiny) -> None:
    """Tokens that the checkpoint's vocabulary lacks are told, rather than looked up in vain."""
    vocabulary = Vocabulary(size=20, padded_size=64, origin="checkpoint runs/other")

    with pytest.raises(VocabularyError, match=r"has the token \d+, and the vocabulary of checkpoint runs/other 20"):
        Captions(CaptionFileSettings(folder=tiny.corpus), vocabulary)


# Training


@pytest.mark.parametrize(
    ("num_ranks", "grids"),
    [
        (2, {"vision": {"size": 1}}),
        (2, {}),
        (4, {"vision": {"size": 2}, "language": {"parallel": {"tensor": 2}}}),
        (4, {"language": {"parallel": {"tensor": 2}}}),
    ],
    ids=["2 apart", "2 shared", "4 apart", "4 shared"],
)
def test_the_division_does_not_change_the_model(num_ranks: int, grids: dict[str, Any], tiny: Tiny) -> None:
    """Activations and gradients pass between grids so that the losses are those of one rank."""
    alone = losses(tiny, {}, 4)

    told = run_ranks(losses, num_ranks, tiny, grids, 4, timeout_s=100)

    for own in told:
        assert dict(own) == pytest.approx(dict(alone), abs=2e-4)


def test_the_loss_falls(tiny: Tiny) -> None:
    """On two ranks apart, the modules learn together."""
    told = run_ranks(losses, 2, tiny, {"vision": {"size": 1}}, 25, timeout_s=100)

    assert told[0][0][1] > 5.3
    assert told[0][-1][1] < 2.6


def test_only_seeing_explains_the_captions(tiny: Tiny) -> None:
    """The language module gets below what the digits' frequencies alone can tell, so it reads what vision sends."""
    frequencies_alone = NUM_DIGITS * torch.tensor(10.0).log().item() / CAPTION_LENGTH

    told = losses(tiny, {}, 150, batch={"global_size": 32, "micro_size": 32})

    assert told[-1][1] < 0.9 * frequencies_alone


def interrupted(tiny: Tiny, grids: dict[str, Any], folder: Path) -> list[list[tuple[int, float]]]:
    """On one rank: a whole run, one that was to end after two steps, and what the same command did after it."""
    return [losses(tiny, grids, 4), losses(tiny, grids, 2, folder), losses(tiny, grids, 4, folder)]


def test_the_example_resumes(tiny: Tiny, tmp_path: Path) -> None:
    """Modules on ranks of their own are saved together, and go on as if the run had not stopped."""
    grids = {"vision": {"size": 2}, "language": {"parallel": {"tensor": 2}}}

    whole, start, rest = run_ranks(interrupted, 4, tiny, grids, tmp_path, timeout_s=100)[0]

    assert [*start, *rest] == whole


# Pictures, and settings


def test_pictures_show_their_numbers() -> None:
    """Up to noise, the glyphs of the number's digits are in the picture, at one height, and equal seeds agree."""
    pictures, numbers = draw(3, 5)

    assert torch.equal(pictures, draw(3, 5)[0])
    for picture, number in zip(pictures, numbers.tolist(), strict=True):
        digits = [int(digit) for digit in f"{number:04}"]
        word = torch.cat([torch.nn.functional.pad(glyphs()[digit], (0, 1)) for digit in digits], dim=1)
        distances = [(picture[top : top + 5] - word).abs().mean() for top in range(4)]
        assert min(distances) < 0.25


def test_captions_name_the_numbers(tiny: Tiny) -> None:
    """The corpus's tokenizer, which the example does without, reads each number in the tokens of its caption."""
    vocabulary = Vocabulary(size=NUM_TOKENS, padded_size=384, origin="checkpoint")

    captions = Captions(CaptionFileSettings(folder=tiny.corpus), vocabulary).of(torch.tensor([7, 9042]))

    tokenizer = Tokenizer.from_file(str(tiny.corpus / "tokenizer.json"))
    assert captions.shape == (2, CAPTION_LENGTH)
    assert tokenizer.decode_batch(captions.tolist()) == ["0007", "9042"]


def test_settings_know_the_pictures() -> None:
    """The width that settings are checked with, before torch is imported, is that of the pictures."""
    assert PICTURE_WIDTH == WIDTH


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"vision": {"patch_width": 3}}, "vision.patch_width = 3 (from constructor): does not divide the picture's 16"),
        ({"model": {"context_length": 7}}, "model.context_length = 7 (from constructor): features and caption need 8"),
        ({"grids": {"language": {"parallel": {"pipeline": 2}}}}, "this module knows data parallelism alone"),
        ({"grids": {"language": {"parallel": {"tensor": 8}}}}, "cannot share 4 attention heads"),
    ],
    ids=["patch", "context", "pipeline", "heads"],
)
def test_wrong_settings_are_told(values: dict[str, Any], told: str) -> None:
    """What the example cannot do is told with its setting."""
    with pytest.raises(SettingsError) as refused:
        CaptionSettings(**values, launch={"world_size": 8}, batch={"global_size": 8, "micro_size": 1})

    assert told in str(refused.value)


def test_vocabulary_is_shared_by_the_language_ranks() -> None:
    """Without a tokenizer the vocabulary comes from the settings, padded for the language module's ranks."""
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


def modules_of(runtime: MimoRuntime, value: float) -> dict[str, Any]:
    """A weight and a number of each module that is here, and its random streams."""
    state: dict[str, Any] = {f"{name}_rng": streams for name, streams in runtime.rngs.items()}
    for place, name in enumerate(runtime.grids):
        if runtime.grids[name].is_here:
            state[name] = {"weight": torch.full((3,), value + place), "steps": value + place}
    return state


def carry_over(folder: Path, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Save on grids laid out in one way, load on the same ranks laid out in another; return what each module has."""
    common = {"device": {"kind": "cpu"}, "log": {"level": "ERROR"}, "distributed": {"timeout_s": 60}}
    for grids, value in ((before, 5.0), (after, 0.0)):
        settings = MimoSettings(**common, batch={"global_size": 2}, grids=grids, checkpoint={"folder": folder})
        with MimoRuntime.open(settings) as runtime:
            state = modules_of(runtime.start(), value)
            if value:
                runtime.checkpointer.save(state, 1)
            else:
                runtime.checkpointer.load(state)
    return {name: (*set(held["weight"].tolist()), held["steps"]) for name, held in state.items() if "_rng" not in name}


def carry_over_both_ways(folder: Path) -> list[dict[str, Any]]:
    apart: dict[str, Any] = {"vision": {"size": 1}}
    return [carry_over(folder / "together", apart, {}), carry_over(folder / "apart", {}, apart)]


def test_modules_go_on_with_their_ranks_divided_otherwise(tmp_path: Path) -> None:
    """Modules that were saved on ranks of their own are loaded on shared ones, and the reverse."""
    vision, language = {"vision": (5.0, 5.0)}, {"language": (6.0, 6.0)}

    told = run_ranks(carry_over_both_ways, 2, tmp_path, timeout_s=100)

    assert told == [[vision | language, vision], [vision | language, language]]


# Modules of a user's own


class SoundGrids(MimoGridsSettings):
    links = {**MimoGridsSettings.links, "sounds": ("sound", "language")}  # noqa: RUF012

    sound: GridSettings = GridSettings()


class SoundSettings(MimoSettings):
    grids: SoundGrids = SoundGrids()


class SoundRuntime(MimoRuntime, container=MimoContainer):
    settings: SoundSettings


def test_a_module_of_the_users_own() -> None:
    """A few lines add a module, with a grid, groups, random streams and a link to another."""
    with SoundRuntime.open(SoundSettings(device={"kind": "cpu"})) as runtime:
        runtime.start()

        assert list(runtime.grids) == ["vision", "language", "sound"]
        assert sorted(runtime.grids.links) == ["activations", "sounds"]
        assert runtime.grids["sound"].mesh.size() == 1
        assert len({streams.base_seed for streams in runtime.rngs.values()}) == 3
