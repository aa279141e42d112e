"""Process groups of one rank: each rank creates only the groups that it is in."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

from runtime_di.errors import Problem, ServiceError
from runtime_di.lifecycle.teardown import as_generator
from runtime_di.providers.distributed import c10d
from runtime_di.providers.distributed.agreement import Agreement
from runtime_di.providers.distributed.barriers import barriers
from runtime_di.providers.distributed.world import World, callers_world, join_world
from runtime_di.providers.process_groups.creation import create_groups
from runtime_di.providers.process_groups.parallel import ParallelSettings
from runtime_di.providers.process_groups.rank_grid import KINDS, EmbeddingRule, Kind, RankGrid
from runtime_di.providers.process_groups.settings import DistributedSettings
from runtime_di.settings.launch import LaunchSettings

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import ProcessGroup, Store

__all__ = ["KINDS", "Kind", "ProcessGroups", "RankGrid", "open_process_groups"]


@dataclass(frozen=True, kw_only=True)
class ProcessGroups:
    """The groups of one rank, one of each kind that it is in.

    Attributes:
        device_type: kind of device that the groups' tensors are on.
        world: that the ranks are in; ``None`` for pretended groups.
    """

    grid: RankGrid
    rank: int
    device_type: str = "cpu"
    world: World | None = field(default=None, repr=False, compare=False)
    _groups: Mapping[Kind, ProcessGroup] = field(default_factory=dict, repr=False)

    @classmethod
    def pretend(cls, grid: RankGrid, rank: int = 0) -> Self:
        """Pretend to be one rank of a grid, without torch.distributed; everything but ``group`` works."""
        return cls(grid=grid, rank=rank)

    @classmethod
    def provided(cls, grid: RankGrid, groups: Mapping[Kind, ProcessGroup]) -> Self:
        """Use groups that the caller created in its own world, to override those of a runtime, which destroys none.

        Args:
            grid: layout of the initialised torch.distributed.
            groups: this rank's groups; a request for any other kind is an error.

        Raises:
            ServiceError: a group has other ranks than the grid.
        """
        import torch
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import get_process_group_ranks

        rank = dist.get_rank()
        problems = [
            Problem(
                f"group '{kind}'", f"has ranks {ranks}, but the grid has {expected}", fix="change the grid or the group"
            )
            for kind, group in groups.items()
            if (ranks := sorted(get_process_group_ranks(group))) != (expected := [*grid.group_of(rank, kind)])
        ]
        if problems:
            raise ServiceError("The provided process groups do not match their grid:", problems)
        on_cuda = c10d.backends().get("cuda") == "nccl" and torch.cuda.is_available()
        device_type = "cuda" if on_cuda else "cpu"
        world = callers_world(device_type)
        return cls(grid=grid, rank=rank, device_type=device_type, world=world, _groups=dict(groups))

    @property
    def backend(self) -> str:
        """Backend that carries the collectives of this rank's device."""
        return self.world.backend if self.world else "none"

    @property
    def owned(self) -> bool:
        """Whether a runtime initialised the world, and so destroys it."""
        return self.world is None or self.world.owned

    @property
    def cpu_collectives(self) -> bool:
        """Whether groups carry the collectives of CPU tensors."""
        return self.world is None or self.world.cpu_collectives

    @property
    def world_size(self) -> int:
        """Number of ranks of the grid."""
        return self.grid.world_size

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Kinds of the groups that this rank is in and that were created, or provided by the caller."""
        return tuple(kind for kind in self._groups if self.is_member(kind))

    def is_member(self, kind: Kind) -> bool:
        """Whether this rank is in a group of this kind."""
        return bool(self.ranks(kind))

    def ranks(self, kind: Kind) -> tuple[int, ...]:
        """Ranks of this rank's group, ascending; ``()`` if it is in none."""
        return self.grid.group_of(self.rank, kind)

    def size(self, kind: Kind) -> int:
        """Ranks in this rank's group; 0 if it is in none."""
        return len(self.ranks(kind))

    def index(self, kind: Kind) -> int:
        """Position of this rank in its group.

        Raises:
            ServiceError: this rank is in no such group.
        """
        return self._member_ranks(kind).index(self.rank)

    def group(self, kind: Kind) -> ProcessGroup:
        """Return this rank's group, for collectives.

        Raises:
            ServiceError: this rank is in no such group, or the group was not provided.
        """
        self._member_ranks(kind)
        if kind not in self._groups and self.world:
            raise _error(f"no {kind} group was provided", fix="provide this rank's groups of every kind that is used")
        if kind not in self._groups:
            what = "these process groups are pretended: they have ranks and sizes, but cannot communicate"
            raise _error(what, fix="open a runtime; backend 'fake' needs no other ranks")
        return self._groups[kind]

    def cpu_group(self, kind: Kind) -> ProcessGroup:
        """Return this rank's group, for collectives of CPU tensors.

        Raises:
            ServiceError: this rank is in no such group, or the group carries collectives of GPU tensors only.
        """
        if not self.cpu_collectives:
            raise _error("NCCL carries no collectives of CPU tensors", fix="set distributed.cpu_collectives to true")
        return self.group(kind)

    def set_timeout(self, timeout_s: float) -> None:
        """Change the timeout of the collectives of every group, from the next one on, such as after the first step.

        Call it on every rank. An adopted world keeps its own timeout; the groups created in it get this one.
        """
        world = [self.world.group] if self.world and self.world.owned else []
        for group in {*world, *self._groups.values()}:
            c10d.set_timeout(group, timedelta(seconds=timeout_s))

    def _member_ranks(self, kind: Kind) -> tuple[int, ...]:
        if not (ranks := self.ranks(kind)):
            raise _error(f"rank {self.rank} is in no {kind} group", fix=f"ask is_member({kind!r}) first")
        return ranks


