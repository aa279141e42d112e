"""A world that a runtime initialises, and one that the caller initialised."""

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

from runtime_di.errors import AgreementError, RuntimeDIError, ServiceError
from runtime_di.providers.distributed.world import effective_backend
from runtime_di.providers.process_groups.parallel import ParallelSettings
from runtime_di.providers.process_groups.service import KINDS, Kind
from runtime_di.providers.process_groups.settings import DistributedSettings
from runtime_di.settings.launch import LaunchSettings
from runtime_di.settings.model import RuntimeSettings
from runtime_di.testing.ranks import run_ranks
from tests.support.open_process_groups import opened

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_mock import MockerFixture

DIFFER = "The ranks of a job must start with equal values, and these differ:"
FAKE = DistributedSettings(backend="fake")


@contextmanager
def callers_world(rank: int = 0, world_size: int = 1, backend: str = "gloo") -> Iterator[None]:
    """Initialise torch.distributed as a user's program would."""
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


def num_registered() -> tuple[int, int]:
    return len(c10d._world.pg_map), len(c10d._world.tags_to_pg)


def open_in_callers_world() -> tuple[bool, list[Kind], bool, int]:
    """Adopt a world whose ranks have created different numbers of groups."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for place in range(rank):
        dist.new_group([rank], use_local_synchronization=place % 2 > 0)  # so torch's group count differs between ranks
    own = num_registered()
    fail_on_a_rank(rank)
    with opened(ParallelSettings(tensor=2, pipeline=2)) as groups:
        assert not groups.owned
        for kind in filter(groups.is_member, KINDS):
            total = torch.ones(1)
            dist.all_reduce(total, group=groups.group(kind))
            assert int(total) == groups.size(kind)
        shared = [kind for kind in filter(groups.is_member, KINDS) if groups.group(kind) is groups.group("tp")]
    left = dist.is_initialized(), shared, num_registered() == own, c10d._world.group_count - (rank + 1) // 2
    dist.barrier()
    dist.destroy_process_group()
    return left


def fail_on_a_rank(failing: int) -> None:
    """Have an opening fail on one rank after it has created some of its groups."""
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group, suppress(RuntimeDIError, KeyError):
        new_group.side_effect = [*[mock.DEFAULT] * 5, KeyError] if failing == 1 else None
        with opened(ParallelSettings(tensor=2), DistributedSettings(startup_timeout_s=1)):
            raise AssertionError("a rank failed")


@pytest.mark.processes
def test_a_callers_world_is_adopted_and_left() -> None:
    """B7, B21: a matching initialised world is used, whatever groups its ranks have, and left as it was.

    This is also so after an opening that failed on one rank.
    """
    shared = ["tp", "tp_cp", "tp_dp", "tp_dp_cp", "etp", "etp_ep"]

    assert run_ranks(open_in_callers_world, 4) == [(True, shared, True, 1)] * 4


def test_a_callers_world_must_agree() -> None:
    """B7, B60: an initialised world of another rank, size or backend is refused, with all differences reported."""
    launch = LaunchSettings(rank=1, world_size=2)
    with callers_world(), pytest.raises(ServiceError) as refused, opened(None, FAKE, launch):
        pass

    assert str(refused.value) == (
        "The initialised torch.distributed does not match the settings:\n"
        "  launch.rank = 1: the initialised torch.distributed has 0\n"
        "    fix: use the same rank for both\n"
        "  launch.world_size = 2: the initialised torch.distributed has 1\n"
        "    fix: use the same world size for both\n"
        "  distributed.backend = fake: the initialised torch.distributed has gloo for cpu\n"
        "    fix: initialise it with this backend, or change this setting"
    )


def test_a_callers_fake_world_is_adopted() -> None:
    """A fake world, whose store keeps no keys, is adopted too."""
    with callers_world(3, 4, "fake"), opened(None, FAKE, LaunchSettings(rank=3, world_size=4)) as groups:
        assert (groups.backend, groups.owned) == ("fake", False)


def test_a_second_runtime_does_not_adopt_the_world_of_the_first() -> None:
    """A second opening in one process is refused while the first is open, and works after that closes."""
    with opened(), pytest.raises(ServiceError, match="another runtime of this process is open"), opened():
        pass
    with opened() as groups:
        assert groups.owned


def test_torchs_hook_and_counter_are_restored() -> None:
    """Closing, after a success or a failure, restores the exception hook that torch replaced."""
    hook = sys.excepthook

    with opened():
        assert sys.excepthook is not hook
    with pytest.raises(KeyError), opened():
        raise KeyError

    assert sys.excepthook is hook


def test_a_failed_start_can_be_retried(mocker: MockerFixture) -> None:
    """B43, B53: an attempt that fails inside torch does not change the name of the next world."""
    mocker.patch.object(c10d, "_new_process_group_helper", side_effect=RuntimeError("no route"))
    with (
        pytest.raises(ServiceError, match="the world of rank 0 could not be created: RuntimeError: no route"),
        opened(),
    ):
        pass
    mocker.stopall()

    with opened():
        assert c10d._get_default_group().group_name == "0"


def test_nccl_needs_a_gpu() -> None:
    """NCCL for a rank that computes on the CPU is refused before a world is created."""
    with (
        pytest.raises(ServiceError, match="needs CUDA devices, and this rank computes on 'cpu'"),
        opened(distributed=DistributedSettings(backend="nccl")),
    ):
        pass


def start_with_another_backend() -> str:
    """Set NCCL on the last rank, which computes on the CPU."""
    launch = RuntimeSettings().launch
    try:
        with opened(distributed=DistributedSettings(backend="nccl" if launch.rank == 2 else "auto")):
            return "opened"
    except AgreementError as error:
        return str(error)


@pytest.mark.processes
def test_all_ranks_report_a_backend_that_one_cannot_have() -> None:
    """Ranks join before one of them refuses its backend, so that the others do not wait for it."""
    ended = run_ranks(start_with_another_backend, 3)

    assert ended == [f"{DIFFER}\n  effective backend: gloo on ranks 0-1; nccl on rank 2"] * 3


def test_the_backend_follows_the_device() -> None:
    """Without a setting a GPU selects NCCL and a CPU Gloo; a setting overrides both."""
    auto = DistributedSettings()

    assert effective_backend(auto, torch.device("cuda", 1)) == "nccl"
    assert effective_backend(auto, torch.device("cpu")) == "gloo"
    assert effective_backend(FAKE, torch.device("cuda", 1)) == "fake"


@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan")])
def test_a_timeout_is_a_finite_time(timeout_s: float) -> None:
    """B42: a timeout that torch does not support is refused by the settings."""
    with pytest.raises(ValidationError):
        DistributedSettings(timeout_s=timeout_s)


IMPORTED_LATE = """
import torch.distributed as dist
from runtime_di.containers import TrainingRuntime

with TrainingRuntime.open() as runtime:
    runtime.checkpointer
    import torch.distributed.nn.functional as functional
defaults = functional.all_reduce.__defaults__
assert not any(isinstance(default, dist.ProcessGroup) for default in defaults), defaults
"""


@pytest.mark.processes
def test_no_module_keeps_the_world_of_a_runtime() -> None:
    """B11: modules of torch that keep the world of their import for good are imported before there is one."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED_LATE], capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 0, done.stderr
