"""Groups that each rank creates, in real Gloo worlds and in a fake one."""

from __future__ import annotations

import gc
import os
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from runtime_di.errors import ServiceError
from runtime_di.providers.distributed.barriers import barriers
from runtime_di.providers.distributed.world import join_world
from runtime_di.providers.process_groups.creation import create_groups
from runtime_di.providers.process_groups.parallel import ParallelSettings
from runtime_di.providers.process_groups.service import KINDS, Kind, ProcessGroups, RankGrid
from runtime_di.providers.process_groups.settings import DistributedSettings
from runtime_di.settings.launch import LaunchSettings
from runtime_di.settings.model import RuntimeSettings
from runtime_di.testing.ranks import run_ranks
from tests.support.open_process_groups import opened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sized

    from pytest_mock import MockerFixture

MOST_CALLS = 23
DESTROY = c10d.destroy_process_group


def gathered_members(groups: ProcessGroups) -> dict[str, list[int]]:
    """Gather the ranks of each group of this rank."""
    gathered: dict[str, list[int]] = {}
    for kind in filter(groups.is_member, KINDS):
        there = [torch.zeros(1, dtype=torch.int64) for _ in groups.ranks(kind)]
        dist.all_gather(there, torch.tensor([groups.rank]), group=groups.group(kind))
        gathered[kind] = [int(rank) for rank in there]
    return gathered


def registered() -> tuple[int, ...]:
    """Count the groups in the registries of torch."""
    world = c10d._world
    registries: tuple[Sized, ...] = (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.tags_to_pg,
    )
    return (*map(len, registries), world.group_count)


@contextmanager
def one_rank_of(world_size: int, rank: int, **sizes: Any) -> Iterator[ProcessGroups]:
    """Be one rank of a world whose other ranks do not exist."""
    launch = LaunchSettings(rank=rank, world_size=world_size)
    with opened(ParallelSettings(**sizes), DistributedSettings(backend="fake"), launch) as groups:
        yield groups


def gather_in_every_group(parallel: ParallelSettings) -> dict[str, list[int]]:
    with opened(parallel) as groups:
        return gathered_members(groups)


@pytest.mark.processes
@pytest.mark.parametrize(
    "parallel",
    [
        ParallelSettings(pipeline=4),
        ParallelSettings(tensor=2, pipeline=2, order="tp-cp-ep-pp-dp"),
        ParallelSettings(context=2, expert=4, tensor=2, expert_tensor=1),
    ],
    ids=["pipeline", "other order", "experts"],
)
def test_every_group_reaches_its_members(parallel: ParallelSettings) -> None:
    """B54, B55: collectives of each kind reach the ranks of the grid, in ascending order, also where a middle stage
    is in no embedding group.
    """
    gathered = run_ranks(gather_in_every_group, 8, parallel)

    grid = parallel.grid(8)
    expected = [{kind: list(ranks) for kind in KINDS if (ranks := grid.group_of(rank, kind))} for rank in range(8)]
    assert gathered == expected


def open_again(times: int) -> tuple[int, ...]:
    parallel = ParallelSettings(tensor=2)
    for _ in range(times):
        with opened(parallel) as groups:
            assert gathered_members(groups)["tp"] == list(groups.ranks("tp"))
    return registered()


@pytest.mark.processes
def test_ranks_open_again_and_again() -> None:
    """B53, B59: the same ranks open and close repeatedly without a pause, on one port, and torch keeps nothing."""
    assert run_ranks(open_again, 4, 8) == [(0, 0, 0, 0, 0, 0)] * 4


@pytest.mark.parametrize(
    "opening",
    [lambda: one_rank_of(8, 3, tensor=2, pipeline=2), lambda: opened(ParallelSettings())],
    ids=["one of many", "gloo"],
)
def test_nothing_is_left_after_a_hundred_openings(opening: Callable[[], AbstractContextManager[ProcessGroups]]) -> None:
    """B1, B10: a hundred openings leave torch's registries empty, and no file descriptor or thread behind."""
    process = psutil.Process()
    with opening():
        pass
    before = process.num_fds(), process.num_threads()

    for _ in range(100):
        with opening() as groups:
            assert registered()[0] > 0
        del groups
    gc.collect()

    assert registered() == (0, 0, 0, 0, 0, 0)
    assert (process.num_fds(), process.num_threads()) == before