def open_process_groups(
    distributed: DistributedSettings,
    parallel: ParallelSettings,
    launch: LaunchSettings,
    device: torch.device,
    *,
    store: Store | None = None,
    embedding: EmbeddingRule | None = None,
    grids: Mapping[str, RankGrid] = MappingProxyType({}),
    agreement: Agreement = Agreement(),  # noqa: B008 - frozen
) -> Generator[ProcessGroups, BaseException | None, None]:
    """Join the world and create this rank's groups: at most one call a kind in a world that is not adopted.

    Args:
        distributed: how ranks communicate.
        parallel: sizes along each axis.
        launch: rank, world size and launch address of this process.
        device: that this rank computes on.
        store: for the rendezvous, instead of the store at the launch address.
        embedding: returns the ranks of a pipeline group that have embeddings, instead of its first and last; the same
            stages in every pipeline of a grid.
        grids: that divide the world; ranks compare the embedding stages of these too.
        agreement: values that must be equal on all ranks, compared before the world is created.

    Raises:
        AgreementError: ranks differ.
        ServiceError: the world cannot be created or adopted, or ranks did not arrive in time.
        SettingsError: the parallel sizes do not fit the world.
    """
    grid = parallel.grid(launch.world_size, embedding)
    layout = {"": grid, **{name: replace(own, embedding=embedding) for name, own in grids.items()}}
    stages = {f"embedding stages {name}".rstrip(): own.embedding_stages(launch.rank) for name, own in layout.items()}
    agreed = agreement.extended_with(stages)
    return (yield from as_generator(_opened(grid, distributed, launch, device, store=store, agreement=agreed)))


@contextmanager
def _opened(
    grid: RankGrid,
    distributed: DistributedSettings,
    launch: LaunchSettings,
    device: torch.device,
    *,
    store: Store | None,
    agreement: Agreement,
) -> Iterator[ProcessGroups]:
    with (
        join_world(distributed, launch, device, store=store, agreement=agreement) as world,
        create_groups(grid, launch.rank, world, distributed.startup_timeout, distributed.groups) as groups,
        barriers(world.store, launch, distributed.startup_timeout_s, distributed.timeout_s),
    ):
        opened = ProcessGroups(grid=grid, rank=launch.rank, device_type=device.type, world=world, _groups=groups)
        opened.set_timeout(distributed.timeout_s)
        if store is None and world.owned and world.store:
            world.store.set_timeout(distributed.timeout)  # NCCL connects over it at the first collective
        yield opened


def _error(what: str, fix: str) -> ServiceError:
    return ServiceError("There is no such group:", [Problem("process_groups", what, fix=fix)])
