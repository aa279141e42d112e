"""Collective steps: a failure on one rank is raised on every rank, so that no rank blocks on the others."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from runtime_di.errors import Problem
from runtime_di.providers.checkpoint.format.snapshot import CheckpointError

T = TypeVar("T")
_Outcome = tuple[T | None, CheckpointError | None]


class RankSync:
    """Runs steps on the ranks of the default process group, and raises on every rank what failed on one.

    Attributes:
        rank: this rank.
        world_size: ranks that share a checkpoint.
        alone: whether this process has no peers: the world size is 1, or the other ranks of the world are fake.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.alone = world_size == 1 or not dist.is_initialized() or dist.get_backend() == "fake"

    def on_every_rank(self, heading: str, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank and return this rank's result; collective.

        Raises:
            CheckpointError: it failed on some rank; raised on every rank, under ``heading``.
        """
        result, own_failure = self._attempt(heading, work)
        failures = [failure for failure in self.all_gather(own_failure) if failure]
        if failures:
            problems = dict.fromkeys(problem for failure in failures for problem in failure.problems)
            raise CheckpointError(failures[0].heading, problems) from (own_failure and own_failure.__cause__)
        return result  # type: ignore[return-value]

    def on_first_rank(self, heading: str, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0 and return its result on every rank; collective.

        Raises:
            CheckpointError: it failed; raised on every rank, under ``heading``.
        """
        outcome: _Outcome[T] | None = self._attempt(heading, work) if self.rank == 0 or self.alone else None
        result, failure = outcome if outcome and self.alone else self._broadcast(outcome)
        if failure:
            cause = outcome and outcome[1] and outcome[1].__cause__
            raise failure from cause
        return result  # type: ignore[return-value]

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks in rank order; of this rank only if it has no peers."""
        if self.alone:
            return [value]
        values = [value] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    @contextmanager
    def translate_failures(self, heading: str) -> Iterator[None]:
        """Re-raise a `CheckpointException`, which torch raises on all ranks, as a `CheckpointError`.

        Raises:
            CheckpointError: the block failed on some rank; it names each failed rank under ``heading``.
        """
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                yield
        except CheckpointException as error:
            own = error.failures.get(self.rank)
            if own and not isinstance(own[0], Exception):  # such as KeyboardInterrupt
                raise own[0] from None
            problems = [Problem(f"rank {rank}", f"{type(e).__name__}: {e}") for rank, (e, _) in error.failures.items()]
            raise CheckpointError(heading, problems) from error

    def _attempt(self, heading: str, work: Callable[[], T]) -> _Outcome[T]:
        try:
            return work(), None
        except CheckpointError as error:
            return None, error
        except Exception as error:  # noqa: BLE001 - the other ranks must learn of any failure
            problem = Problem(f"rank {self.rank}", f"{type(error).__name__}: {error}")
            failure = CheckpointError(heading, [problem])
            failure.__cause__ = error
            return None, failure

    @staticmethod
    def _broadcast(outcome: _Outcome[T] | None) -> _Outcome[T]:
        outcomes: list[_Outcome[T] | None] = [outcome]
        dist.broadcast_object_list(outcomes, src=0)
        return outcomes[0] or (None, None)
