"""Whether a world that a caller initialised is one to adopt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from runtime_di.errors import Problem, ServiceError
from runtime_di.launch import LaunchSettings
from runtime_di.providers import c10d

if TYPE_CHECKING:
    import torch

    from runtime_di.providers.world import DistributedSettings

OURS = "runtime_di/ours"
"""Key in the store of a world that we initialised, so that no second runtime takes it for a caller's."""


def refuse_unfit_world(settings: DistributedSettings, launch: LaunchSettings, device: torch.device) -> None:
    """Check the initialised torch.distributed.

    Raises:
        ServiceError: it is that of another open runtime, or disagrees with the settings.
    """
    if _is_ours():
        what = "another runtime of this process is open, and its torch.distributed is not to be shared unseen"
        raise ServiceError("The world cannot be joined:", [Problem("process_groups", what, fix="close it first")])
    if problems := [*_differences(settings, launch, device)]:
        raise ServiceError("An initialised torch.distributed does not fit the settings:", problems)


def _differences(settings: DistributedSettings, launch: LaunchSettings, device: torch.device) -> Iterator[Problem]:
    import torch.distributed as dist

    backends = c10d.backends()
    backend = backends.get(device.type)
    has = "the initialised torch.distributed has"
    if launch.rank != (rank := dist.get_rank()):
        yield Problem("launch.rank", f"{has} {rank}", str(launch.rank), fix="give both the same rank")
    if launch.world_size != (size := dist.get_world_size()):
        yield Problem("launch.world_size", f"{has} {size}", str(launch.world_size), fix="give both the same world size")
    if backend is None or settings.backend not in ("auto", backend):
        what = f"{has} {backend or 'none'} for {device.type}"
        yield Problem("distributed.backend", what, settings.backend, fix="initialise it with that, or change this")
    if settings.cpu_collectives and "cpu" not in backends:
        fix = "initialise it with cpu:gloo,cuda:nccl, or change this"
        yield Problem("distributed.cpu_collectives", f"{has} no backend for the CPU", "true", fix=fix)


def _is_ours() -> bool:
    try:
        return bool(c10d.world_store().check([OURS]))
    except RuntimeError:  # torch's FakeStore keeps no keys, and we never use it
        return False
