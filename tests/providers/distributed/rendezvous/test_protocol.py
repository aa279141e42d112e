"""How ranks join a generation: on which store, and apart from every other generation on it."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from contextlib import closing
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, Store, TCPStore

from runtime_di.errors import ServiceError
from runtime_di.providers.distributed.agreement import Agreement
from runtime_di.providers.distributed.barriers import announce_failure, barriers
from runtime_di.providers.distributed.rendezvous.protocol import Rendezvous
from runtime_di.providers.distributed.rendezvous.store import join_rendezvous
from runtime_di.providers.process_groups.parallel import ParallelSettings
from runtime_di.settings.launch import LaunchSettings
from runtime_di.settings.model import RuntimeSettings
from runtime_di.testing.ranks import run_ranks
from tests.support.open_process_groups import opened

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pytest_mock import MockerFixture


def launch(rank: int, world_size: int) -> LaunchSettings:
    return LaunchSettings(rank=rank, world_size=world_size)


def join(store: Store, ranks: range, timeout_s: float = 10) -> list[int]:
    """Have ranks, each on its own thread, join on one store; return the generation of each."""
    generations = [0] * len(ranks)

    def join_as(rank: int) -> None:
        own = Rendezvous(store=store, launch=launch(rank, ranks.stop), timeout_s=timeout_s)
        generations[rank - ranks.start] = own.join()

    threads = [threading.Thread(target=join_as, args=[rank]) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return generations


@pytest.fixture(params=["memory", "file", "tcp"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Each kind of store in torch."""
    kinds: dict[str, Callable[[], Store]] = {
        "memory": HashStore,
        "file": lambda: FileStore(str(tmp_path / "store"), -1),
        "tcp": lambda: TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    }
    return kinds[request.param]()


def test_every_opening_has_its_own_generation(store: Store) -> None:
    """B46, B53: all ranks of an opening have the same generation, and the next opening has another."""
    generations = [join(store, range(3)) for _ in range(3)]

    assert generations == [[1] * 3, [2] * 3, [3] * 3]


def test_an_attempt_that_failed_is_not_joined(store: Store) -> None:
    """B22, B56: ranks of an incomplete attempt do not count in the next one on the same store."""
    with pytest.raises(ServiceError, match=r"ranks 1-2 of 3 did not arrive within 0.05 s"):
        Rendezvous(store=store, launch=launch(0, 3), timeout_s=0.05).join()
    with pytest.raises(ServiceError, match="rank 0 did not arrive"):
        Rendezvous(store=store, launch=launch(1, 3), timeout_s=0.05).join()

    assert join(store, range(3)) == [2, 2, 2]


def test_a_late_process_names_the_last_generation(mocker: MockerFixture) -> None:
    """B46: a process that arrives after a decision names the process that had its rank, and the world size then."""
    store = HashStore()
    join(store, range(2))
    mocker.patch(
        "runtime_di.providers.distributed.rendezvous.protocol.process_name", return_value="elsewhere process 7"
    )

    with pytest.raises(ServiceError) as refused:
        Rendezvous(store=store, launch=launch(1, 3), timeout_s=0.05).join()

    assert re.sub(r"with \S+ process \d+ as", "with P as", str(refused.value)) == (
        "Ranks are missing:\n"
        "  process_groups: rank 0 did not arrive (its last generation, with P as rank 1 and 2 ranks instead of 3, was "
        "decided before this process arrived) within 0.05 s\n"
        "    fix: check why these ranks are late or gone, or raise distributed.startup_timeout_s"
    )


def test_a_rank_that_retries_counts_once() -> None:
    """A rank that timed out and arrives again is not counted in place of a missing rank."""
    store = HashStore()
    store.set("newest_generation", "1")
    store.set("1/digest", Agreement({"launch.world_size": 3}).digest)
    for _ in range(2):
        with pytest.raises(ServiceError):
            Rendezvous(store=store, launch=launch(1, 3), timeout_s=0.01).join()

    assert store.add("1/arrivals", 0) == 1


def open_on(path: str, world_size: int) -> list[int]:
    """Open twice on a file that other jobs have used, in a world of ``world_size``."""
    totals = []
    own = RuntimeSettings().launch
    for _ in range(2):
        with opened(ParallelSettings(tensor=2), launch=own, store=FileStore(path, -1)) as groups:
            total = torch.tensor([groups.rank])
            dist.all_reduce(total, group=groups.group("tp"))
            totals.append(int(total))
    assert own.world_size == world_size
    return totals


@pytest.mark.processes
def test_a_store_serves_one_job_after_another(tmp_path: Path) -> None:
    """B53: new processes, in a world of equal or other size, open on a store that an earlier job has used."""
    path = str(tmp_path / "store")

    assert run_ranks(open_on, 2, path, 2) == [[1, 1]] * 2
    assert run_ranks(open_on, 4, path, 4) == [[1, 1], [1, 1], [5, 5], [5, 5]]
    assert run_ranks(open_on, 2, path, 2) == [[1, 1]] * 2


def open_with_agent(port: int) -> int:
    own = RuntimeSettings().launch.model_copy(update={"agent_store": True, "master_port": port})
    with opened(launch=own):
        total = torch.ones(1)
        dist.all_reduce(total)
    return int(total)


