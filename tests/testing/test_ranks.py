"""Functions run in real ranks: their environment, and the report of a failure."""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import psutil
import pytest

from runtime_di.testing.ranks import RanksError, run_ranks

if TYPE_CHECKING:
    from pathlib import Path


def rank() -> int:
    return int(os.environ["RANK"])


def wait_forever() -> None:
    threading.Event().wait()


def add_to_rank(number: int) -> int:
    return rank() + number


def variables(*names: str) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def sum_of_ranks() -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def greet() -> None:
    sys.stdout.write("hello\nworld\n")
    sys.stderr.write("careful\n")


def raise_on_rank_1_while_others_wait() -> None:
    if rank() == 1:
        raise LookupError("no shard")
    wait_forever()


def wait_on_rank_1() -> None:
    if rank() == 1:
        wait_forever()


def kill_rank_1() -> None:
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def leave_early() -> None:
    sys.stderr.write("out of patience")
    os._exit(0)


def return_a_lock() -> object:
    return threading.Lock()


def leave_a_child(fifo: Path) -> None:
    with fifo.open("wb") as held:
        subprocess.Popen(["sleep", "1000"], stdout=held)


@pytest.mark.processes
def test_returns_results_in_rank_order() -> None:
    """Each rank is called with the arguments, and its result stands at its rank."""
    results = run_ranks(add_to_rank, 3, 10)

    assert results == [10, 11, 12]


@pytest.mark.processes
def test_reduces_over_ranks() -> None:
    """Four ranks rendezvous at the address and port in their environment."""
    results = run_ranks(sum_of_ranks, 4)

    assert results == [6.0] * 4


@pytest.mark.processes
def test_sets_the_variables_of_torchrun() -> None:
    """A rank finds itself on one node, with one OpenMP thread and a port that it shares with the others."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "OMP_NUM_THREADS")

    first, second = run_ranks(variables, 2, *names, "MASTER_PORT")

    assert [second[name] for name in names] == ["1", "2", "1", "2", "0", "127.0.0.1", "1"]
    assert int(first["MASTER_PORT"] or 0) == int(second["MASTER_PORT"] or 0) > 0


@pytest.mark.processes
def test_inherits_no_launch_and_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank inherits this process's variables as they are now, but neither its launch nor our settings."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "outer")
    monkeypatch.setenv("RUNTIME_DI_PARALLEL__TENSOR", "2")
    monkeypatch.setenv("DATA_HOME", "/data")

    results = run_ranks(variables, 1, "TORCHELASTIC_RUN_ID", "RUNTIME_DI_PARALLEL__TENSOR", "DATA_HOME")

    assert results == [
        {"TORCHELASTIC_RUN_ID": None, "RUNTIME_DI_PARALLEL__TENSOR": None, "DATA_HOME": "/data"},
    ]


@pytest.mark.processes
def test_variables_may_differ_by_rank() -> None:
    """Variables passed as ``env`` override those of the launch, and may be a function of the rank."""
    results = run_ranks(variables, 2, "LOCAL_RANK", env=lambda rank: {"LOCAL_RANK": str(rank + 4)})

    assert results == [{"LOCAL_RANK": "4"}, {"LOCAL_RANK": "5"}]


@pytest.mark.processes
def test_prints_what_ranks_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Output of the ranks appears here, in rank order and marked with the rank."""
    run_ranks(greet, 2)

    out, err = capsys.readouterr()
    assert out == "[rank 0] hello\n[rank 0] world\n[rank 1] hello\n[rank 1] world\n"
    assert err == "[rank 0] careful\n[rank 1] careful\n"


