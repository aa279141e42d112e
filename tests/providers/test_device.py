"""The device that a rank takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from runtime_di.errors import ServiceError
from runtime_di.providers.device import DeviceSettings, open_device
from runtime_di.settings.capabilities import CudaDevice
from runtime_di.settings.launch import LaunchSettings

if TYPE_CHECKING:
    from pytest_mock import MockerFixture


@pytest.fixture
def two_gpus(mocker: MockerFixture) -> list[torch.device]:
    """A machine with two GPUs; lists those that became current."""
    chosen: list[torch.device] = []
    mocker.patch.object(torch.cuda, "is_available", return_value=True)
    mocker.patch.object(torch.cuda, "device_count", return_value=2)
    mocker.patch.object(torch.cuda, "set_device", side_effect=chosen.append)
    return chosen


def test_without_a_gpu_the_cpu_is_taken(mocker: MockerFixture) -> None:
    """`auto` is the CPU where CUDA does not work."""
    mocker.patch.object(torch.cuda, "is_available", return_value=False)

    assert open_device(DeviceSettings(), LaunchSettings()) == torch.device("cpu")


def test_ranks_of_a_node_take_its_gpus_in_order(two_gpus: list[torch.device]) -> None:
    """The local rank, not the rank, selects the GPU, which becomes the current one."""
    launch = LaunchSettings(rank=5, world_size=8, local_rank=1, local_world_size=2)

    assert open_device(DeviceSettings(), launch) == torch.device("cuda", 1)
    assert two_gpus == [torch.device("cuda", 1)]


def test_the_cpu_can_be_set(two_gpus: list[torch.device]) -> None:
    """A setting of `cpu` leaves GPUs alone."""
    assert open_device(DeviceSettings(kind="cpu"), LaunchSettings()) == torch.device("cpu")
    assert two_gpus == []


@pytest.mark.usefixtures("two_gpus")
def test_more_ranks_than_gpus_are_refused() -> None:
    """A rank for which its node has no GPU raises an error instead of sharing one."""
    launch = LaunchSettings(rank=2, world_size=4, local_rank=2, local_world_size=4)

    with pytest.raises(ServiceError) as refused:
        open_device(DeviceSettings(), launch)

    assert str(refused.value) == (
        "The device cannot be opened:\n"
        "  device.kind = auto: local rank 2 needs GPU 2, and this process sees 2\n"
        "    fix: start at most one rank for each GPU, check CUDA_VISIBLE_DEVICES, or set device.kind to cpu"
    )


def test_only_cuda_requires_a_driver() -> None:
    """B2: `cuda` requires a driver on this machine, `auto` requires none."""
    launch = LaunchSettings()

    assert list(DeviceSettings(kind="cuda").requires(launch)) == [CudaDevice("kind")]
    assert list(DeviceSettings().requires(launch)) == []
