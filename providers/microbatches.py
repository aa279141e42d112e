"""Division of the global batch of a step into micro batches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from pydantic import PositiveInt, model_validator

from runtime_di.errors import Problem, SettingsError
from runtime_di.settings.section import Section


class RampUp(Section):
    """A global batch size that grows in equal steps."""

    start: PositiveInt
    """Global batch size of the first step."""
    increment: PositiveInt
    """Samples that each increase adds to the global batch size."""
    samples: PositiveInt
    """Consumed samples at which the full size is reached."""


class ScheduleStep(Section):
    """A global batch size that applies up to a number of consumed samples."""

    until: PositiveInt
    """Consumed samples at which the next step, or finally ``BatchSettings.global_size``, applies."""
    global_size: PositiveInt
    """Global batch size until then."""


class BatchSettings(Section):
    """Sizes of the batches, in samples."""

    global_size: PositiveInt | None = None
    """Samples of one training step over all ranks; by default one micro batch a data-parallel rank."""
    micro_size: PositiveInt = 1
    """Samples of one forward pass on one data-parallel rank."""
    ramp_up: RampUp | None = None
    """Growth of the global batch size up to ``global_size``."""
    schedule: tuple[ScheduleStep, ...] = ()
    """Other global batch sizes, by consumed samples, before ``global_size``."""
    decrease_if_needed: bool = False
    """Round a global batch size that cannot be divided evenly down to one that can."""

    @model_validator(mode="after")
    def _growth_is_unambiguous(self) -> Self:
        if self.ramp_up is not None and self.schedule:
            raise ValueError("ramp_up and schedule exclude each other: set only one of them")
        if self.decrease_if_needed and self.schedule:
            raise ValueError("decrease_if_needed cannot be used with a schedule: use sizes that need no decrease")
        if self.global_size is None and (self.ramp_up is not None or self.schedule):
            raise ValueError("ramp_up and schedule need global_size: set it too")
        return self

    @model_validator(mode="after")
    def _ramp_up_ends_at_the_global_size(self) -> Self:
        if self.ramp_up is None or self.global_size is None:
            return self
        growth = self.global_size - self.ramp_up.start
        if growth <= 0:
            raise ValueError(f"ramp_up.start {self.ramp_up.start} must be below global_size {self.global_size}")
        if growth % self.ramp_up.increment:
            raise ValueError(
                f"ramp_up.increment {self.ramp_up.increment} must divide the growth of {growth} samples, from "
                f"ramp_up.start {self.ramp_up.start} to global_size {self.global_size}"
            )
        return self

    @model_validator(mode="after")
    def _schedule_is_ascending(self) -> Self:
        for before, after in pairwise(self.schedule):
            if after.until <= before.until:
                raise ValueError(
                    f"schedule must be in ascending order of until, but {after.until} follows {before.until}"
                )
        return self

    def problems(self, data_parallel: int) -> Iterable[Problem]:
        """Yield the sizes that cannot be divided evenly among ``data_parallel`` ranks."""
        unit = self.micro_size * data_parallel
        rule = "smaller than" if self.decrease_if_needed else "not divisible by"
        for where, label, size in self._sizes():
            if size < unit or (size % unit and not self.decrease_if_needed):
                lower = f"{size // unit * unit} or " if size > unit else ""
                yield Problem(
                    f"batch.{where}",
                    f"{label} {size} is {rule} micro batch size {self.micro_size} x data-parallel size {data_parallel}",
                    fix=f"use {lower}{(size // unit + 1) * unit}, or another micro batch size",
                    involves=("batch", "parallel", "launch"),
                )

    def stages(self, global_size: int) -> Iterator[tuple[int, int]]:
        """Yield, for all sizes but the last, the consumed samples at which the size ends, and the size."""
        for step in self.schedule:
            yield step.until, step.global_size
        if self.ramp_up is not None:
            start, increment, samples = self.ramp_up.start, self.ramp_up.increment, self.ramp_up.samples
            num_increments = (global_size - start) // increment
            for done in range(num_increments):
                yield ceil_div(samples * (done + 1), num_increments), start + done * increment

    def _sizes(self) -> Iterator[tuple[str, str, int]]:
        if self.global_size is not None:
            yield "global_size", "global batch size", self.global_size
        if self.ramp_up is not None:
            yield "ramp_up.start", "global batch size", self.ramp_up.start
            if not self.decrease_if_needed:
                yield "ramp_up.increment", "increment", self.ramp_up.increment
        for position, step in enumerate(self.schedule):
            yield f"schedule.{position}.global_size", "global batch size", step.global_size


def ceil_div(dividend: int, divisor: int) -> int:
    """Divide and round up, exactly."""
    return -(-dividend // divisor)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Division of one training step's batch.

    Attributes:
        global_size: samples of the step over all ranks.
        micro_size: samples of one forward pass on one data-parallel rank.
        num_microbatches: forward passes of one data-parallel rank.
    """

    global_size: int
    micro_size: int
    num_microbatches: int


class MicrobatchCalculator:
    """Computes the batch plan of a step from the samples consumed before it; keeps no count itself.

    Args:
        settings: sizes without `problems` for ``data_parallel``.
        data_parallel: number of ranks that share a global batch.
    """

    micro_size: int
    data_parallel: int

    def __init__(self, settings: BatchSettings, data_parallel: int) -> None:
        self.micro_size = settings.micro_size
        self.data_parallel = data_parallel
        full = settings.global_size or settings.micro_size * data_parallel
        stages = list(settings.stages(full))
        self._ends = [end for end, _ in stages]
        self._plans = [self._plan(size) for size in [*(size for _, size in stages), full]]

    def at(self, consumed_samples: int) -> BatchPlan:
        """Return the plan of the step that follows ``consumed_samples`` samples."""
        return self._plans[bisect_right(self._ends, consumed_samples)]

    def _plan(self, size: int) -> BatchPlan:
        num_microbatches = size // (self.micro_size * self.data_parallel)
        return BatchPlan(num_microbatches * self.micro_size * self.data_parallel, self.micro_size, num_microbatches)


def open_microbatches(settings: BatchSettings, data_parallel: int) -> MicrobatchCalculator:
    """Build the calculator.

    Raises:
        SettingsError: a size cannot be divided evenly.
    """
    if problems := list(settings.problems(data_parallel)):
        raise SettingsError("Batches cannot be divided among the data-parallel ranks:", problems)
    return MicrobatchCalculator(settings, data_parallel)
