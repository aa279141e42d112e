"""Work that ranks do together: what fails on one of them is raised on all, so that none waits for the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from runtime_di.errors import Problem
from runtime_di.providers.snapshot import CheckpointError

T = TypeVar("T")
_Outcome = tuple[T | None, CheckpointError | None]


class Ranks:
    """The ranks of the default process group; a process without peers is a world of its own.

    Attributes:
        rank: this rank.
        world_size: ranks that share a checkpoint.
        alone: whether there is nobody to talk to: the world is one, or its other ranks are not real.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.alone = world_size == 1 or not dist.is_initialized() or dist.get_backend() == "fake"

    def together(self, heading: str, work: Callable[[], T]) -> T:
        """Do ``work`` on every rank and return this rank's result.

        Raises:
            CheckpointError: it failed on some rank; raised on every one, under ``heading``.
        """
        result, failure = self._attempt(heading, work)
        failures = self.gathered(failure)
        told = [other for other in failures if other]
        if told:
            problems = dict.fromkeys(problem for other in told for problem in other.problems)
            raise CheckpointError(told[0].heading, problems) from (failure and failure.__cause__)
        return result  # type: ignore[return-value]

    def first(self, heading: str, work: Callable[[], T]) -> T:
        """Do ``work`` on rank 0 and return its result on every rank; a failure is raised on every rank."""
        outcome: _Outcome[T] | None = self._attempt(heading, work) if self.rank == 0 or self.alone else None
        result, failure = outcome if outcome and self.alone else self._broadcast(outcome)
        if failure:
            cause = outcome and outcome[1] and outcome[1].__cause__
            raise failure from cause
        return result  # type: ignore[return-value]

    def gathered(self, value: T) -> list[T]:
        """Tell every rank what each has, in rank order; a rank alone hears itself."""
        if self.alone:
            return [value]
        values = [value] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    def _attempt(self, heading: str, work: Callable[[], T]) -> _Outcome[T]:
        try:
            return work(), None
        except CheckpointError as failure:
            return None, failure
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
            told = CheckpointError(heading, [Problem(f"rank {self.rank}", f"{type(error).__name__}: {error}")])
            told.__cause__ = error
            return None, told

    @staticmethod
    def _broadcast(outcome: _Outcome[T] | None) -> _Outcome[T]:
        outcomes: list[_Outcome[T] | None] = [outcome]
        dist.broadcast_object_list(outcomes, src=0)
        return outcomes[0] or (None, None)
