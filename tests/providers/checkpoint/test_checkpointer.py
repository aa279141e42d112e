"""Checkpointers: when and what they save, on one rank and several."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from runtime_di.providers.checkpoint.format.snapshot import (
    CheckpointError,
    read_snapshot,
)
from runtime_di.providers.vocabulary import Vocabulary
from runtime_di.testing.ranks import RanksError, run_ranks
from tests.support.checkpoints.saved import App, die_at, one_rank_state, open_for, plain, weights, world
from tests.support.checkpoints.two_ranks import (
    parallel_state,
)


def test_defaults_write_nothing(tmp_path, monkeypatch):
    """Without a folder no step is due, there is nothing to load, and the error of a save names the setting."""
    monkeypatch.chdir(tmp_path)
    checkpointer = open_for()

    with pytest.raises(CheckpointError) as caught:
        checkpointer.save({"step": 1}, 1)

    assert (checkpointer.due(1000), checkpointer.load({"step": 0}), checkpointer.latest) == (False, None, None)
    assert list(tmp_path.iterdir()) == []
    assert str(caught.value) == (
        "The checkpoint was not saved; earlier ones are unchanged.\n"
        "  checkpoint.folder: not set, so there is no place to save\n"
        "    fix: set checkpoint.folder, or save only when due(step)"
    )


def test_due_at_multiples_of_every(tmp_path):
    """A step is due when it is a positive multiple of ``every``, or the last one."""
    checkpointer = open_for(tmp_path, every=5)

    due = [step for step in range(12) if checkpointer.due(step, last=11)]

    assert due == [5, 10, 11]


def test_training_resumes_bitwise(tmp_path):
    """A loaded model and optimizer take the same steps, bit for bit, as the saved ones."""
    saved = App(1).step(2)
    open_for(tmp_path).save({"app": saved}, 2)
    loaded = App(2)

    step = open_for(tmp_path).load({"app": loaded})

    assert step == 2
    assert loaded.optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert loaded.step(2).bits() == saved.step(2).bits()


def test_own_step_is_not_saved_twice(tmp_path):
    """Saving the step just saved or resumed from, as at the end of a run, writes nothing."""
    saver, resumer = open_for(tmp_path), open_for(tmp_path)
    path = saver.save({"n": 1}, 20)
    before = path.stat().st_mtime_ns
    resumer.load({"n": 0})

    again = [saver.save({"n": 1}, 20), resumer.save({"n": 1}, 20)]

    assert (again, path.stat().st_mtime_ns) == ([path, path], before)


def test_snapshot_is_detached(tmp_path):
    """The snapshot records settings and vocabulary as of the opening of the checkpointer."""
    settings: dict[str, Any] = {"model": {"layers": 1}, "paths": [Path("a")]}
    checkpointer = open_for(tmp_path, snapshot=settings)
    settings["model"]["layers"] = 2
    checkpointer.save({}, 3)

    snapshot = read_snapshot(tmp_path)

    assert snapshot.settings == {"model": {"layers": 1}, "paths": ["a"]}
    assert snapshot.vocabulary == asdict(Vocabulary(100, 128, "tokenizer"))
    assert (snapshot.step, snapshot.world_size, snapshot.parallel["tp"]) == (3, 1, 1)


@pytest.mark.processes
def test_two_ranks_load_what_two_saved(on_two_ranks):
    """In the same layout every rank loads its shards and its own plain values, bit for bit."""
    loaded = [result["two"] for result in on_two_ranks]

    expected = plain(one_rank_state())
    assert loaded == [(20, expected), (20, expected | {"rng": [1, 1, 1], "position": {"sample": 1}})]


@pytest.mark.processes
def test_sharded_training_resumes_bitwise(on_two_ranks, root):
    """A fully sharded model and its optimizer resume bit for bit, and load on one rank as well."""
    alone = App(3)
    open_for(root / "trained").load({"app": alone})

    assert all(saved == loaded for saved, loaded in (result["trained"] for result in on_two_ranks))
    assert alone.bits() == App(1).step(2).bits()


def die_in_second_save(folder):
    with world() as (rank, world_size):
        checkpointer = open_for(folder, rank=rank, world_size=world_size)
        checkpointer.save(parallel_state(), 10)
        if rank == 1:
            die_at(3)
        checkpointer.save(parallel_state(), 20)


@pytest.mark.processes
def test_killed_rank_leaves_the_earlier_checkpoint(tmp_path):
    """If a rank is killed during a save, the other rank raises, and the earlier checkpoint is the latest."""
    with pytest.raises(RanksError) as caught:
        run_ranks(die_in_second_save, 2, tmp_path)

    state = one_rank_state(fill=-1)
    assert open_for(tmp_path).load(state) == 10
    assert torch.equal(state["rows"], weights())
    assert set(caught.value.failures) == {0, 1}
    assert "-9" in caught.value.failures[1]


def pretend_to_be_rank_3(folder):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    mesh = init_device_mesh("cpu", (4,))
    state = {"w": distribute_tensor(weights(8, fill=0), mesh, [Shard(0)], src_data_rank=None)}
    checkpointer = open_for(folder, rank=3, world_size=4)
    checkpointer.load(state)
    try:
        checkpointer.save(state, 2)
    except CheckpointError as error:
        return state["w"].to_local().tolist(), error.problems[0].what
    return None


@pytest.mark.processes
def test_rank_of_a_fake_world_loads_and_does_not_save(tmp_path):
    """On the fake backend a rank loads its shards; a save is refused, because the other shards would be missing."""
    open_for(tmp_path).save({"w": weights(8)}, 1)

    local, refusal = run_ranks(pretend_to_be_rank_3, 1, tmp_path)[0]

    assert local == weights(8)[6:].tolist()
    assert refusal == "the other ranks of rank 3 of 4 are fake and save no shards"
