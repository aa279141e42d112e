"""What is particular about groups of some kinds, for NCCL; its options are looked at, no GPU is asked."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError

from open_groups import opened
from runtime_di.containers import TrainingSettings
from runtime_di.errors import ServiceError
from runtime_di.launch import LaunchSettings
from runtime_di.providers.group_creation import create_groups
from runtime_di.providers.group_settings import GroupSettings
from runtime_di.providers.parallel import ParallelSettings
from runtime_di.providers.rank_grid import RankGrid
from runtime_di.providers.world import DistributedSettings, World, join_world

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_mock import MockerFixture


class Options(SimpleNamespace):
    """Stands for the options of torch's NCCL groups, which its builds for CPUs lack."""

    def __init__(self, is_high_priority_stream: bool) -> None:
        super().__init__(high_priority=is_high_priority_stream, config=SimpleNamespace())


@contextmanager
def nccl_world(mocker: MockerFixture) -> Iterator[World]:
    """Be rank 5 of 8 in a fake world that takes itself for one of NCCL."""
    mocker.patch.object(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), create=True)
    launch = LaunchSettings(rank=5, world_size=8)
    with join_world(DistributedSettings(backend="fake"), launch, torch.device("cpu")) as world:
        yield World(world.group, "nccl")


def test_a_kind_has_options_of_its_own(mocker: MockerFixture) -> None:
    """Only groups of the kinds that are named get options, and none is shared with a kind that has others."""
    settings: Any = {"tp": GroupSettings(high_priority=True, max_ctas=8, net_name="IB")}
    with nccl_world(mocker) as world:
        make = dist.new_group
        new_group = mocker.patch.object(
            dist, "new_group", side_effect=lambda ranks, timeout, _backend, _options, **how: make(ranks, timeout, **how)
        )

        with create_groups(RankGrid(world_size=8, tp=2), 5, world, timedelta(seconds=9), settings) as groups:
            options = {call.kwargs["group_desc"]: call.args[3] for call in new_group.call_args_list}
            assert groups["tp"] is not groups["etp"]

    given = options.pop("tp")
    assert (given.high_priority, vars(given.config)) == (True, {"max_ctas": 8, "net_name": "IB"})
    assert given._timeout == timedelta(seconds=9)
    assert {*options.values()} == {None}


def test_other_backends_know_no_options() -> None:
    """On Gloo and fake, groups are shared and made as if nothing particular were set."""
    settings = DistributedSettings(backend="fake", groups={"tp": GroupSettings(high_priority=True)})

    with opened(ParallelSettings(tensor=2), settings, LaunchSettings(world_size=8)) as groups:
        assert groups.group("tp") is groups.group("etp")


def test_group_settings_come_from_any_source() -> None:
    """A flag can name a kind and its options; an unknown kind is refused."""
    flags = ["--distributed.groups", '{"dp_cp": {"min_ctas": 2}}']

    assert TrainingSettings.load(flags).distributed.groups == {"dp_cp": GroupSettings(min_ctas=2)}
    with pytest.raises(ValidationError, match="ddp"):
        DistributedSettings(groups={"ddp": {}})


@pytest.mark.parametrize(("cpu_collectives", "backend"), [(True, "cpu:gloo,cuda:nccl"), (False, "nccl")])
def test_gloo_joins_nccl_on_request(cpu_collectives: bool, backend: str, mocker: MockerFixture) -> None:
    """Groups of an NCCL world carry collectives of CPU tensors over Gloo where the settings ask for it."""
    init = mocker.patch.object(dist, "init_process_group", side_effect=KeyError("far enough"))
    settings = DistributedSettings(cpu_collectives=cpu_collectives)

    with pytest.raises(KeyError, match="far enough"), join_world(settings, LaunchSettings(), torch.device("cuda")):
        pass

    assert init.call_args.args == (backend,)


def test_cpu_collectives_are_refused_where_none_carries_them() -> None:
    """A group for CPU tensors is given by Gloo, and by NCCL only with its twin."""
    with opened() as groups:
        assert groups.cpu_group("dp") is groups.group("dp")
        without = replace(groups, world=World(groups.group("dp"), "nccl", cpu_collectives=False))
        with pytest.raises(ServiceError, match=r"set distributed.cpu_collectives to true"):
            without.cpu_group("dp")
