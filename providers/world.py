"""The world: torch.distributed, initialised by us or adopted."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveInt

from runtime_di.capabilities import CudaDevice, Requirement
from runtime_di.errors import Problem, ServiceError
from runtime_di.launch import LaunchSettings
from runtime_di.providers.flight_recorder import flight_recorder
from runtime_di.providers.meeting import Meeting
from runtime_di.providers.rendezvous import Agreement, rendezvous
from runtime_di.providers.teardown import teardown
from runtime_di.section import Section

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import ProcessGroup, Store

_OURS = "runtime_di/ours"
"""Key in the store of a world that we initialised, so that no second runtime takes it for a caller's."""


class DistributedSettings(Section):
    """How ranks talk to each other."""

    backend: Literal["auto", "gloo", "nccl", "fake"] = "auto"
    """``auto`` is NCCL on CUDA devices, else Gloo; ``fake`` is one rank of a world whose other ranks do not exist."""
    timeout_s: Annotated[float, Field(ge=0.001, le=31_536_000)] = 600.0
    """Seconds that a rank waits for others: to meet, to make each group, and in each collective of every group."""
    flight_recorder_entries: PositiveInt | None = None
    """Last collectives that torch records and dumps on a timeout; ``None`` leaves that to torch's own variables."""

    @property
    def timeout(self) -> timedelta:
        """The one timeout of every group."""
        return timedelta(seconds=self.timeout_s)

    def requires(self, launch: LaunchSettings) -> Iterable[Requirement]:  # noqa: ARG002 - ranks alike
        """Need a CUDA driver if NCCL is wanted."""
        return [CudaDevice("backend")] if self.backend == "nccl" else []


@dataclass(frozen=True, slots=True)
class World:
    """The ranks that can talk to each other.

    Attributes:
        backend: what carries the collectives of this rank's device.
        owned: whether we initialised it, and so end it.
        store: with keys of this opening's own; ``None`` for the fake backend, whose other ranks do not exist.
    """

    group: ProcessGroup
    backend: str
    owned: bool
    store: Store | None


def effective_backend(settings: DistributedSettings, device: torch.device) -> str:
    """Name the backend that a world of ours has.

    Raises:
        ServiceError: NCCL is wanted for a device that is no GPU.
    """
    if settings.backend == "nccl" and device.type != "cuda":
        fix = "set distributed.backend to gloo or auto, or device.kind to cuda"
        what = f"needs CUDA devices, and this rank computes on '{device}'"
        raise ServiceError("The world cannot be made:", [Problem("distributed.backend", what, "nccl", fix=fix)])
    return {"auto": "nccl" if device.type == "cuda" else "gloo"}.get(settings.backend, settings.backend)


@contextmanager
def join_world(
    settings: DistributedSettings,
    launch: LaunchSettings,
    device: torch.device,
    *,
    store: Store | None = None,
    agree: Agreement | None = None,
) -> Iterator[World]:
    """Initialise torch.distributed and end it, or adopt what a caller initialised and leave it as it is.

    Left after a success, ranks wait for each other; left by an exception, they do not.

    Args:
        settings: of the world.
        launch: which rank of how many this is.
        device: that this rank computes on.
        store: where ranks meet, instead of the store at the launcher's address.
        agree: called before the world is made; not for the fake backend, whose other ranks do not exist.

    Raises:
        ServiceError: an initialised world disagrees with the settings, or is that of another open runtime.
    """
    from torch.distributed import HashStore  # type: ignore[attr-defined]
    from torch.distributed.distributed_c10d import PrefixStore, is_initialized

    with flight_recorder(settings.flight_recorder_entries):
        if is_initialized():
            world = _adopt(settings, launch, device)
            if agree and world.store:
                agree(PrefixStore("agreement", world.store), world.backend)
            yield world
            return
        backend = effective_backend(settings, device)
        fake = backend == "fake"
        with nullcontext(HashStore()) if fake else rendezvous(launch, settings.timeout_s, store) as own:
            if agree and not fake:
                agree(PrefixStore("agreement", own), backend)
            with _initialised(settings, launch, backend, PrefixStore("world", own)) as group:
                yield World(group, backend, owned=True, store=None if fake else own)


