"""How ranks meet: on which store, and apart from every other opening on it."""

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

from open_groups import opened
from runtime_di.errors import ServiceError
from runtime_di.launch import LaunchSettings
from runtime_di.providers.agreement import Agreement
from runtime_di.providers.barriers import barriers, telling
from runtime_di.providers.meeting import Meeting
from runtime_di.providers.parallel import ParallelSettings
from runtime_di.providers.rendezvous import rendezvous
from runtime_di.settings import RuntimeSettings
from runtime_di.testing.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pytest_mock import MockerFixture


def launch(rank: int, world_size: int) -> LaunchSettings:
    return LaunchSettings(rank=rank, world_size=world_size)


def meet(store: Store, ranks: range, timeout_s: float = 10) -> list[int]:
    """Have ranks, each on its thread, meet on one store."""
    numbers = [0] * len(ranks)

    def hold(rank: int) -> None:
        numbers[rank - ranks.start] = Meeting(store=store, launch=launch(rank, ranks.stop), timeout_s=timeout_s).hold()

    threads = [threading.Thread(target=hold, args=[rank]) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return numbers


@pytest.fixture(params=["memory", "file", "tcp"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Each kind of store that torch has."""
    kinds: dict[str, Callable[[], Store]] = {
        "memory": HashStore,
        "file": lambda: FileStore(str(tmp_path / "store"), -1),
        "tcp": lambda: TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    }
    return kinds[request.param]()


def test_every_opening_has_its_number(store: Store) -> None:
    """B46, B53: all ranks of an opening have one number, and the next opening has another."""
    numbers = [meet(store, range(3)) for _ in range(3)]

    assert numbers == [[1] * 3, [2] * 3, [3] * 3]


def test_an_attempt_that_failed_is_not_joined(store: Store) -> None:
    """B22, B56: ranks of an attempt that never was complete do not count in the next one on the same store."""
    with pytest.raises(ServiceError, match=r"ranks 1-2 of 3 did not arrive within 0.05 s"):
        Meeting(store=store, launch=launch(0, 3), timeout_s=0.05).hold()
    with pytest.raises(ServiceError, match="rank 0 did not arrive"):
        Meeting(store=store, launch=launch(1, 3), timeout_s=0.05).hold()

    assert meet(store, range(3)) == [2, 2, 2]


def test_a_process_that_comes_too_late_is_told_why(mocker: MockerFixture) -> None:
    """B46: a process that the others have met without tells who was its rank then, and how many ranks there were."""
    store = HashStore()
    meet(store, range(2))
    mocker.patch("runtime_di.providers.meeting.process", return_value="elsewhere process 7")

    with pytest.raises(ServiceError) as refused:
        Meeting(store=store, launch=launch(1, 3), timeout_s=0.05).hold()

    assert re.sub(r"with \S+ process \d+ as", "with P as", str(refused.value)) == (
        "Ranks did not meet:\n"
        "  process_groups: rank 0 did not arrive (its last meeting, with P as rank 1, of 2 ranks instead of 3 was over "
        "before this process came) within 0.05 s\n"
        "    fix: see why those ranks are late or gone, or raise distributed.startup_timeout_s"
    )


def test_a_rank_that_tries_again_counts_once() -> None:
    """A rank that gave up and came again does not stand for another that has not come."""
    store = HashStore()
    store.set("opening", "1")
    store.set("1/digest", Agreement({"launch.world_size": 3}).digest)
    for _ in range(2):
        with pytest.raises(ServiceError):
            Meeting(store=store, launch=launch(1, 3), timeout_s=0.01).hold()

    assert store.add("1/arrivals", 0) == 1


def open_on(path: str, world_size: int) -> list[int]:
    """Open twice on a file that others have used, as the first ranks of a world of ``world_size``."""
    totals = []
    own = RuntimeSettings().launch
    for _ in range(2):
        with opened(ParallelSettings(tensor=2), launch=own, store=FileStore(path, -1)) as groups:
            total = torch.tensor([groups.rank])
            dist.all_reduce(total, group=groups.group("tp"))
            totals.append(int(total))
    assert own.world_size == world_size
    return totals


def test_a_store_serves_one_job_after_another(tmp_path: Path) -> None:
    """B53: new processes, of a world as large or of another size, open on a store that earlier ones have used."""
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


def test_the_launchers_store_is_used_and_not_hosted() -> None:
    """B56, B57: where the launcher hosts the store no rank does, and worlds of different sizes use it in turn."""
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    assert [run_ranks(open_with_agent, size, agent.port)[0] for size in (2, 4, 2)] == [2, 4, 2]


def stay_until_all_have_left() -> float:
    start = time.monotonic()
    with rendezvous(RuntimeSettings().launch, 20) as store:
        if os.environ["RANK"] == "1":
            store.wait(["first"], timedelta(seconds=10))
            threading.Event().wait(0.3)
            assert store.get("first") == b"1"
        else:
            store.set("first", "1")
    return time.monotonic() - start


def test_a_world_of_one_meets_on_the_launchers_store() -> None:
    """A rank 0 that takes itself for the only one is seen there by others, who know better."""
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    with rendezvous(LaunchSettings(agent_store=True, master_port=agent.port), 5):
        assert agent.check(["runtime_di/opening"])


def test_the_host_of_the_store_leaves_last() -> None:
    """After a success rank 0 keeps the store until the others need it no more."""
    assert run_ranks(stay_until_all_have_left, 2)[0] > 0.2


def part_late_or_fail(failing: bool) -> tuple[float, list[str]]:
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=os.environ["RANK"] == "0",
        wait_for_workers=False,
    )
    own, start, raised = RuntimeSettings().launch, time.monotonic(), []
    try:
        with telling(store, own.rank), barriers(store, own, 20, 20):
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


@pytest.mark.parametrize("failing", [False, True])
def test_ranks_part_together_unless_one_fails(failing: bool) -> None:
    """B53: no rank ends its groups while another still uses them; one that fails is not waited for."""
    (waited_s, _), (_, raised) = run_ranks(part_late_or_fail, 2, failing)

    assert waited_s > 0.2
    assert raised == ["loss"] * failing


def enter_together(failing: Sequence[Callable[[], object]]) -> list[str]:
    """Have ranks enter, each on its thread, once each has done what may fail; tell how each ended."""
    store, ended = HashStore(), [""] * len(failing)

    def enter(rank: int) -> None:
        own = launch(rank, len(failing))
        try:
            with telling(store, rank):
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


def test_the_first_failure_is_what_all_are_told() -> None:
    """A rank that fails before it enters is named to each of the others, with its error; those add nothing to it."""
    heard = "Another rank did not start:\n  process_groups: rank 2 failed: KeyError: 'boom'"

    assert enter_together([int, int, boom, int]) == [heard, heard, "'boom'", heard]
    assert enter_together([int] * 3) == ["entered"] * 3


def test_a_failure_in_the_whole_is_one_in_its_part() -> None:
    """Ranks that wait for each other in a part of an opening hear of a rank that failed in the opening."""
    whole = HashStore()
    with pytest.raises(KeyError), telling(whole, 1):
        boom()

    part = barriers(HashStore(), launch(0, 2), 9, 9, within=whole)
    with pytest.raises(ServiceError, match="rank 1 failed: KeyError: 'boom'"), part:
        pass


def test_ranks_that_do_not_enter_are_named() -> None:
    """Those that waited say which ranks were not ready."""
    part = barriers(HashStore(), launch(0, 3), 0.025, 1)

    with pytest.raises(ServiceError, match=r"ranks 1-2 of 3 were not ready within 0.05 s"), part:
        pass


def fail_on_rank_0() -> str:
    try:
        with rendezvous(RuntimeSettings().launch, 20) as store:
            store.add("there", 1)
            if os.environ["RANK"] == "0":
                while store.add("there", 0) < 2:
                    pass
                raise KeyError("loss")
            threading.Event().wait(0.5)
    except (KeyError, dist.DistNetworkError) as error:
        return type(error).__name__
    return "left"


def test_a_failed_rank_waits_for_nobody() -> None:
    """B22: a rank 0 that failed leaves at once, though it hosts the store."""
    assert run_ranks(fail_on_rank_0, 2)[0] == "KeyError"


def test_a_port_that_is_taken_is_told() -> None:
    """B57: a store that cannot be hosted is told with its address and who hosts it."""
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        own = LaunchSettings(world_size=2, master_port=port)

        with pytest.raises(ServiceError) as refused, rendezvous(own, 1):
            pass

    assert str(refused.value) == (
        "Ranks did not meet:\n"
        f"  process_groups: no store at 127.0.0.1:{port}, which rank 0 is to host\n"
        "    fix: see that its host is up, that MASTER_ADDR, MASTER_PORT and WORLD_SIZE are alike on all ranks, "
        "and that no other process, such as a second rank 0, has the port"
    )
