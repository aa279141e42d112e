"""A parent's runtime in a forked child."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime_di import ClosedError, Phase, service
from tests.support.small_runtimes import Log, declare, opener, runtime_of

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")]


def in_child(body: Callable[[], Any], timeout_s: float = 20) -> None:
    """Run ``body`` in a forked child, and fail with its traceback if it raises or hangs."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            body()
            status = 0
        except BaseException:  # noqa: BLE001 - reported to the parent
            os.write(write, traceback.format_exc().encode())
        finally:
            os._exit(status)
    os.close(write)
    deadline = time.monotonic() + timeout_s
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    report = os.read(read, 100_000).decode()
    os.close(read)
    assert (ended[1], report) == (0, "")


def test_child_uses_built_rank_local_services_and_no_others() -> None:
    """A child reads what is rank-local and built; collective and unbuilt services and starts are clear errors."""
    phases = {"tokenizer": Phase.TOKENIZER, "timers": Phase.RUNTIME, "groups": Phase.DISTRIBUTED, "rng": Phase.RNG}
    runtime = runtime_of(declare([], phases)).open()
    kept = runtime.start(through=Phase.DISTRIBUTED).tokenizer, runtime.groups, runtime.container.groups()

    def body() -> None:
        assert runtime.tokenizer is runtime.container.tokenizer() is kept[0]
        asks: list[Callable[[], object]] = [
            lambda: runtime.groups,
            runtime.container.groups,
            lambda: runtime.rng,
            runtime.start,
        ]
        for ask in asks:
            with pytest.raises(ClosedError, match=r"which forked this one.\n  fix: open a runtime in this process"):
                ask()

    in_child(body)
    assert runtime.groups is kept[1]
    runtime.close()


def test_child_may_not_build_in_its_parents_runtime() -> None:
    """A rank-local service that was not built before the fork is not built after it."""
    runtime = runtime_of(declare([], {"timers": Phase.RUNTIME})).open()

    def body() -> None:
        with pytest.raises(ClosedError, match="'timers' was requested from a SmallRuntime opened by process"):
            runtime.timers

    in_child(body)
    runtime.close()


def test_child_opens_a_runtime_of_its_own() -> None:
    """The parent's collective services do not prevent a child from opening its own runtime."""
    log: Log = []
    runtime_class = runtime_of(declare(log, {"groups": Phase.DISTRIBUTED}))
    runtime = runtime_class.open().start()

    def body() -> None:
        with runtime_class.open() as own:
            assert own.groups is not None
        assert log == ["+groups", "+groups", "-groups"]

    in_child(body)
    runtime.close()


@pytest.mark.parametrize("ends_by", ["close", "with", "sys.exit", "collection"])
def test_child_never_runs_the_parents_teardown(tmp_path: Path, ends_by: str) -> None:
    """However a child leaves, teardown is the parent's alone, ``finally`` of a suspended factory included."""
    file = tmp_path / "log"
    file.touch()

    def write(line: str) -> None:
        with file.open("a") as log:
            log.write(f"{line} in {'parent' if os.getpid() == parent else 'child'}\n")

    def open_groups() -> Iterator[int]:
        try:
            yield 1
        finally:
            write("teardown")

    parent = os.getpid()
    runtime = runtime_of({"groups": service(Phase.DISTRIBUTED, open_groups)}).open().start()
    holder = [runtime]
    del runtime

    def body() -> None:
        if ends_by == "close":
            holder[0].close()
        if ends_by == "with":
            with holder[0]:
                pass
        if ends_by == "sys.exit":
            with pytest.raises(SystemExit), holder[0]:
                sys.exit(0)
        holder.clear()
        gc.collect()

    in_child(body)
    before = file.read_text()
    holder[0].close()

    assert (before, file.read_text()) == ("", "teardown in parent\n")


def test_child_does_not_hang_on_a_lock_that_another_thread_held() -> None:
    """A fork in the middle of another thread's build leaves the child free to read and to open."""
    entered, released = threading.Event(), threading.Event()

    def open_slowly() -> int:
        entered.set()
        assert released.wait(30)
        return 1

    declared = {"tokenizer": service(Phase.TOKENIZER, opener([], "t")), "slow": service(Phase.RUNTIME, open_slowly)}
    runtime_class = runtime_of(declared)
    runtime = runtime_class.open()
    tokenizer = runtime.tokenizer
    building = threading.Thread(target=lambda: runtime.slow)
    building.start()
    assert entered.wait(10)

    def body() -> None:
        assert runtime.tokenizer is tokenizer
        with pytest.raises(ClosedError):
            runtime.slow
        runtime.close()
        assert runtime_class.open().tokenizer is not tokenizer

    in_child(body)
    released.set()
    building.join(10)

    assert runtime.slow == 1
    runtime.close()


def test_grandchild_does_not_hang_either() -> None:
    """A second fork renews the lock anew."""
    runtime = runtime_of(declare([], {"timers": Phase.RUNTIME})).open()
    timers = runtime.timers

    in_child(lambda: in_child(lambda: runtime.timers is timers))

    runtime.close()