@pytest.mark.processes
def test_the_launchers_store_is_used_and_not_hosted() -> None:
    """B56, B57: if the launcher hosts the store, no rank does, and worlds of different sizes use it in turn."""
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    assert [run_ranks(open_with_agent, size, agent.port)[0] for size in (2, 4, 2)] == [2, 4, 2]


def stay_until_all_have_left() -> float:
    start = time.monotonic()
    with join_rendezvous(RuntimeSettings().launch, 20) as store:
        if os.environ["RANK"] == "1":
            store.wait(["first"], timedelta(seconds=10))
            threading.Event().wait(0.3)
            assert store.get("first") == b"1"
        else:
            store.set("first", "1")
    return time.monotonic() - start


def test_a_world_of_one_joins_on_the_launchers_store() -> None:
    """A rank 0 with a world size of one writes its generation there, where ranks of a larger world size find it."""
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    with join_rendezvous(LaunchSettings(agent_store=True, master_port=agent.port), 5):
        assert agent.check(["runtime_di/newest_generation"])


@pytest.mark.processes
def test_the_host_of_the_store_leaves_last() -> None:
    """After a success rank 0 keeps the store until the others have left."""
    assert run_ranks(stay_until_all_have_left, 2)[0] > 0.2


def leave_late_or_fail(failing: bool) -> tuple[float, list[str]]:
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=os.environ["RANK"] == "0",
        wait_for_workers=False,
    )
    own, start, raised = RuntimeSettings().launch, time.monotonic(), []
    try:
        with announce_failure(store, own.rank), barriers(store, own, 20, 20):
            if own.rank == 1:
                threading.Event().wait(0.3)
                if failing:
                    raise KeyError("loss")
    except KeyError:
        raised.append("loss")
    waited_s = time.monotonic() - start
    store.add("end", 1)
    while own.rank == 0 and store.add("end", 0) < 2:
        pass
    return waited_s, raised


@pytest.mark.processes
@pytest.mark.parametrize("failing", [False, True])
def test_ranks_leave_together_unless_one_fails(failing: bool) -> None:
    """B53: no rank destroys its groups while another still uses them; none waits for a rank that fails."""
    (waited_s, _), (_, raised) = run_ranks(leave_late_or_fail, 2, failing)

    assert waited_s > 0.2
    assert raised == ["loss"] * failing


def enter_together(failing: Sequence[Callable[[], object]]) -> list[str]:
    """Have each rank, on its own thread, call its function and enter; return how each ended."""
    store, ended = HashStore(), [""] * len(failing)

    def enter(rank: int) -> None:
        own = launch(rank, len(failing))
        try:
            with announce_failure(store, rank):
                failing[rank]()
                with barriers(store, own, 10, 10):
                    ended[rank] = "entered"
        except (KeyError, ServiceError) as error:
            ended[rank] = str(error).partition("\n    fix")[0]

    threads = [threading.Thread(target=enter, args=[rank]) for rank in range(len(failing))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended


def boom() -> None:
    raise KeyError("boom")


def test_the_first_failure_is_reported_on_all_ranks() -> None:
    """Every other rank names the rank that failed before it entered, and its error, and announces no failure itself."""
    reported = "Another rank did not start:\n  process_groups: rank 2 failed: KeyError: 'boom'"

    assert enter_together([int, int, boom, int]) == [reported, reported, "'boom'", reported]
    assert enter_together([int] * 3) == ["entered"] * 3


def test_a_failure_in_the_parent_ends_a_nested_wait() -> None:
    """Ranks at a nested barrier do not wait for a rank that fails in the opening that contains it."""
    parent = HashStore()
    with pytest.raises(KeyError), announce_failure(parent, 1):
        boom()

    nested = barriers(HashStore(), launch(0, 2), 9, 9, parent=parent)
    with pytest.raises(ServiceError, match="rank 1 failed: KeyError: 'boom'"), nested:
        pass


def test_ranks_that_do_not_enter_are_named() -> None:
    """A rank whose wait times out names the ranks that were not ready."""
    barrier = barriers(HashStore(), launch(0, 3), 0.025, 1)

    with pytest.raises(ServiceError, match=r"ranks 1-2 of 3 were not ready within 0.05 s"), barrier:
        pass


def fail_on_rank_0() -> str:
    try:
        with join_rendezvous(RuntimeSettings().launch, 20) as store:
            store.add("there", 1)
            if os.environ["RANK"] == "0":
                while store.add("there", 0) < 2:
                    pass
                raise KeyError("loss")
            threading.Event().wait(0.5)
    except (KeyError, dist.DistNetworkError) as error:
        return type(error).__name__
    return "left"


@pytest.mark.processes
def test_a_failed_rank_waits_for_nobody() -> None:
    """B22: a rank 0 that failed leaves at once, though it hosts the store."""
    assert run_ranks(fail_on_rank_0, 2)[0] == "KeyError"


def test_a_port_in_use_is_reported() -> None:
    """B57: the error of a store that cannot be hosted has its address, and the process that must host it."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        own = LaunchSettings(world_size=2, master_port=port)

        with pytest.raises(ServiceError) as refused, join_rendezvous(own, 1):
            pass

    assert str(refused.value) == (
        "The rendezvous store cannot be reached:\n"
        f"  process_groups: no store at 127.0.0.1:{port}, which rank 0 must host\n"
        "    fix: check that its host is up, that MASTER_ADDR, MASTER_PORT and WORLD_SIZE are equal on all ranks, "
        "and that no other process, such as a second rank 0, uses the port"
    )
