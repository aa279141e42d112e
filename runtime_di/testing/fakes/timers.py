"""Fake timers, with a clock that the test advances."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime_di.providers.timers import Report, Timers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class FakeClock:
    """A clock that only `advance` moves."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Advance the clock."""
        self.now += seconds


class FakeTimers(Timers):
    """Timers of one rank, with a clock that the test advances: ``timers.clock.advance(1.5)``."""

    def __init__(self, level: int = 2, report: Report = "max") -> None:
        self.clock = FakeClock()
        super().__init__(self.clock, level, report)

    def reduce(self, group: ProcessGroup | None = None, reset: bool = True) -> dict[str, tuple[float, ...]]:
        """Reduce over a group of one: the report of this rank."""
        report = self.report(reset)
        return {name: self._reduced(name, [report]) for name in sorted(report)}