@pytest.mark.parametrize("world_size", [128, 131072])
def test_calls_do_not_grow_with_the_world(world_size: int, mocker: MockerFixture) -> None:
    """A rank creates at most one group a kind, as many in a world of 131072 as in one of 128."""
    new_group = mocker.spy(dist, "new_group")

    with one_rank_of(world_size, world_size // 2 + 5, tensor=2, pipeline=4, context=2, expert=4, expert_tensor=1):
        calls = new_group.call_args_list

    assert len(calls) == 12 <= MOST_CALLS
    assert all(call.kwargs["use_local_synchronization"] for call in calls)


@pytest.mark.parametrize(
    "sizes",
    [{"pipeline": 4}, {"tensor": 2, "pipeline": 2}, {"tensor": 8}, {"expert": 8}, {"context": 2, "pipeline": 2}],
    ids=str,
)
def test_every_rank_creates_as_many_groups(sizes: dict[str, int], mocker: MockerFixture) -> None:
    """B54: all ranks create groups of the same kinds in one order; a rank that is in none creates one of itself."""
    new_group = mocker.spy(dist, "new_group")

    created = []
    for rank in range(8):
        new_group.reset_mock()
        with one_rank_of(8, rank, **sizes):
            created.append([call.kwargs["group_desc"] for call in new_group.call_args_list])
            assert all(rank in call.args[0] for call in new_group.call_args_list)

    assert created == [created[0]] * 8


def test_kinds_with_the_same_ranks_share_a_group() -> None:
    """Kinds with equal groups on every rank share one, and groups of the whole world are the world's group."""
    with one_rank_of(8, 3, tensor=2) as groups:
        assert groups.group("tp") is groups.group("tp_cp") is groups.group("etp") is not groups.group("dp")
        assert groups.group("dp").group_desc == "dp"
        assert groups.group("tp_dp_cp") is dist.group.WORLD


def timeouts_of_groups() -> tuple[set[float], set[float]]:
    """Return the timeouts of groups after the opening, and after a change."""

    def timeouts() -> set[float]:
        return {
            group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in c10d._world.pg_map
        }

    with opened(ParallelSettings(tensor=2), DistributedSettings(timeout_s=123, startup_timeout_s=30)) as groups:
        first = timeouts()
        groups.set_timeout(7)
        return first, timeouts()


@pytest.mark.processes
def test_one_timeout_reaches_every_group() -> None:
    """B6: the world and each group have the timeout of the settings after creation, and another after a change."""
    assert run_ranks(timeouts_of_groups, 4) == [({123.0}, {7.0})] * 4


def test_groups_are_created_within_the_startup_timeout(mocker: MockerFixture) -> None:
    """During group creation, a rank waits for others no longer than the startup timeout."""
    distributed = DistributedSettings(backend="fake", timeout_s=600, startup_timeout_s=12)
    new_group = mocker.spy(dist, "new_group")
    init = mocker.spy(dist, "init_process_group")

    with opened(ParallelSettings(tensor=2, pipeline=2), distributed, LaunchSettings(world_size=8)):
        timeouts = {call.args[1] for call in new_group.call_args_list} | {init.call_args.kwargs["timeout"]}

    assert timeouts == {timedelta(seconds=12)}


def test_groups_are_destroyed_in_reverse_though_one_fails(mocker: MockerFixture) -> None:
    """B1: each group is destroyed once, the last first; after an error the rest follow, then it is raised."""
    ended = []

    def destroy(group: dist.ProcessGroup | None = None) -> None:
        ended.append("world" if group is None else group.group_desc)
        DESTROY(group)
        if group is not None and group.group_desc in ("dp", "cp"):
            raise RuntimeError(f"{group.group_desc} is stuck")

    mocker.patch.object(c10d, "destroy_process_group", side_effect=destroy)

    with pytest.raises(RuntimeError, match="dp is stuck") as failed, one_rank_of(8, 3, tensor=2):
        pass

    assert ended == ["dp", "cp", "tp", "world"]
    assert failed.value.__notes__ == ["and another group: RuntimeError('cp is stuck')"]
    assert registered() == (0, 0, 0, 0, 0, 0)


def test_an_error_in_the_body_keeps_its_traceback_and_gets_notes(mocker: MockerFixture) -> None:
    """B22: the error of the body is raised unchanged, with errors of the teardown as notes."""

    def destroy(group: dist.ProcessGroup | None = None) -> None:
        DESTROY(group)
        if group is not None:
            raise RuntimeError("stuck")

    mocker.patch.object(c10d, "destroy_process_group", side_effect=destroy)

    with pytest.raises(KeyError, match="loss") as failed, one_rank_of(8, 3, tensor=8, pipeline=1):
        raise KeyError("loss")

    assert failed.value.__notes__ == ["and during teardown: RuntimeError('stuck')"]
    assert registered() == (0, 0, 0, 0, 0, 0)


def test_groups_that_the_caller_destroyed_are_left_alone() -> None:
    """B21: a group, or the whole world, that the body destroyed is not destroyed again."""
    with one_rank_of(8, 3, tensor=2) as groups:
        dist.destroy_process_group(groups.group("tp"))
    with one_rank_of(8, 3, tensor=2):
        dist.destroy_process_group()

    assert registered() == (0, 0, 0, 0, 0, 0)


def open_split_world() -> list[int]:
    """Open a grid on each half of a world, on every rank."""
    launch = RuntimeSettings().launch
    left, right = RankGrid(world_size=2, tp=2), RankGrid(world_size=2, offset=2)
    settings = DistributedSettings(timeout_s=30)
    totals = []
    kinds: tuple[Kind, Kind] = "tp", "dp"
    with (
        join_world(settings, launch, torch.device("cpu")) as world,
        create_groups(left, launch.rank, world, settings.timeout) as of_left,
        create_groups(right, launch.rank, world, settings.timeout) as of_right,
        barriers(world.store, launch, settings.startup_timeout_s, settings.timeout_s),
    ):
        for grid, groups, kind in zip((left, right), (of_left, of_right), kinds, strict=True):
            if launch.rank in grid:
                total = torch.tensor([launch.rank])
                dist.all_reduce(total, group=groups[kind])
                totals.append(int(total))
    return totals


@pytest.mark.processes
def test_a_world_can_be_split() -> None:
    """With two grids on disjoint ranks of one world, every rank creates groups for both, and each half communicates."""
    assert run_ranks(open_split_world, 4) == [[1], [1], [5], [5]]


def test_a_rank_in_no_group_of_a_kind_gets_an_error() -> None:
    """A request for a group that this rank is not in raises an error, and `is_member` answers without one."""
    groups = ProcessGroups.pretend(RankGrid(world_size=8, pp=4), rank=2)

    assert not groups.is_member("embedding")
    assert groups.size("embedding") == 0
    with pytest.raises(ServiceError) as refused:
        groups.group("embedding")
    assert str(refused.value) == (
        "There is no such group:\n"
        "  process_groups: rank 2 is in no embedding group\n"
        "    fix: ask is_member('embedding') first"
    )


def test_an_unknown_kind_is_refused() -> None:
    """The error of a misspelt kind lists those that exist."""
    groups = ProcessGroups.pretend(RankGrid(world_size=8))

    with pytest.raises(ServiceError, match=r"no kind of group named 'ddp'\n    fix: choose from tp, cp, dp"):
        groups.ranks("ddp")  # type: ignore[arg-type]


def test_pretended_groups_answer_without_torch_distributed() -> None:
    """Pretended groups have ranks, sizes and positions, and their error says why there is no group."""
    groups = ProcessGroups.pretend(RankGrid(world_size=8, tp=2), rank=3)

    assert (groups.world_size, groups.ranks("tp"), groups.size("dp"), groups.index("dp")) == (8, (2, 3), 4, 1)
    with pytest.raises(ServiceError, match="process groups are pretended"):
        groups.group("tp")


def test_a_plain_run_is_a_world_of_one_without_sockets_to_others() -> None:
    """Without launch variables the world has this process alone, and no store listens on a port."""
    with opened() as groups:
        assert groups.world_size == dist.get_world_size() == 1
        assert gathered_members(groups)["dp"] == [0]
        assert not [c for c in psutil.Process(os.getpid()).net_connections() if c.laddr and c.laddr.port == 29500]
