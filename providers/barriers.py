"""Barriers on a store: ranks enter what they share together, and leave it together."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from runtime_di.errors import Problem, ProblemsError, ServiceError
from runtime_di.launch import LaunchSettings
from runtime_di.providers.agreement import told
from runtime_di.providers.minutes import Minutes
from runtime_di.providers.teardown import root, teardown
from runtime_di.providers.waiting import absent, connecting, poll

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_log = logging.getLogger("runtime_di")


@contextmanager
def telling(store: Store | None, rank: int) -> Iterator[None]:
    """Tell the other ranks when this one fails within the body, so that none waits for it; the first is told."""

    def tell(failure: BaseException | None) -> None:
        if failure is not None and store is not None:
            with unless_the_host_is_gone():
                store.compare_set("failed", "", f"rank {rank} failed: {_summary(root(failure))}")

    with teardown(tell):
        yield


@contextmanager
def barriers(
    store: Store | None,
    launch: LaunchSettings,
    startup_timeout_s: float,
    timeout_s: float,
    *,
    within: Store | None = None,
) -> Iterator[None]:
    """Let ranks into the body together, once each has made what it needs, and out of it once each is done with that.

    A rank that fails is not waited for, see `telling`; after a failure in the body, nobody waits.

    Args:
        store: of this opening; ``None`` where there are no other ranks.
        launch: which rank of how many this is.
        startup_timeout_s: of the steps that the others take before they enter.
        timeout_s: for the others to leave.
        within: store of an opening that this one is part of: who fails there is not waited for here either.

    Raises:
        ServiceError: some ranks did not come in time, or one failed before it entered.
    """
    if store is None:
        yield
        return
    stores, size = [store] if within is None else [store, within], launch.world_size

    def all_are(what: str, patience_s: float, setting: str) -> bool:
        minutes = Minutes(store, what)
        minutes.set(f"arrived/{launch.rank}", "")
        minutes.count("arrivals", 1)
        if not poll(lambda: minutes.count("arrivals") >= size or _failed(stores) is not None, patience_s, size):
            raise absent(f"{told([*minutes.absent(size)])} of {size} were not {what}", patience_s, setting)
        return minutes.count("arrivals") >= size

    def part(failure: BaseException | None) -> None:
        if failure is None:
            with unless_the_host_is_gone():
                all_are("done", timeout_s, "timeout_s")

    with connecting("the other ranks could not be waited for"):
        # twice, for another rank to give up a step that it has begun meanwhile, and to tell why
        started = all_are("ready", 2 * startup_timeout_s, "startup_timeout_s")
        if not started:
            problem = Problem("process_groups", _failed(stores) or "", fix="see the log of that rank")
            raise ServiceError("Another rank did not start:", [problem])
    with teardown(part):
        yield


def _failed(stores: Sequence[Store]) -> str | None:
    """What the first rank that failed has told."""
    return next((store.get("failed").decode() for store in stores if store.check(["failed"])), None)


def _summary(failure: BaseException) -> str:
    """What failed, in a line."""
    what = failure.problems[0].what if isinstance(failure, ProblemsError) and failure.problems else str(failure)
    return f"{type(failure).__name__}: {what.partition(chr(10))[0]}"


@contextmanager
def unless_the_host_is_gone() -> Iterator[None]:
    """Do without a store whose host has ended: what it was to hear, nobody is there to know."""
    from torch.distributed import DistNetworkError

    try:
        yield
    except DistNetworkError:
        _log.warning("The host of the store on which ranks meet ended before this rank, which waits for nobody now")
