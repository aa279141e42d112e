"""NCCL options of the groups of some kinds; the tests read the options and need no GPU."""

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

from runtime_di.containers import TrainingSettings
from runtime_di.errors import ServiceError
from runtime_di.providers.distributed.world import World, join_world
from runtime_di.providers.process_groups.creation import create_groups
from runtime_di.providers.process_groups.parallel import ParallelSettings
from runtime_di.providers.process_groups.rank_grid import RankGrid
from runtime_di.providers.process_groups.settings import DistributedSettings, GroupSettings
from runtime_di.settings.launch import LaunchSettings
from tests.support.open_process_groups import opened

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_mock import MockerFixture


class Options(SimpleNamespace):
    """Replaces the options of torch's NCCL groups, which CPU builds lack."""

    def __init__(self, is_high_priority_stream: bool) -> None:
        super().__init__(high_priority=is_high_priority_stream, config=SimpleNamespace())


@contextmanager
def nccl_world(mocker: MockerFixture) -> Iterator[World]:
    """Be rank 5 of 8 in a fake world whose backend is named NCCL."""
    mocker.patch.object(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), create=True)
    launch = LaunchSettings(rank=5, world_size=8)
    with join_world(DistributedSettings(backend="fake"), launch, torch.device("cpu")) as world:
        yield World(world.group, "nccl")


def test_a_kind_has_its_own_options(mocker: MockerFixture) -> None:
    """Only groups of the named kinds get options, and kinds with different options share no group."""
    settings: Any = {"tp": GroupSettings(high_priority=True, max_ctas=8, net_name="IB")}
    with nccl_world(mocker) as world:
        make = dist.new_group
        new_group = mocker.patch.object(
            dist, "new_group", side_effect=lambda ranks, timeout, _backend, _options, **how: make(ranks, timeout, **how)
        )

        with create_groups(RankGrid(world_size=8, tp=2), 5, world, timedelta(seconds=9), settings) as groups:
            options = {call.kwargs["group_desc"]: call.args[3] for call in new_group.call_args_list}
            assert groups["tp"] is not groups["etp"]

    of_tp = options.pop("tp")
    assert (of_tp.high_priority, vars(of_tp.config)) == (True, {"max_ctas": 8, "net_name": "IB"})
    assert of_tp._timeout == timedelta(seconds=9)
    assert {*options.values()} == {None}


def test_other_backends_ignore_options() -> None:
    """On Gloo and fake, groups are shared and created as without options."""
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
    """Groups of an NCCL world carry collectives of CPU tensors over Gloo where the settings enable it."""
    init = mocker.patch.object(dist, "init_process_group", side_effect=KeyError("far enough"))
    settings = DistributedSettings(cpu_collectives=cpu_collectives)

    with pytest.raises(KeyError, match="far enough"), join_world(settings, LaunchSettings(), torch.device("cuda")):
        pass

    assert init.call_args.args == (backend,)


def test_cpu_collectives_are_refused_without_a_backend() -> None:
    """A group for CPU tensors exists with Gloo, and with NCCL only if it has Gloo as well."""
    with opened() as groups:
        assert groups.cpu_group("dp") is groups.group("dp")
        without = replace(groups, world=World(groups.group("dp"), "nccl", cpu_collectives=False))
        with pytest.raises(ServiceError, match=r"set distributed.cpu_collectives to true"):
            without.cpu_group("dp")
