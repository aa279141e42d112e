"""Several modules, each on a grid of its own: the example learns, and is the same however its ranks are divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from numerals import CAPTION_LENGTH, NUM_DIGITS, WIDTH, draw, glyphs
from runtime_di import SettingsError
from runtime_di.containers import MimoContainer, MimoGridsSettings, MimoRuntime, MimoSettings
from runtime_di.providers.grid_settings import GridSettings
from runtime_di.testing.fakes import FakeWriter
from runtime_di.testing.ranks import run_ranks
from train_mimo import CAPTION_LENGTH as CAPTION_POSITIONS
from train_mimo import PICTURE_WIDTH, CaptionRuntime, CaptionSettings, train

SMALL: dict[str, Any] = {
    "model": {"num_layers": 1, "width": 32, "context_length": 16},
    "vision": {"hidden_width": 32},
    "device": {"kind": "cpu"},
    "log": {"level": "ERROR"},
    "distributed": {"timeout_s": 60},
    "batch": {"global_size": 16, "micro_size": 4},
}


def losses(grids: dict[str, Any], steps: int) -> list[float]:
    """Run the example on this rank; return the loss of each step."""
    writer = FakeWriter()
    settings = CaptionSettings(**SMALL, grids=grids, learn={"steps": steps, "learning_rate": 0.01})
    with CaptionRuntime.open(settings, overrides={"writer": writer}) as runtime:
        train(runtime)
    return [loss for _, loss in writer.scalars["loss"]]


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
def test_the_division_does_not_change_the_model(num_ranks: int, grids: dict[str, Any]) -> None:
    """Activations and gradients pass between grids so that the losses are those of one rank."""
    alone = losses({}, 4)

    told = run_ranks(losses, num_ranks, grids, 4, timeout_s=100)

    for own in told:
        assert own == pytest.approx(alone, abs=2e-4)


def test_the_loss_falls() -> None:
    """On two ranks apart, the modules learn together."""
    told = run_ranks(losses, 2, {"vision": {"size": 1}}, 25, timeout_s=100)

    assert told[0][0] > 5.3
    assert told[0][-1] < 2.6


def test_only_seeing_explains_the_captions() -> None:
    """The language module gets below what the digits' frequencies alone can tell, so it reads what vision sends."""
    frequencies_alone = NUM_DIGITS * torch.tensor(10.0).log().item() / CAPTION_LENGTH

    settings = CaptionSettings(
        **{**SMALL, "batch": {"global_size": 32, "micro_size": 32}}, learn={"steps": 150, "learning_rate": 0.01}
    )
    writer = FakeWriter()
    with CaptionRuntime.open(settings, overrides={"writer": writer}) as runtime:
        train(runtime)

    assert writer.scalars["loss"][-1][1] < 0.9 * frequencies_alone


def test_pictures_show_their_captions() -> None:
    """Without noise, the glyphs of the caption's digits are in the picture, at one height, and equal seeds agree."""
    pictures, captions = draw(3, 5)

    assert torch.equal(pictures, draw(3, 5)[0])
    for picture, caption in zip(pictures, captions, strict=True):
        digits = [int(byte) - ord("0") for byte in caption[:NUM_DIGITS]]
        word = torch.cat([torch.nn.functional.pad(glyphs()[digit], (0, 1)) for digit in digits], dim=1)
        distances = [(picture[top : top + 5] - word).abs().mean() for top in range(4)]
        assert min(distances) < 0.25
        assert bytes(caption.tolist()).decode() == "".join(map(str, digits)) + "\n"


def test_settings_know_the_pictures() -> None:
    """The sizes that settings are checked with, before torch is imported, are those of the pictures."""
    assert (PICTURE_WIDTH, CAPTION_POSITIONS) == (WIDTH, CAPTION_LENGTH)


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
