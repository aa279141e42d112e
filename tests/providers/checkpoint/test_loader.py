"""Loading: which checkpoint, at which sharding, and what does not fit."""

from __future__ import annotations

import logging

import pytest
import torch

from runtime_di.providers.checkpoint.format.snapshot import (
    CheckpointError,
)
from tests.support.checkpoints.saved import App, one_rank_state, open_for, plain, weights


def test_raw_optimizer_without_state_is_refused(tmp_path):
    """Loading a saved optimizer state into an optimizer without state is an error, not a silent loss."""
    app = App(1).step(1)
    open_for(tmp_path).save({"optimizer": app.optimizer}, 1)

    with pytest.raises(CheckpointError) as caught:
        open_for(tmp_path).load({"optimizer": App(1).optimizer})

    assert str(caught.value) == (
        f"{tmp_path}/step-00000001 does not contain this state.\n"
        f"  state optimizer: without tensors here, and with tensors in the checkpoint\n"
        f"    fix: give the state its tensors before loading, as get_optimizer_state_dict does"
    )


def test_all_entries_that_cannot_be_loaded_are_reported_together(tmp_path):
    """The error names every entry that the checkpoint lacks or has in another form, and nothing is loaded."""
    open_for(tmp_path).save({"w": weights(), "lr": 0.1, "gone": 1}, 1)
    state = {"w": weights(3, fill=0), "v": torch.zeros(1), "lr": torch.zeros(1), "n": 5}

    with pytest.raises(CheckpointError) as caught:
        open_for(tmp_path).load(state)

    assert str(caught.value) == (
        f"{tmp_path}/step-00000001 does not contain this state.\n"
        "  state lr: a tensor here, and not in the checkpoint\n"
        "    fix: load a checkpoint that has it, or leave it out of the state that is loaded\n"
        "  state v: a tensor here, and not in the checkpoint\n"
        "    fix: load a checkpoint that has it, or leave it out of the state that is loaded\n"
        "  state w: of size [3, 4] here, and [6, 4] in the checkpoint\n"
        "    fix: give the model the shape that it was saved with; checkpoint.load_settings takes it from there\n"
        "  state n: a plain value here, and not in the checkpoint\n"
        "    fix: load a checkpoint that has it, or leave it out of the state that is loaded"
    )
    assert torch.equal(state["w"], weights(3, fill=0))


def test_folder_takes_precedence_over_load(tmp_path):
    """A run resumes from its own folder, and starts from ``load`` if that contains no checkpoint."""
    open_for(tmp_path / "base").save({"n": 1}, 100)
    run = {"folder": tmp_path / "run", "load": tmp_path / "base"}
    first, again = {"n": 0}, {"n": 0}

    started = open_for(**run).load(first)
    open_for(**run).save({"n": 2}, 5)
    resumed = open_for(**run).load(again)

    assert (started, first, resumed, again) == (100, {"n": 1}, 5, {"n": 2})
    assert open_for(**run).latest == tmp_path / "run/step-00000005"


def test_named_checkpoint_must_exist(tmp_path):
    """A run whose checkpoint to load does not exist fails rather than starting from scratch."""
    with pytest.raises(CheckpointError, match="contains no complete checkpoint"):
        open_for(load=tmp_path).load({"n": 0})


@pytest.mark.processes
@pytest.mark.usefixtures("on_two_ranks")
def test_one_rank_loads_what_two_saved(root, caplog):
    """Tensors are resharded; plain values that differ between the ranks are not loaded, and the log names them."""
    state = one_rank_state(fill=-1)

    with caplog.at_level(logging.WARNING):
        open_for(root / "two").load(state)

    assert plain(state) == plain(one_rank_state()) | {"rng": [9, 9, 9], "position": {"sample": 9}}
    assert caplog.messages == [
        f"{root}/two/step-00000020 is of another parallel layout; "
        "these values differ between its ranks and were not loaded: position, rng"
    ]


@pytest.mark.processes
def test_two_ranks_load_what_one_saved(on_two_ranks):
    """A checkpoint of one rank is resharded to two, and both load its plain values."""
    loaded = [result["one"] for result in on_two_ranks]

    assert loaded == [(20, plain(one_rank_state()))] * 2


@pytest.mark.processes
def test_sharding_may_change(on_two_ranks):
    """A DTensor can be loaded under another placement than it was saved with."""
    equal = [result[change] for result in on_two_ranks for change in ("rows to columns", "columns to copies")]

    assert equal == [True] * 4
