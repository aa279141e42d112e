"""The world: torch.distributed, initialised by us or adopted."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import Field, PositiveInt

from runtime_di.capabilities import CudaDevice, Requirement
from runtime_di.errors import Problem, ServiceError
from runtime_di.launch import LaunchSettings
from runtime_di.providers import c10d
from runtime_di.providers.adoption import OURS, refuse_unfit_world
from runtime_di.providers.agreement import Agreement, told
from runtime_di.providers.barriers import telling
from runtime_di.providers.flight_recorder import flight_recorder
from runtime_di.providers.group_settings import GroupSettings
from runtime_di.providers.meeting import Meeting
from runtime_di.providers.rank_grid import Kind
from runtime_di.providers.rendezvous import rendezvous
from runtime_di.providers.teardown import teardown
from runtime_di.providers.waiting import connecting
from runtime_di.section import Section

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import ProcessGroup, Store

Seconds: TypeAlias = Annotated[float, Field(ge=0.001, le=31_536_000)]


class DistributedSettings(Section):
    """How ranks talk to each other."""

    backend: Literal["auto", "gloo", "nccl", "fake"] = "auto"
    """``auto`` is NCCL on CUDA devices, else Gloo; ``fake`` is one rank of a world whose other ranks do not exist."""
    timeout_s: Seconds = 600.0
    """Seconds that a rank waits for others in each collective of every group, and to close."""
    startup_timeout_s: Seconds = 120.0
    """Seconds that a rank waits for others to arrive, and in each step of making groups; at least ``timeout_s`` where
    ranks start again within their processes, since the others of one that failed may wait for it that long."""
    cpu_collectives: bool = False
    """Whether groups whose backend is NCCL carry the collectives of CPU tensors too, over Gloo; Gloo always does."""
    groups: dict[Kind, GroupSettings] = Field(default_factory=dict)
    """What is particular about the groups of some kinds, such as ``{"tp": {"high_priority": true}}``."""
    flight_recorder_entries: PositiveInt | None = None
    """Last collectives that torch records and dumps on a timeout; ``None`` leaves that to torch's own variables."""

    @property
    def timeout(self) -> timedelta:
        """The one timeout of every group."""
        return timedelta(seconds=self.timeout_s)

    @property
    def startup_timeout(self) -> timedelta:
        """The timeout of every group while groups are made."""
        return timedelta(seconds=self.startup_timeout_s)

    def requires(self, launch: LaunchSettings) -> Iterable[Requirement]:
        """Need a CUDA driver if NCCL is wanted."""
        return [CudaDevice("backend")] if self.backend == "nccl" else []


@dataclass(frozen=True, slots=True)
class World:
    """The ranks that can talk to each other.

    Attributes:
        backend: what carries the collectives of this rank's device.
        cpu_collectives: whether its groups carry the collectives of CPU tensors.
        owned: whether we initialised it, and so end it.
        store: with keys of this opening's own; ``None`` where there are no other ranks to meet, as on ``fake``.
        numbers: for the names of groups in a caller's world, whose ranks may have made different numbers of groups.
        parts: numbers the openings within this one, alike on all ranks, which open them in one order.
    """

    group: ProcessGroup
    backend: str
    _: KW_ONLY
    cpu_collectives: bool = True
    owned: bool = True
    store: Store | None = None
    numbers: Iterator[int] | None = None
    parts: Iterator[int] = field(default_factory=itertools.count)


def effective_backend(settings: DistributedSettings, device: torch.device) -> str:
    """Name the backend that a world of ours has."""
    return {"auto": "nccl" if device.type == "cuda" else "gloo"}.get(settings.backend, settings.backend)


