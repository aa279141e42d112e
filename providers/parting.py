"""Ranks go into what they share together, and out of it together."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from runtime_di.errors import Problem, ServiceError
from runtime_di.providers.teardown import teardown
from runtime_di.providers.waiting import absent, connecting, poll

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_log = logging.getLogger("runtime_di")


@contextmanager
def telling(store: Store | None, rank: int) -> Iterator[None]:
    """Tell the other ranks when this one fails within the body, so that none waits for it."""

    def tell(failure: BaseException | None) -> None:
        if failure is not None and store is not None:
            with unless_the_host_is_gone():
                store.set("failed", f"rank {rank} failed: {type(failure).__name__}: {failure}")

    with teardown(tell):
        yield


@contextmanager
def parting(store: Store | None, num_ranks: int, startup_timeout_s: float, timeout_s: float) -> Iterator[None]:
    """Let ranks into the body together, once each has made what it needs, and out of it once each is done with that.

    A rank that fails is not waited for, see `telling`; after a failure in the body, nobody waits.

    Args:
        store: of this opening; ``None`` where there are no other ranks.
        num_ranks: of the world.
        startup_timeout_s: of the steps that the others take before they enter.
        timeout_s: for the others to leave.

    Raises:
        ServiceError: some ranks did not come in time, or one failed before it entered.
    """

    def part(failure: BaseException | None) -> None:
        if failure is None and store is not None:
            with unless_the_host_is_gone():
                _all_are("done", store, num_ranks, timeout_s, "timeout_s")

    if store is not None:
        with connecting("the host of the store on which ranks meet has ended"):
            # twice, for another rank to give up a step that it has begun meanwhile, and to tell why
            started = _all_are("ready", store, num_ranks, 2 * startup_timeout_s, "startup_timeout_s")
        if not started:
            problem = Problem("process_groups", store.get("failed").decode(), fix="see the log of that rank")
            raise ServiceError("Another rank did not start:", [problem])
    with teardown(part):
        yield


def _all_are(what: str, store: Store, num_ranks: int, timeout_s: float, setting: str) -> bool:
    """Say that this rank is, and wait until every rank is or one has failed; tell whether every one is."""
    store.add(what, 1)
    if not poll(lambda: store.add(what, 0) >= num_ranks or store.check(["failed"]), timeout_s, num_ranks):
        raise absent(f"{num_ranks - store.add(what, 0)} of {num_ranks} ranks were not {what}", timeout_s, setting)
    return bool(store.add(what, 0) >= num_ranks)


@contextmanager
def unless_the_host_is_gone() -> Iterator[None]:
    """Do without a store whose host has ended: what it was to hear, nobody is there to know."""
    from torch.distributed import DistNetworkError

    try:
        yield
    except DistNetworkError:
        _log.warning("The host of the store on which ranks meet ended before this rank, which waits for nobody now")
