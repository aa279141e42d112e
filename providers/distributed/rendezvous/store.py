"""The rendezvous store: how a rank reaches it, hosts it and leaves it."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from runtime_di.errors import Problem, ServiceDisabledError, ServiceError
from runtime_di.lifecycle.teardown import run_on_exit
from runtime_di.providers.distributed.agreement import Agreement
from runtime_di.providers.distributed.errors import missing_ranks_error
from runtime_di.providers.distributed.rendezvous.polling import poll
from runtime_di.providers.distributed.rendezvous.protocol import Rendezvous
from runtime_di.settings.launch import LaunchSettings

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_log = logging.getLogger("runtime_di")
_CONNECT_S = 1.0
"""Timeout of one attempt to connect to the host of the store."""


@contextmanager
def join_rendezvous(
    launch: LaunchSettings,
    timeout_s: float,
    store: Store | None = None,
    agreement: Agreement = Agreement(),  # noqa: B008 - frozen
) -> Iterator[Store]:
    """Join one generation with all other ranks; yield a store whose keys belong to this generation alone.

    Ranks use ``store`` if the caller provides one. Otherwise a world of one has a store in memory, and a larger one has
    the store at the launch address, hosted by the launcher's agent or by rank 0. After a success, a rank 0 that hosts
    the store keeps it until every rank has left.

    Args:
        launch: rank, world size and launch address of this process.
        timeout_s: for the store to answer and all ranks to arrive; then for all ranks to leave.
        store: shared by all ranks, instead of the store at the launch address.
        agreement: values that must be equal on all ranks.

    Raises:
        AgreementError: ranks differ.
        ServiceError: the store cannot be reached, or ranks did not arrive in time.
    """
    from torch.distributed import HashStore  # type: ignore[attr-defined]
    from torch.distributed.distributed_c10d import PrefixStore

    if store is None and launch.world_size == 1 and not launch.agent_store:
        yield HashStore()
        return
    root, generation = _join(launch, timeout_s, store, agreement)
    own = PrefixStore(str(generation), root)
    at_launch_address = store is None and not launch.agent_store
    with run_on_exit(lambda failure: _leave(own, launch, timeout_s, failure) if at_launch_address else None):
        yield own


def _join(launch: LaunchSettings, timeout_s: float, store: Store | None, agreement: Agreement) -> tuple[Store, int]:
    """Join, and retry on another rank than 0 if the store is lost: it may be an earlier one that rank 0 is closing."""
    from torch.distributed import DistNetworkError
    from torch.distributed.distributed_c10d import PrefixStore

    deadline, left_s = time.monotonic() + timeout_s, timeout_s
    while True:
        root = PrefixStore("runtime_di", store or _connect(launch, left_s))
        try:
            return root, Rendezvous(store=root, launch=launch, timeout_s=left_s, agreement=agreement).join()
        except DistNetworkError as error:
            if store is not None:
                raise
            left_s = deadline - time.monotonic()
            if launch.rank == 0 or left_s <= 0:
                raise _unreachable_store_error(launch) from error


def _connect(launch: LaunchSettings, timeout_s: float) -> Store:
    """Connect to the store at the launch address, or host it on rank 0 if the launcher's agent does not."""
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

    deadline, hosts = time.monotonic() + timeout_s, launch.rank == 0 and not launch.agent_store
    if not hosts and not poll(lambda: _is_listening(launch), timeout_s, launch.world_size):
        raise _unreachable_store_error(launch)
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
        raise _unreachable_store_error(launch) from error


def _leave(store: Store, launch: LaunchSettings, timeout_s: float, failure: BaseException | None) -> None:
    """Count this rank in the key ``left``; rank 0, which hosts the store, waits until all others are counted.

    After a failure rank 0 does not wait.
    """
    if launch.rank > 0:
        with ignoring_lost_store_host():
            store.add("left", 1)
        return
    others = launch.world_size - 1
    if failure is None and not poll(lambda: store.add("left", 0) >= others, timeout_s, launch.world_size):
        raise missing_ranks_error(f"{others - store.add('left', 0)} of {others} other ranks did not close", timeout_s)


def _is_listening(launch: LaunchSettings) -> bool:
    """Whether a process listens at the launch address; torch's own wait for one would delay signals."""
    try:
        socket.create_connection((launch.master_addr, launch.master_port), _CONNECT_S).close()
    except OSError:
        return False
    return True


def _unreachable_store_error(launch: LaunchSettings) -> ServiceError:
    owner = "the launcher's agent" if launch.agent_store else "rank 0"
    what = f"no store at {launch.master_addr}:{launch.master_port}, which {owner} must host"
    fix = (
        "check that its host is up, that MASTER_ADDR, MASTER_PORT and WORLD_SIZE are equal on all ranks,"
        " and that no other process, such as a second rank 0, uses the port"
    )
    return ServiceError("The rendezvous store cannot be reached:", [Problem("process_groups", what, fix=fix)])


def caller_provided_store() -> Store:
    """Have ranks use the store at the launch address, unless the caller provides one.

    Raises:
        ServiceDisabledError: always; an override provides the store.
    """
    raise ServiceDisabledError.until_overridden("store", "ranks use the store at launch.master_addr")


@contextmanager
def ignoring_lost_store_host() -> Iterator[None]:
    """Ignore that the host of the store has ended: no rank can read what the body would write."""
    from torch.distributed import DistNetworkError

    try:
        yield
    except DistNetworkError:
        _log.warning("The host of the rendezvous store ended before this rank, which no longer waits for other ranks")
