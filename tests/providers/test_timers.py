"""Timers of the parts of a training step."""

from __future__ import annotations

import math
import os
from contextlib import contextmanager

import pytest
from pydantic import ValidationError

from runtime_di.errors import ServiceError
from runtime_di.providers.timers import Report, Timers, TimerSettings, open_timers
from runtime_di.testing import run_ranks


class FakeClock:
    """A clock that only a test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_seconds_of_several_runs_add_up(clock: FakeClock) -> None:
    """A timer adds up its runs until it is read, and then restarts from 0."""
    timers = Timers(clock, level=1)

    for seconds in (1.0, 2.0):
        with timers("forward"):
            clock.now += seconds

    assert timers.elapsed("forward", reset=False) == 3.0
    assert timers.elapsed("forward") == 3.0
    assert timers.elapsed("forward") == 0.0


def test_report_has_every_timer(clock: FakeClock) -> None:
    """A report contains the seconds of all timers by name and restarts them from 0."""
    timers = Timers(clock, level=2)
    timers.start("step")
    with timers("forward", level=2):
        clock.now += 2.0
    clock.now += 1.0
    timers.stop("step")

    report = timers.report()

    assert report == {"forward": 2.0, "step": 3.0}
    assert timers.report() == {}


@pytest.mark.parametrize(("level", "names"), [(0, {"step"}), (1, {"step", "forward"}), (2, {"step", "forward", "mlp"})])
def test_timers_above_the_level_measure_nothing(level: int, names: set[str]) -> None:
    """A timer is measured only up to the level of the settings."""
    timers = Timers(level=level)

    for timer_level, name in enumerate(("step", "forward", "mlp")):
        with timers(name, level=timer_level):
            pass

    assert timers.report().keys() == names


@pytest.mark.parametrize("level", [0, 1])
def test_start_twice_is_refused(level: int) -> None:
    """Starting a running timer is an error, also for a timer that is not measured."""
    timers = Timers(level=level)
    timers.start("forward")

    with pytest.raises(ServiceError) as error:
        timers.start("forward")

    assert str(error.value) == (
        "Timers start and stop in pairs:\n"
        "  timer 'forward': was started while running\n"
        "    fix: stop it first, or give the inner part another name"
    )


@pytest.mark.parametrize("level", [0, 1])
def test_stop_without_start_is_refused(level: int) -> None:
    """Stopping a timer that is not running is an error, also for a timer that is not measured."""
    timers = Timers(level=level)
    timers.start("forward")
    timers.stop("forward")

    with pytest.raises(ServiceError, match="timer 'forward': was stopped while not running"):
        timers.stop("forward")


def test_failed_body_is_not_counted(clock: FakeClock) -> None:
    """A body that raises leaves no seconds and no running timer, and the device is not synchronised again."""
    timers = Timers(clock, level=1)
    waits: list[float] = []
    timers.synchronize = lambda: waits.append(clock.now)

    def fail() -> None:
        with timers("forward"):
            clock.now += 1.0
            raise ValueError("body")

    with pytest.raises(ValueError, match="body"):
        fail()
    with timers("forward"):
        clock.now += 2.0

    assert waits == [100.0, 101.0, 103.0]
    assert timers.report() == {"forward": 2.0}


def test_device_is_synchronised_at_start_and_stop(clock: FakeClock) -> None:
    """Device work that is unfinished when a timer stops is counted; work from before its start is not."""

    def finish_device_work() -> None:
        clock.now += 5.0

    timers = Timers(clock, level=1)
    timers.synchronize = finish_device_work

    with timers("forward"):
        clock.now += 1.0

    assert timers.elapsed("forward") == 6.0


def test_unmeasured_timers_do_not_synchronise_the_device() -> None:
    """A timer above the level never synchronises the device."""
    timers = Timers(level=0)
    timers.synchronize = lambda: pytest.fail("waited for the device")

    with timers("forward"):
        pass

    assert timers.elapsed("forward") == 0.0


def test_close_discards_running_timers(clock: FakeClock) -> None:
    """Closing discards running timers and the device's ``synchronize``, also after a failed body."""
    with contextmanager(open_timers)(TimerSettings(level=1), clock) as timers:
        timers.synchronize = lambda: None
        timers.start("forward")

    timers.start("forward")
    assert timers.synchronize is None


def test_level_is_checked() -> None:
    """A level above 2 is refused, and a level as text is parsed."""
    with pytest.raises(ValidationError, match="less than or equal to 2"):
        TimerSettings(level=3)

    assert TimerSettings.model_validate({"level": "2"}).level == 2


def reduced(report: Report) -> tuple[dict[str, tuple[float, ...]], dict[str, float]]:
    """Time the rank and its square on every rank, and one more timer on the last."""
    import torch.distributed as dist

    rank, clock = int(os.environ["RANK"]), FakeClock()
    timers = Timers(clock, level=1, report=report)

    def measure(name: str, seconds: float) -> None:
        with timers(name):
            clock.now += seconds

    dist.init_process_group("gloo")
    measure("step", rank)
    if rank == 2:
        measure("loss", 8.0)
    result = timers.reduce()
    dist.destroy_process_group()
    return result, timers.report()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("report", "expected"),
    [
        ("max", {"loss": (8.0,), "step": (2.0,)}),
        ("minmax", {"loss": (8.0, 8.0), "step": (0.0, 2.0)}),
        ("all", {"loss": (math.nan, math.nan, 8.0), "step": (0.0, 1.0, 2.0)}),
    ],
)
def test_ranks_agree_on_what_they_reduce(report: Report, expected: dict[str, tuple[float, ...]]) -> None:
    """Ranks that measured different timers return the same result and restart from 0."""
    results = run_ranks(reduced, 3, report)

    assert [repr(result) for result, _ in results] == [repr(expected)] * 3
    assert [left for _, left in results] == [{}] * 3
