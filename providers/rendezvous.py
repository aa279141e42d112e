"""The store on which the ranks of a job meet and part."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from runtime_di.errors import Problem, ServiceError
from runtime_di.launch import LaunchSettings
from runtime_di.providers.agreement import Agreement
from runtime_di.providers.barriers import unless_the_host_is_gone
from runtime_di.providers.meeting import Meeting
from runtime_di.providers.teardown import teardown
from runtime_di.providers.waiting import absent, poll

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


_ANSWER_S = 1.0
"""For a host to answer, before it is asked again."""


@contextmanager
def rendezvous(
    launch: LaunchSettings,
    timeout_s: float,
    store: Store | None = None,
    agreement: Agreement = Agreement(),  # noqa: B008 - frozen
) -> Iterator[Store]:
    """Meet the other ranks, who must have alike what is in ``agreement``; yield a store with this opening's own keys.

    Ranks meet on ``store`` if one is given. Else a world of one has a store in memory, and a larger one has the store
    at the launcher's address, hosted by the launcher's agent or by rank 0. A rank 0 that hosts it stays, after a
    success, until every rank has left.

    Raises:
        AgreementError: ranks have something different.
        ServiceError: the store cannot be reached, or ranks did not come in time.
    """
    from torch.distributed import HashStore  # type: ignore[attr-defined]
    from torch.distributed.distributed_c10d import PrefixStore

    if store is None and launch.world_size == 1 and not launch.agent_store:
        yield HashStore()
        return
    root, number = _meet(launch, timeout_s, store, agreement)
    own = PrefixStore(str(number), root)
    hosted = store is None and not launch.agent_store
    with teardown(lambda failure: _leave(own, launch, timeout_s, failure) if hosted else None):
        yield own


def _meet(launch: LaunchSettings, timeout_s: float, store: Store | None, agreement: Agreement) -> tuple[Store, int]:
    """Meet, again if the store goes away meanwhile: it may be that of an earlier opening, which rank 0 is closing."""
    from torch.distributed import DistNetworkError
    from torch.distributed.distributed_c10d import PrefixStore

    deadline, left_s = time.monotonic() + timeout_s, timeout_s
    while True:
        root = PrefixStore("runtime_di", store or _connect(launch, left_s))
        try:
            return root, Meeting(store=root, launch=launch, timeout_s=left_s, agreement=agreement).hold()
        except DistNetworkError as error:
            if store is not None:
                raise
            left_s = deadline - time.monotonic()
            if launch.rank == 0 or left_s <= 0:
                raise _unreachable(launch) from error


def _connect(launch: LaunchSettings, timeout_s: float) -> Store:
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

    deadline, hosts = time.monotonic() + timeout_s, launch.rank == 0 and not launch.agent_store
    if not hosts and not poll(lambda: _answers(launch), timeout_s, launch.world_size):
        raise _unreachable(launch)
    try:
        return TCPStore(
            launch.master_addr,
            launch.master_port,
            is_master=hosts,
            timeout=timedelta(seconds=max(deadline - time.monotonic(), 0.001)),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (DistError, ValueError) as error:
        raise _unreachable(launch) from error


def _leave(store: Store, launch: LaunchSettings, timeout_s: float, failure: BaseException | None) -> None:
    """Tell rank 0, the host of the store, that this rank needs it no more; rank 0 waits for the others to tell.

    After a failure nobody waits.
    """
    if launch.rank > 0:
        with unless_the_host_is_gone():
            store.add("left", 1)
        return
    others = launch.world_size - 1
    if failure is None and not poll(lambda: store.add("left", 0) >= others, timeout_s, launch.world_size):
        raise absent(f"{others - store.add('left', 0)} of {others} other ranks did not close", timeout_s)


def _answers(launch: LaunchSettings) -> bool:
    """Whether something listens at the launcher's address; asked first, since torch's waiting holds back signals."""
    try:
        socket.create_connection((launch.master_addr, launch.master_port), _ANSWER_S).close()
    except OSError:
        return False
    return True


def _unreachable(launch: LaunchSettings) -> ServiceError:
    owner = "the launcher's agent" if launch.agent_store else "rank 0"
    what = f"no store at {launch.master_addr}:{launch.master_port}, which {owner} is to host"
    fix = (
        "see that its host is up, that MASTER_ADDR, MASTER_PORT and WORLD_SIZE are alike on all ranks,"
        " and that no other process, such as a second rank 0, has the port"
    )
    return ServiceError("Ranks did not meet:", [Problem("process_groups", what, fix=fix)])
