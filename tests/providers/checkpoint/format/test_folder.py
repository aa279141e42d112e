"""Folders of checkpoints: each complete, or not there at all."""

from __future__ import annotations

import os
import resource
import shutil
import signal

import pytest

from runtime_di.providers.checkpoint.format.snapshot import (
    CheckpointError,
)
from runtime_di.testing.ranks import run_ranks
from tests.support.checkpoints.saved import die_at, open_for, weights


def test_only_the_latest_checkpoints_stay(tmp_path):
    """Only the latest ``keep`` checkpoints stay, and no other files."""
    checkpointer = open_for(tmp_path, keep=2)

    for step in (1, 2, 3, 4):
        checkpointer.save({"n": step}, step)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_step_must_be_later_than_the_latest(tmp_path):
    """A step not later than another run's latest is refused, because a resume would load the other run's."""
    open_for(tmp_path).save({"n": 1}, 20)

    with pytest.raises(CheckpointError) as caught:
        open_for(tmp_path).save({"n": 2}, 20)

    assert str(caught.value) == (
        "The checkpoint of step 20 was not saved.\n"
        f"  checkpoint.folder = {tmp_path}: step 20 is not after the latest checkpoint there, step-00000020\n"
        "    fix: resume from it with load(), or set another folder"
    )


def save_and_die(folder, count):
    """In a forked child, save step 20 and die before the ``count``-th file operation, or within a file if 0."""
    child = os.fork()
    if child == 0:
        if count:
            die_at(count)
        else:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
        open_for(folder).save({"w": weights(fill=20), "n": 20}, 20)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_everywhere(folder):
    """Kill a save at each of its file operations; return the exit codes and the loaded steps and contents."""
    outcomes = []
    for count in range(200):
        run = folder / str(count)
        shutil.copytree(folder / "before", run)
        exit_code = save_and_die(run, count)
        state = {"w": weights(fill=0), "n": 0}
        step = open_for(run).load(state)
        outcomes.append((exit_code, step, state["n"], state["w"][0, 0].item()))
        open_for(run).save({"w": weights(fill=30), "n": 30}, 30)
        left = sorted(path.name for path in run.iterdir())
        assert left == [f"step-{kept:08d}" for kept in sorted({10, step, 30})], left
        if exit_code == 0:
            return outcomes
    pytest.fail("the save never finished")


@pytest.mark.processes
def test_save_killed_anywhere_is_complete_or_does_not_exist(tmp_path):
    """A save killed before any file operation, or within a file, leaves the earlier checkpoint or its own complete."""
    open_for(tmp_path / "before").save({"w": weights(fill=10), "n": 10}, 10)

    (*killed, ended) = run_ranks(kill_everywhere, 1, tmp_path)[0]

    assert ended == (0, 20, 20, 20)
    assert {exit_code for exit_code, *_ in killed} == {-signal.SIGKILL, -signal.SIGXFSZ}
    assert {tuple(loaded) for _, *loaded in killed} == {(10, 10, 10), (20, 20, 20)}
    assert [step for _, step, *_ in killed] == sorted(step for _, step, *_ in killed)
