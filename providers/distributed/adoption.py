"""Checks of an initialised torch.distributed before a runtime adopts it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from runtime_di.errors import Problem, ServiceError
from runtime_di.providers.distributed import c10d
from runtime_di.providers.distributed.settings import WorldSettings
from runtime_di.settings.launch import LaunchSettings

if TYPE_CHECKING:
    import torch

OWNED_KEY = "runtime_di/owned"
"""Key in the store of a world that a runtime initialised, so that no second runtime adopts it."""


def check_adopted_world(settings: WorldSettings, launch: LaunchSettings, device: torch.device) -> None:
    """Check that a runtime can adopt the initialised torch.distributed.

    Raises:
        ServiceError: it belongs to another open runtime, or disagrees with the settings.
    """
    if _is_owned():
        what = "another runtime of this process is open, and torch.distributed belongs to it"
        raise ServiceError("The world cannot be joined:", [Problem("process_groups", what, fix="close it first")])
    if problems := [*_differences(settings, launch, device)]:
        raise ServiceError("The initialised torch.distributed does not match the settings:", problems)


def _differences(settings: WorldSettings, launch: LaunchSettings, device: torch.device) -> Iterator[Problem]:
    import torch.distributed as dist

    backends = c10d.backends()
    backend = backends.get(device.type)
    has = "the initialised torch.distributed has"
    if launch.rank != (rank := dist.get_rank()):
        yield Problem("launch.rank", f"{has} {rank}", str(launch.rank), fix="use the same rank for both")
    if launch.world_size != (size := dist.get_world_size()):
        fix = "use the same world size for both"
        yield Problem("launch.world_size", f"{has} {size}", str(launch.world_size), fix=fix)
    if backend is None or settings.backend not in ("auto", backend):
        what = f"{has} {backend or 'none'} for {device.type}"
        fix = "initialise it with this backend, or change this setting"
        yield Problem("distributed.backend", what, settings.backend, fix=fix)
    if settings.cpu_collectives and "cpu" not in backends:
        fix = "initialise it with cpu:gloo,cuda:nccl, or change this setting"
        yield Problem("distributed.cpu_collectives", f"{has} no backend for the CPU", "true", fix=fix)


def _is_owned() -> bool:
    try:
        return bool(c10d.world_store().check([OWNED_KEY]))
    except RuntimeError:  # torch's FakeStore keeps no keys, and a runtime never uses it
        return False
