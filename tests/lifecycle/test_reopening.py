"""Every opening builds new services, and leaves nothing behind."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dependency_injector import providers
from dependency_injector.wiring import Provide, inject

from runtime_di import ClosedError, Phase, RuntimeContainer, RuntimeSettings, service
from tests.support.small_runtimes import (
    Log,
    declare,
    module_with,
    opener,
    runtime_of,
)

settings = RuntimeContainer.settings


def test_opening_twice_gives_two_runtimes_with_their_own_services() -> None:
    """Rank-local services of two open runtimes are their own, and each closes its own (B81)."""
    log: Log = []
    runtime_class = runtime_of(declare(log, {"timers": Phase.RUNTIME}))

    with runtime_class.open() as first:
        with runtime_class.open() as second:
            assert first.timers is not second.timers
        assert first.timers
        with pytest.raises(ClosedError):
            second.timers

    assert log == ["+timers", "+timers", "-timers", "-timers"]


def test_reopened_runtime_builds_anew() -> None:
    """Nothing survives a close: every service of the next opening is new (B27, B79)."""
    runtime_class = runtime_of(declare([], {"a": Phase.TOKENIZER, "b": Phase.RUNTIME}, {"b": ["a"]}))

    with runtime_class.open() as first:
        held = (first.a, first.b)
    with runtime_class.open() as second:
        assert second.b.args == (second.a,)
        assert second.a is not held[0]


def test_open_and_close_a_thousand_times_leaves_nothing(tmp_path: Path) -> None:
    """Objects, threads and file descriptors do not grow, with files, wiring, overrides and failing bodies."""

    def open_file(path: Path) -> Iterator[Any]:
        with path.open("w") as file:
            yield file

    @inject
    def ask(a: Any = Provide["a"]) -> Any:
        return a

    a = service(Phase.RUNTIME, open_file, tmp_path / "file")
    declared = {"a": a, "b": service(Phase.DISTRIBUTED, opener([], "b"), a, providers.Factory(dict, a=a))}
    runtime_class, module, job = runtime_of(declared), module_with(ask=ask), RuntimeSettings()

    def cycle(place: int) -> None:
        with runtime_class.open(job, wire=[module], overrides={"b": 1} if place % 3 == 0 else {}) as runtime:
            runtime.start()
            assert ask() is runtime.a is runtime.container.a()

    def counts() -> tuple[int, int, int]:
        gc.collect()
        return len(gc.get_objects()), threading.active_count(), len(os.listdir("/proc/self/fd"))

    for place in range(20):
        cycle(place)
    before = counts()
    for place in range(1000):
        cycle(place)
    after = counts()

    assert after[0] - before[0] < 200
    assert after[1:] == before[1:]


def test_closed_runtime_is_collected() -> None:
    """A runtime that is closed and dropped is gone, with its container, after one collection."""
    runtime = runtime_of(declare([], {"a": Phase.RUNTIME})).open().start()
    gone = weakref.ref(runtime), weakref.ref(runtime.a)

    runtime.close()
    del runtime
    gc.collect()

    assert [reference() for reference in gone] == [None, None]