@contextmanager
def join_world(
    settings: DistributedSettings,
    launch: LaunchSettings,
    device: torch.device,
    *,
    store: Store | None = None,
    agreement: Agreement = Agreement(),  # noqa: B008 - frozen
) -> Iterator[World]:
    """Initialise torch.distributed and end it, or adopt what a caller initialised and leave it as it is.

    Ranks do not wait for each other when they leave: whoever uses the world has them wait first, by `barriers`.

    Args:
        settings: of the world.
        launch: which rank of how many this is.
        device: that this rank computes on.
        store: where ranks meet, instead of the store at the launcher's address.
        agreement: what ranks must have alike, compared before the world is made; the backend and the version of torch
            are added. Not for the fake backend, whose other ranks do not exist.

    Raises:
        AgreementError: ranks have something different.
        ServiceError: an initialised world disagrees with the settings, or is that of another open runtime; or ranks
            did not come in time; or NCCL is wanted for a device that is no GPU, which the other ranks are told.
    """
    import torch
    from torch.distributed import HashStore  # type: ignore[attr-defined]
    from torch.distributed.distributed_c10d import PrefixStore, is_initialized

    alike = {"version of torch": torch.__version__, "kind of device": device.type}
    with flight_recorder(settings.flight_recorder_entries):
        if is_initialized():
            adopted = _adopt(settings, launch, device, agreement.having(alike))
            with telling(adopted.store, launch.rank):
                yield adopted
            return
        backend = effective_backend(settings, device)
        if fake := backend == "fake":
            c10d.register_fake_backend()
            meeting: AbstractContextManager[Store] = nullcontext(HashStore())
        else:
            own = agreement.having({"effective backend": backend, **alike})
            meeting = rendezvous(launch, settings.startup_timeout_s, store, own)
        with meeting as met, telling(met, launch.rank):
            _refuse_unfit(backend, device)  # once the other ranks know it
            with _initialised(settings, launch, backend, PrefixStore("world", met)) as group:
                yield World(group, backend, cpu_collectives="cpu" in c10d.backends(), store=None if fake else met)


def _refuse_unfit(backend: str, device: torch.device) -> None:
    if backend == "nccl" and device.type != "cuda":
        fix = "set distributed.backend to gloo or auto, or device.kind to cuda"
        what = f"needs CUDA devices, and this rank computes on '{device}'"
        raise ServiceError("The world cannot be made:", [Problem("distributed.backend", what, "nccl", fix=fix)])


@contextmanager
def _initialised(
    settings: DistributedSettings, launch: LaunchSettings, backend: str, store: Store
) -> Iterator[ProcessGroup]:
    import torch.distributed as dist

    callers_hook = sys.excepthook
    c10d.import_early()
    c10d.forget_count()
    # No device is bound: torch would split communicators then, which needs every rank for every group.
    with connecting(f"the world of {told(range(launch.world_size))} could not be made"):
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if backend == "nccl" and settings.cpu_collectives else backend,
            store=store,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=settings.startup_timeout,
        )
    group, torchs_hook = c10d.world_group(), sys.excepthook

    def end(failure: BaseException | None) -> None:
        if sys.excepthook is torchs_hook:
            sys.excepthook = callers_hook
        if dist.group.WORLD is group:  # else the caller has ended it
            c10d.end_group(None, abort=failure is not None and backend == "nccl")

    with teardown(end):
        c10d.world_store().set(OURS, "1")
        yield group


def _adopt(settings: DistributedSettings, launch: LaunchSettings, device: torch.device, agreement: Agreement) -> World:
    refuse_unfit_world(settings, launch, device)
    world = callers_world(device.type)
    return meet_in(world, launch, settings.startup_timeout_s, agreement.having({"effective backend": world.backend}))


def callers_world(device_type: str) -> World:
    """Take the initialised torch.distributed for what it is to a rank on a kind of device."""
    backends = c10d.backends()
    backend, on_cpu = backends.get(device_type, "none"), "cpu" in backends
    return World(c10d.world_group(), backend, cpu_collectives=on_cpu, owned=False)


def meet_in(
    world: World,
    launch: LaunchSettings,
    timeout_s: float,
    agreement: Agreement = Agreement(),  # noqa: B008 - frozen
) -> World:
    """Meet the other ranks of a caller's world; return it with a store and numbers of this opening's own.

    Raises:
        AgreementError: ranks have something different.
        ServiceError: ranks did not come in time.
    """
    from torch.distributed.distributed_c10d import PrefixStore

    if world.owned or world.store or world.backend in ("none", "fake"):
        return world
    root = PrefixStore("runtime_di", c10d.world_store())
    number = Meeting(store=root, launch=launch, timeout_s=timeout_s, agreement=agreement).hold()
    return replace(world, store=PrefixStore(str(number), root), numbers=itertools.count(number << 32))
