"""The world: torch.distributed, initialised by a runtime or adopted from its caller."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING

from runtime_di.errors import Problem, ServiceError
from runtime_di.lifecycle.teardown import run_on_exit
from runtime_di.providers.distributed import c10d
from runtime_di.providers.distributed.adoption import OWNED_KEY, check_adopted_world
from runtime_di.providers.distributed.agreement import Agreement
from runtime_di.providers.distributed.barriers import announce_failure
from runtime_di.providers.distributed.errors import connection_errors, format_ranks
from runtime_di.providers.distributed.flight_recorder import flight_recorder
from runtime_di.providers.distributed.rendezvous.protocol import Rendezvous
from runtime_di.providers.distributed.rendezvous.store import join_rendezvous
from runtime_di.providers.distributed.settings import WorldSettings
from runtime_di.settings.launch import LaunchSettings

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import ProcessGroup, Store


@dataclass(frozen=True, slots=True)
class World:
    """An initialised torch.distributed.

    Attributes:
        group: of all ranks.
        backend: carries the collectives of this rank's device.
        cpu_collectives: whether groups carry the collectives of CPU tensors.
        owned: whether a runtime initialised it, and so destroys it.
        store: with keys of this generation alone; ``None`` where there are no other ranks, as on ``fake``.
        group_numbers: for the names of groups in an adopted world, whose ranks may have created different numbers of
            groups; equal on all ranks.
        grids_numbers: for the keys of grids that are opened in this world; equal on all ranks, which open them in one
            order.
    """

    group: ProcessGroup
    backend: str
    _: KW_ONLY
    cpu_collectives: bool = True
    owned: bool = True
    store: Store | None = None
    group_numbers: Iterator[int] | None = None
    grids_numbers: Iterator[int] = field(default_factory=itertools.count)


def effective_backend(settings: WorldSettings, device: torch.device) -> str:
    """Return the backend of a world that a runtime initialises."""
    return {"auto": "nccl" if device.type == "cuda" else "gloo"}.get(settings.backend, settings.backend)


@contextmanager
def join_world(
    settings: WorldSettings,
    launch: LaunchSettings,
    device: torch.device,
    *,
    store: Store | None = None,
    agreement: Agreement = Agreement(),  # noqa: B008 - frozen
) -> Iterator[World]:
    """Initialise torch.distributed and destroy it, or adopt one that the caller initialised and leave it as it is.

    Ranks do not wait for each other when they leave; code that uses the world enters `barriers` for this.

    Args:
        settings: of the world.
        launch: rank, world size and launch address of this process.
        device: that this rank computes on.
        store: for the rendezvous, instead of the store at the launch address.
        agreement: values that must be equal on all ranks, compared before the world is created; the backend and the
            version of torch are added. The fake backend compares nothing, since its other ranks do not exist.

    Raises:
        AgreementError: ranks differ.
        ServiceError: an initialised world disagrees with the settings, or belongs to another open runtime; or ranks
            did not arrive in time; or NCCL is set for a device that is not a GPU, which is announced to other ranks.
    """
    import torch
    from torch.distributed.distributed_c10d import PrefixStore, is_initialized

    agreed = {"version of torch": torch.__version__, "kind of device": device.type}
    with flight_recorder(settings.flight_recorder_entries):
        if is_initialized():
            adopted = _adopt(settings, launch, device, agreement.extended_with(agreed))
            with announce_failure(adopted.store, launch.rank):
                yield adopted
            return
        backend = effective_backend(settings, device)
        own = agreement.extended_with({"effective backend": backend, **agreed})
        rendezvous = _rendezvous(backend, launch, settings.startup_timeout_s, store, own)
        with rendezvous as joined, announce_failure(joined, launch.rank):
            _check_backend(backend, device)  # after the rendezvous, which compares the backends of all ranks
            with _initialised(settings, launch, backend, PrefixStore("world", joined)) as group:
                on_cpu, shared = "cpu" in c10d.backends(), None if backend == "fake" else joined
                yield World(group, backend, cpu_collectives=on_cpu, store=shared)


def _rendezvous(
    backend: str, launch: LaunchSettings, timeout_s: float, store: Store | None, agreement: Agreement
) -> AbstractContextManager[Store]:
    """Join the other ranks; on the fake backend there are none, and the store is in memory."""
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    if backend == "fake":
        c10d.register_fake_backend()
        return nullcontext(HashStore())
    return join_rendezvous(launch, timeout_s, store, agreement)


def _check_backend(backend: str, device: torch.device) -> None:
    if backend == "nccl" and device.type != "cuda":
        fix = "set distributed.backend to gloo or auto, or device.kind to cuda"
        what = f"needs CUDA devices, and this rank computes on '{device}'"
        raise ServiceError("The world cannot be created:", [Problem("distributed.backend", what, "nccl", fix=fix)])


@contextmanager
def _initialised(settings: WorldSettings, launch: LaunchSettings, backend: str, store: Store) -> Iterator[ProcessGroup]:
    import torch.distributed as dist

    callers_hook = sys.excepthook
    c10d.import_early()
    c10d.reset_group_count()
    # No device is bound: torch would then split communicators, which needs all ranks for every group.
    with connection_errors(f"the world of {format_ranks(range(launch.world_size))} could not be created"):
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
        if dist.group.WORLD is group:  # otherwise the caller has destroyed it
            c10d.end_group(None, abort=failure is not None and backend == "nccl")

    with run_on_exit(end):
        c10d.world_store().set(OWNED_KEY, "1")
        yield group


def _adopt(settings: WorldSettings, launch: LaunchSettings, device: torch.device, agreement: Agreement) -> World:
    check_adopted_world(settings, launch, device)
    world = callers_world(device.type)
    agreed = agreement.extended_with({"effective backend": world.backend})
    return join_generation(world, launch, settings.startup_timeout_s, agreed)


def callers_world(device_type: str) -> World:
    """Describe the initialised torch.distributed of a caller, for a rank on this kind of device."""
    backends = c10d.backends()
    backend, has_cpu = backends.get(device_type, "none"), "cpu" in backends
    return World(c10d.world_group(), backend, cpu_collectives=has_cpu, owned=False)


def join_generation(
    world: World,
    launch: LaunchSettings,
    timeout_s: float,
    agreement: Agreement = Agreement(),  # noqa: B008 - frozen
) -> World:
    """Join a generation with the other ranks of an adopted world; return the world with its store and group numbers.

    Raises:
        AgreementError: ranks differ.
        ServiceError: ranks did not arrive in time.
    """
    from torch.distributed.distributed_c10d import PrefixStore

    if world.owned or world.store or world.backend in ("none", "fake"):
        return world
    root = PrefixStore("runtime_di", c10d.world_store())
    generation = Rendezvous(store=root, launch=launch, timeout_s=timeout_s, agreement=agreement).join()
    group_numbers = itertools.count(generation << 32)
    return replace(world, store=PrefixStore(str(generation), root), group_numbers=group_numbers)
