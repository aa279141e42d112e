"""The device that this rank computes on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from runtime_di.errors import Problem, ServiceError
from runtime_di.settings.capabilities import CudaDevice, Requirement
from runtime_di.settings.launch import LaunchSettings
from runtime_di.settings.section import Section

if TYPE_CHECKING:
    import torch


class DeviceSettings(Section):
    """Kind of device that ranks compute on."""

    kind: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto`` is CUDA where there is a usable GPU, else the CPU."""

    def requires(self, launch: LaunchSettings) -> Iterable[Requirement]:
        """Require a CUDA driver for ``cuda``."""
        return [CudaDevice("kind")] if self.kind == "cuda" else []


def open_device(settings: DeviceSettings, launch: LaunchSettings) -> torch.device:
    """Choose the device of this rank, and make a GPU the current device; ranks of a node take its GPUs in order.

    Raises:
        ServiceError: ``cuda`` is set and does not work, or the node has fewer GPUs than ranks.
    """
    import torch

    if settings.kind == "cpu" or (settings.kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if launch.local_rank >= visible:
        what = f"local rank {launch.local_rank} needs GPU {launch.local_rank}, and this process sees {visible}"
        fix = "start at most one rank for each GPU, check CUDA_VISIBLE_DEVICES, or set device.kind to cpu"
        raise ServiceError("The device cannot be opened:", [Problem("device.kind", what, settings.kind, fix=fix)])
    device = torch.device("cuda", launch.local_rank)
    torch.cuda.set_device(device)
    return device