@pytest.mark.processes
def test_reports_the_traceback_and_stops_the_others() -> None:
    """A rank that raised is reported with its traceback; ranks that wait for it are killed and reported with stacks."""
    with pytest.raises(
        RanksError, match=r"^1 of 3 ranks failed in tests\.testing\.test_ranks\.raise_on_rank_1"
    ) as caught:
        run_ranks(raise_on_rank_1_while_others_wait, 3)

    error = caught.value
    assert error.failures.keys() == error.exceptions.keys() == {1}
    assert isinstance(error.exceptions[1], LookupError)
    assert error.failures[1].endswith("LookupError: no shard")
    assert error.stopped.keys() == {0, 2}
    assert all("in wait_forever" in stacks for stacks in error.stopped.values())
    assert all(
        text.splitlines()[-1].strip() in str(error) for text in (*error.failures.values(), *error.stopped.values())
    )


@pytest.mark.processes
def test_reports_the_stacks_at_the_timeout() -> None:
    """A rank that still runs at the timeout is killed and reported with its stacks, which end at its function."""
    with pytest.raises(RanksError) as caught:
        run_ranks(wait_on_rank_1, 2, timeout_s=3)

    assert caught.value.failures.keys() == {1}
    assert caught.value.failures[1].startswith("was killed at the timeout of 3 s; its stacks:")
    assert "in wait_forever" in caught.value.failures[1].splitlines()[-2]
    assert "in wait_on_rank_1" in caught.value.failures[1].splitlines()[-1]


@pytest.mark.processes
def test_reports_the_signal_that_killed_a_rank() -> None:
    """A rank killed by a signal is reported with its exit code."""
    with pytest.raises(RanksError) as caught:
        run_ranks(kill_rank_1, 2)

    assert str(caught.value) == (
        "1 of 2 ranks failed in tests.testing.test_ranks.kill_rank_1.\n"
        "  rank 1 died with exit code -9 (Killed) before its function returned"
    )


@pytest.mark.processes
def test_reports_an_early_exit() -> None:
    """A rank that leaves without a result has failed, whatever its exit code, and its last errors are reported."""
    with pytest.raises(RanksError) as caught:
        run_ranks(leave_early, 1)

    assert caught.value.failures == {
        0: "died with exit code 0 before its function returned; its last errors:\n  out of patience"
    }


@pytest.mark.processes
def test_reports_a_result_that_cannot_be_sent() -> None:
    """A result that cannot be pickled is a failure of its rank."""
    with pytest.raises(RanksError, match=r"cannot pickle '_thread\.lock' object"):
        run_ranks(return_a_lock, 1)


def test_refuses_what_cannot_be_sent() -> None:
    """A function that other processes cannot import is refused with a hint, before any rank starts."""
    with pytest.raises((pickle.PicklingError, AttributeError)) as caught:
        run_ranks(lambda: None, 1)

    assert caught.value.__notes__ == [
        "run_ranks pickles the function and its arguments: define them at the top level of a module"
    ]


def test_refuses_an_empty_world() -> None:
    """A world has at least one rank."""
    with pytest.raises(ValueError, match="num_ranks is 0: at least one rank is required"):
        run_ranks(variables, 0)


@pytest.mark.processes
def test_leaves_no_process(tmp_path: Path) -> None:
    """After the call no process that a rank started is alive, here the last writer of a pipe."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with open(os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)) as reader:
        run_ranks(leave_a_child, 1, fifo)

        writers_gone = select.select([reader], [], [], 10)[0]

    assert writers_gone


SCRIPT = """
import os, sys, threading
from pathlib import Path

from runtime_di.testing import run_ranks

def wait(fifo):
    Path(fifo).write_text(str(os.getpid()))
    threading.Event().wait()

if __name__ == "__main__":
    assert "torch" not in sys.modules
    run_ranks(wait, 1, sys.argv[1])
"""


@pytest.mark.processes
def test_ranks_die_with_a_script(tmp_path: Path) -> None:
    """A plain script runs ranks without importing torch itself, and when it is killed they die."""
    script, fifo = tmp_path / "script.py", tmp_path / "fifo"
    script.write_text(SCRIPT)
    os.mkfifo(fifo)

    with subprocess.Popen([sys.executable, script, fifo]) as caller:
        rank_process = psutil.Process(int(fifo.read_text()))
        caller.kill()

    assert psutil.wait_procs([rank_process], timeout=10)[0] == [rank_process]
