"""A world of our own, and one that a caller initialised."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d as c10d

from open_groups import opened
from runtime_di.errors import AgreementError, RuntimeDIError, ServiceError
from runtime_di.launch import LaunchSettings
from runtime_di.providers.parallel import ParallelSettings
from runtime_di.providers.process_groups import KINDS, Kind
from runtime_di.providers.world import DistributedSettings, effective_backend
from runtime_di.settings import RuntimeSettings
from runtime_di.testing.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_mock import MockerFixture

DIFFER = "Ranks of one job must be started alike, and these differ:"
FAKE = DistributedSettings(backend="fake")


@contextmanager
def callers_world(rank: int = 0, world_size: int = 1, backend: str = "gloo") -> Iterator[None]:
    """Initialise torch.distributed as a program of the user's would."""
    store = HashStore()
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        store = FakeStore()
    hook = sys.excepthook
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def kept() -> tuple[int, int]:
    return len(c10d._world.pg_map), len(c10d._world.tags_to_pg)


def open_in_callers_world() -> tuple[bool, list[Kind], bool, int]:
    """Adopt a world in which ranks have made different numbers of groups of their own."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for place in range(rank):
        dist.new_group([rank], use_local_synchronization=place % 2 > 0)  # what torch names it by differs between ranks
    own = kept()
    fail_on_a_rank(rank)
    with opened(ParallelSettings(tensor=2, pipeline=2)) as groups:
        assert not groups.owned
        for kind in filter(groups.is_member, KINDS):
            total = torch.ones(1)
            dist.all_reduce(total, group=groups.group(kind))
            assert int(total) == groups.size(kind)
        shared = [kind for kind in filter(groups.is_member, KINDS) if groups.group(kind) is groups.group("tp")]
    left = dist.is_initialized(), shared, kept() == own, c10d._world.group_count - (rank + 1) // 2
    dist.barrier()
    dist.destroy_process_group()
    return left


def fail_on_a_rank(failing: int) -> None:
    """Let an opening fail on one rank when it has made some of its groups."""
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group, suppress(RuntimeDIError, KeyError):
        new_group.side_effect = [*[mock.DEFAULT] * 5, KeyError] if failing == 1 else None
        with opened(ParallelSettings(tensor=2), DistributedSettings(startup_timeout_s=1)):
            raise AssertionError("a rank failed")


def test_a_callers_world_is_adopted_and_left() -> None:
    """B7, B21: an initialised world that agrees is used, whatever groups its ranks have, and left as it was.

    So it is again after an opening that failed on one rank.
    """
    shared = ["tp", "tp_cp", "tp_dp", "tp_dp_cp", "etp", "etp_ep"]

    assert run_ranks(open_in_callers_world, 4) == [(True, shared, True, 1)] * 4


def test_a_callers_world_must_agree() -> None:
    """B7, B60: an initialised world of another rank, size or backend is refused, all differences told."""
    launch = LaunchSettings(rank=1, world_size=2)
    with callers_world(), pytest.raises(ServiceError) as refused, opened(None, FAKE, launch):
        pass

    assert str(refused.value) == (
        "An initialised torch.distributed does not fit the settings:\n"
        "  launch.rank = 1: the initialised torch.distributed has 0\n"
        "    fix: give both the same rank\n"
        "  launch.world_size = 2: the initialised torch.distributed has 1\n"
        "    fix: give both the same world size\n"
        "  distributed.backend = fake: the initialised torch.distributed has gloo for cpu\n"
        "    fix: initialise it with that, or change this"
    )


def test_a_callers_fake_world_is_adopted() -> None:
    """A fake world, whose store keeps nothing, is adopted too."""
    with callers_world(3, 4, "fake"), opened(None, FAKE, LaunchSettings(rank=3, world_size=4)) as groups:
        assert (groups.backend, groups.owned) == ("fake", False)


def test_a_second_runtime_does_not_take_the_world_of_the_first() -> None:
    """A second opening in one process is refused while the first is open, and works once that is closed."""
    with opened(), pytest.raises(ServiceError, match="another runtime of this process is open"), opened():
        pass
    with opened() as groups:
        assert groups.owned


def test_torchs_hook_and_counter_are_restored() -> None:
    """Closing, after a success and after a failure, leaves no hook of torch's behind."""
    hook = sys.excepthook

    with opened():
        assert sys.excepthook is not hook
    with pytest.raises(KeyError), opened():
        raise KeyError

    assert sys.excepthook is hook


def test_a_failed_start_can_be_tried_again(mocker: MockerFixture) -> None:
    """B43, B53: an attempt that fails within torch leaves nothing that changes the name of the next world."""
    mocker.patch.object(c10d, "_new_process_group_helper", side_effect=RuntimeError("no route"))
    with pytest.raises(ServiceError, match="the world of rank 0 could not be made: RuntimeError: no route"), opened():
        pass
    mocker.stopall()

    with opened():
        assert c10d._get_default_group().group_name == "0"


def test_nccl_needs_a_gpu() -> None:
    """NCCL for a rank that computes on the CPU is refused before a world is made."""
    with (
        pytest.raises(ServiceError, match="needs CUDA devices, and this rank computes on 'cpu'"),
        opened(distributed=DistributedSettings(backend="nccl")),
    ):
        pass


def start_with_a_backend_of_my_own() -> str:
    """Want NCCL on the CPU of the last rank."""
    launch = RuntimeSettings().launch
    try:
        with opened(distributed=DistributedSettings(backend="nccl" if launch.rank == 2 else "auto")):
            return "opened"
    except AgreementError as error:
        return str(error)


def test_a_backend_that_one_rank_cannot_have_is_told_to_all() -> None:
    """Ranks meet before one of them refuses its backend, so that the others need not wait for it in vain."""
    told = run_ranks(start_with_a_backend_of_my_own, 3)

    assert told == [f"{DIFFER}\n  effective backend: gloo on ranks 0-1; nccl on rank 2"] * 3


def test_the_backend_follows_the_device() -> None:
    """Without a setting a GPU means NCCL and a CPU means Gloo; a setting stands."""
    auto = DistributedSettings()

    assert effective_backend(auto, torch.device("cuda", 1)) == "nccl"
    assert effective_backend(auto, torch.device("cpu")) == "gloo"
    assert effective_backend(FAKE, torch.device("cuda", 1)) == "fake"


@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan")])
def test_a_timeout_is_a_finite_time(timeout_s: float) -> None:
    """B42: a timeout that torch could not keep is refused as a setting."""
    with pytest.raises(ValidationError):
        DistributedSettings(timeout_s=timeout_s)


KEPT = """
import torch.distributed as dist
from runtime_di.containers import TrainingRuntime

with TrainingRuntime.open() as runtime:
    runtime.checkpointer
    import torch.distributed.nn.functional as functional
defaults = functional.all_reduce.__defaults__
assert not any(isinstance(default, dist.ProcessGroup) for default in defaults), defaults
"""


def test_no_module_keeps_a_world_of_ours() -> None:
    """B11: torch's modules that take the world of their import for good are imported before there is one."""
    done = subprocess.run([sys.executable, "-c", KEPT], capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stderr
