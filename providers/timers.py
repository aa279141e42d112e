"""Timers for the parts of a training step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from runtime_di.errors import Problem, ServiceError
from runtime_di.settings.section import Section

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Clock = Callable[[], float]
Report = Literal["max", "minmax", "all"]


class TimerSettings(Section):
    """What is timed, and how the times of several ranks are combined."""

    level: Annotated[int, Field(ge=0, le=2)] = 0
    """0 times only level 0, 1 also the parts of a step, 2 everything."""
    report: Report = "max"
    """Seconds reported for several ranks: the maximum, minimum and maximum, or those of every rank."""


class Timers:
    """Sums up seconds by name; for one thread.

    A timer above ``level`` costs a lookup, measures nothing and is in no report; it too must start and stop in pairs.

    Args:
        clock: returns monotonic seconds.
        level: highest level that is measured.
        report: what `reduce` returns for several ranks.

    Attributes:
        synchronize: blocks until the device has finished its work; called when a timer starts and stops. Set it to
            ``torch.cuda.synchronize`` once a GPU is in use. ``None`` times the host only.
    """

    synchronize: Callable[[], object] | None

    def __init__(self, clock: Clock = time.perf_counter, level: int = 0, report: Report = "max") -> None:
        self.synchronize = None
        self._clock = clock
        self._level = level
        self._report = report
        self._started: dict[str, float | None] = {}
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str, level: int = 1) -> Iterator[None]:
        """Time the body; if it raises, the run is not counted and the device not synchronised."""
        self.start(name, level)
        try:
            yield
        except BaseException:
            self._started.pop(name, None)
            raise
        self.stop(name)

    def start(self, name: str, level: int = 1) -> None:
        """Start a timer.

        Raises:
            ServiceError: it is already running.
        """
        if name in self._started:
            raise _unpaired(name, "was started while running", "stop it first, or give the inner part another name")
        self._started[name] = self._now() if level <= self._level else None

    def stop(self, name: str) -> None:
        """Stop a timer and add its seconds to those since the last reset.

        Raises:
            ServiceError: it is not running.
        """
        if name not in self._started:
            raise _unpaired(name, "was stopped while not running", "start it first")
        started = self._started[name]
        if started is not None:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - started
        del self._started[name]

    def elapsed(self, name: str, reset: bool = True) -> float:
        """Return the seconds of all finished runs since the last reset; 0 for a timer that measured nothing."""
        return self._seconds.pop(name, 0.0) if reset else self._seconds.get(name, 0.0)

    def report(self, reset: bool = True) -> dict[str, float]:
        """Return the seconds of this rank by name, in the order in which timers first stopped."""
        seconds = dict(self._seconds)
        if reset:
            self._seconds.clear()
        return seconds

    def reduce(self, group: ProcessGroup | None = None, reset: bool = True) -> dict[str, tuple[float, ...]]:
        """Combine the reports of a group's ranks; one collective, which every rank of the group calls.

        Ranks may have measured different timers. All ranks return the same result, sorted by name.

        Args:
            group: the ranks; the whole world by default.
            reset: whether to restart from 0.

        Returns:
            Name to ``(maximum,)``, ``(minimum, maximum)``, or the seconds of every rank of the group, NaN for a rank
            that has not measured the timer.
        """
        import torch.distributed as dist

        reports: list[dict[str, float]] = [{} for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(reports, self.report(reset), group)
        return {name: self._reduced(name, reports) for name in sorted(set().union(*reports))}

    def stop_all(self) -> None:
        """Discard the runs that have not stopped, without synchronising the device."""
        self._started.clear()

    def _reduced(self, name: str, reports: list[dict[str, float]]) -> tuple[float, ...]:
        measured = [report[name] for report in reports if name in report]
        if self._report == "all":
            return tuple(report.get(name, float("nan")) for report in reports)
        return (max(measured),) if self._report == "max" else (min(measured), max(measured))

    def _now(self) -> float:
        if self.synchronize is not None:
            self.synchronize()
        return self._clock()


def _unpaired(name: str, what: str, fix: str) -> ServiceError:
    return ServiceError("Timers start and stop in pairs:", [Problem(f"timer '{name}'", what, fix=fix)])


def open_timers(settings: TimerSettings, clock: Clock = time.perf_counter) -> Iterator[Timers]:
    """Create timers that synchronise no device; the training loop sets ``synchronize`` when it uses one."""
    timers = Timers(clock, level=settings.level, report=settings.report)
    yield timers
    timers.stop_all()
    timers.synchronize = None