@contextmanager
def _initialised(
    settings: DistributedSettings, launch: LaunchSettings, backend: str, store: Store
) -> Iterator[ProcessGroup]:
    from torch.distributed import distributed_c10d as c10d

    if backend == "fake":
        import torch.testing._internal.distributed.fake_pg  # noqa: F401 - registers the backend
    callers_hook = sys.excepthook
    c10d._world.group_count = 0  # a world is named by it, and an attempt that failed has left it counted up
    # No device is bound: torch would split communicators then, which needs every rank for every group.
    c10d.init_process_group(
        backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=settings.timeout
    )
    c10d._get_default_store().set(_OURS, "1")
    group, torchs_hook = c10d._get_default_group(), sys.excepthook

    def end(failure: BaseException | None) -> None:
        if sys.excepthook is torchs_hook:
            sys.excepthook = callers_hook
        if c10d.group.WORLD is group:  # else the caller has ended it
            end_group(None, abort=failure is not None and backend == "nccl")

    with teardown(end):
        yield group


def end_group(group: ProcessGroup | None, *, abort: bool) -> None:
    """End a group, or the world for ``None``; ``abort`` gives up its collectives instead of waiting for them."""
    from torch.distributed import distributed_c10d as c10d

    tag = c10d._world.pg_to_tag.get(group) if group else None
    (c10d._abort_process_group if abort else c10d.destroy_process_group)(group)
    if tag and not c10d._world.tags_to_pg.get(tag):
        c10d._world.tags_to_pg.pop(tag, None)  # torch leaves an empty list for each group that has been


def _adopt(settings: DistributedSettings, launch: LaunchSettings, device: torch.device) -> World:
    from torch.distributed import distributed_c10d as c10d

    if _is_ours():
        what = "another runtime of this process is open, and its torch.distributed is not to be shared unseen"
        fix = "close it first, or initialise torch.distributed yourself: every runtime adopts that"
        raise ServiceError("The world cannot be joined:", [Problem("process_groups", what, fix=fix)])
    backends = dict(part.split(":") for part in c10d.get_backend_config().split(","))
    backend = backends.get(device.type)
    if problems := [*_differences(settings, launch, device, backend)]:
        raise ServiceError("An initialised torch.distributed does not fit the settings:", problems)
    if backend is None or backend == "fake":
        store = None
    else:
        root = c10d.PrefixStore(f"runtime_di/{launch.world_size}", c10d._get_default_store())
        store = c10d.PrefixStore(str(Meeting(root, launch, settings.timeout_s).hold()), root)
    return World(c10d._get_default_group(), backend or "none", owned=False, store=store)


def _differences(
    settings: DistributedSettings, launch: LaunchSettings, device: torch.device, backend: str | None
) -> Iterator[Problem]:
    import torch.distributed as dist

    has = "the initialised torch.distributed has"
    if launch.rank != (rank := dist.get_rank()):
        yield Problem("launch.rank", f"{has} {rank}", str(launch.rank), fix="give both the same rank")
    if launch.world_size != (size := dist.get_world_size()):
        yield Problem("launch.world_size", f"{has} {size}", str(launch.world_size), fix="give both the same world size")
    if backend is None or settings.backend not in ("auto", backend):
        what = f"{has} {backend or 'none'} for {device.type}"
        yield Problem("distributed.backend", what, settings.backend, fix="initialise it with that, or change this")


def _is_ours() -> bool:
    from torch.distributed import distributed_c10d as c10d

    try:
        return bool(c10d._get_default_store().check([_OURS]))
    except RuntimeError:  # torch's FakeStore keeps no keys, and we never use it
        return False
