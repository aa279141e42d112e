"""Barriers on a store: all ranks enter a body together and leave it together, unless one fails.

The keys of a generation after its rendezvous, all below ``G/``; ``grids N/`` stands before those of grids::

    key                            value                                written by   read by
    failed                         the first failure: rank, type, text  any rank     all, polled
    ready/arrived/R, done/...      empty: rank R is there               rank R       all, to name missing ranks
    ready/arrivals, done/...       counter of the ranks there           all          all, polled until the world size
    left                           counter of ranks, `rendezvous.store` others       rank 0, which hosts the store
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from runtime_di.errors import Problem, ProblemsError, ServiceError
from runtime_di.lifecycle.teardown import original_failure, run_on_exit
from runtime_di.providers.distributed.errors import connection_errors, format_ranks, missing_ranks_error
from runtime_di.providers.distributed.rendezvous.keys import RendezvousKeys
from runtime_di.providers.distributed.rendezvous.polling import poll
from runtime_di.providers.distributed.rendezvous.store import ignoring_lost_store_host
from runtime_di.settings.launch import LaunchSettings

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


@contextmanager
def announce_failure(store: Store | None, rank: int) -> Iterator[None]:
    """Write a failure of the body to the store, so that no other rank waits for this one; the first failure stays."""

    def announce(failure: BaseException | None) -> None:
        if failure is not None and store is not None:
            with ignoring_lost_store_host():
                store.compare_set("failed", "", f"rank {rank} failed: {_summary(original_failure(failure))}")

    with run_on_exit(announce):
        yield


@contextmanager
def barriers(
    store: Store | None,
    launch: LaunchSettings,
    startup_timeout_s: float,
    timeout_s: float,
    *,
    parent: Store | None = None,
) -> Iterator[None]:
    """Enter the body once all ranks are ready, and leave it once all ranks are done.

    No rank waits for one that fails, see `announce_failure`. After a failure in the body this rank does not wait.

    Args:
        store: of this generation; ``None`` where there are no other ranks.
        launch: rank and world size of this process.
        startup_timeout_s: of each step that other ranks take before they enter.
        timeout_s: for the others to leave.
        parent: store of the opening that contains this one; a failure that is announced there ends a wait here too.

    Raises:
        ServiceError: some ranks did not arrive in time, or one failed before it entered.
    """
    if store is None:
        yield
        return
    stores = [store] if parent is None else [store, parent]

    def leave(failure: BaseException | None) -> None:
        if failure is None:
            with ignoring_lost_store_host():
                _wait_until_all_are("done", stores, launch, timeout_s, "timeout_s")

    with connection_errors("the startup barrier failed"):
        # Twice the timeout: another rank may be in a step that times out first, and then announces its failure.
        started = _wait_until_all_are("ready", stores, launch, 2 * startup_timeout_s, "startup_timeout_s")
        if not started:
            problem = Problem("process_groups", _first_failure(stores) or "", fix="see the log of that rank")
            raise ServiceError("Another rank did not start:", [problem])
    with run_on_exit(leave):
        yield


def _wait_until_all_are(
    state: str, stores: Sequence[Store], launch: LaunchSettings, timeout_s: float, setting: str
) -> bool:
    """Report this rank's state on the first store and wait for the others; return ``False`` if a rank failed instead.

    Raises:
        ServiceError: ranks are missing after ``timeout_s``, which ``setting`` can raise.
    """
    keys, size = RendezvousKeys(stores[0], state), launch.world_size
    keys.set(f"arrived/{launch.rank}", "")
    keys.count("arrivals", 1)
    if not poll(lambda: keys.count("arrivals") >= size or _first_failure(stores) is not None, timeout_s, size):
        what = f"{format_ranks([*keys.missing(size)])} of {size} were not {state}"
        raise missing_ranks_error(what, timeout_s, setting)
    return keys.count("arrivals") >= size


def _first_failure(stores: Sequence[Store]) -> str | None:
    """Read the failure that was announced first, if any was."""
    return next((store.get("failed").decode() for store in stores if store.check(["failed"])), None)


def _summary(failure: BaseException) -> str:
    """Format a failure on one line."""
    what = failure.problems[0].what if isinstance(failure, ProblemsError) and failure.problems else str(failure)
    return f"{type(failure).__name__}: {what.partition(chr(10))[0]}"
