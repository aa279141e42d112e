"""The groups of ranks that talk to each other, each rank making its own alone."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

from runtime_di.errors import Problem, ServiceError
from runtime_di.launch import LaunchSettings
from runtime_di.providers import c10d
from runtime_di.providers.agreement import Agreement
from runtime_di.providers.group_settings import GroupSettings
from runtime_di.providers.parallel import ParallelSettings
from runtime_di.providers.rank_grid import KINDS, EmbeddingRule, Kind, RankGrid
from runtime_di.providers.rendezvous import parting
from runtime_di.providers.teardown import teardown, yielded
from runtime_di.providers.world import DistributedSettings, World, join_world

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import ProcessGroup, Store

__all__ = ["KINDS", "Kind", "ProcessGroups", "RankGrid", "create_groups", "open_process_groups"]


@dataclass(frozen=True, kw_only=True)
class ProcessGroups:
    """The groups of one rank, one of each kind that it is in.

    Attributes:
        backend: what carries the collectives of this rank's device.
        device_type: kind of device that the groups' tensors are on.
        owned: whether the world is ours to end.
        store: with keys of this opening's own; ``None`` where there are no other ranks to meet.
        cpu_collectives: whether groups carry the collectives of CPU tensors.
    """

    grid: RankGrid
    rank: int
    backend: str = "none"
    device_type: str = "cpu"
    owned: bool = True
    store: Store | None = field(default=None, repr=False, compare=False)
    cpu_collectives: bool = True
    _groups: Mapping[Kind, ProcessGroup] = field(default_factory=dict, repr=False)

    @classmethod
    def pretend(cls, grid: RankGrid, rank: int = 0) -> Self:
        """Be one rank of a grid without torch.distributed: everything but ``group`` works."""
        return cls(grid=grid, rank=rank)

    @classmethod
    def given(cls, grid: RankGrid, groups: Mapping[Kind, ProcessGroup]) -> Self:
        """Hold groups that a caller made in a world of its own, to override a runtime's; none of them is ended here.

        Args:
            grid: how the initialised torch.distributed is laid out.
            groups: this rank's groups; asking for a kind that is not among them is an error.

        Raises:
            ServiceError: a group has other ranks than the grid says.
        """
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import get_process_group_ranks

        rank = dist.get_rank()
        problems = [
            Problem(
                f"group '{kind}'", f"has ranks {there}, and the grid says {[*said]}", fix="mend the grid or the group"
            )
            for kind, group in groups.items()
            if (there := sorted(get_process_group_ranks(group))) != [*(said := grid.group_of(rank, kind))]
        ]
        if problems:
            raise ServiceError("The given process groups do not fit their grid:", problems)
        backend = dist.get_backend()
        device_type = "cuda" if "nccl" in backend else "cpu"
        return cls(grid=grid, rank=rank, backend=backend, device_type=device_type, owned=False, _groups=dict(groups))

    @property
    def world_size(self) -> int:
        """Count the ranks of the grid."""
        return self.grid.world_size

    def is_member(self, kind: Kind) -> bool:
        """Whether this rank is in a group of this kind."""
        return bool(self.ranks(kind))

    def ranks(self, kind: Kind) -> tuple[int, ...]:
        """Ranks of this rank's group, ascending; ``()`` if it is in none."""
        _check(kind)
        return self.grid.group_of(self.rank, kind)

    def size(self, kind: Kind) -> int:
        """Ranks in this rank's group; 0 if it is in none."""
        return len(self.ranks(kind))

    def index(self, kind: Kind) -> int:
        """Position of this rank in its group.

        Raises:
            ServiceError: it is in none.
        """
        return self._member_ranks(kind).index(self.rank)

    def group(self, kind: Kind) -> ProcessGroup:
        """Give this rank's group, for collectives.

        Raises:
            ServiceError: it is in none.
        """
        self._member_ranks(kind)
        if kind not in self._groups and self._groups:
            raise _error(f"no {kind} group was given", fix="give this rank's groups of every kind that is used")
        if kind not in self._groups:
            what = "these process groups only pretend: they have ranks and sizes, and nothing to communicate with"
            raise _error(what, fix="open a runtime; backend 'fake' needs no other ranks")
        return self._groups[kind]

    def cpu_group(self, kind: Kind) -> ProcessGroup:
        """Give this rank's group, for collectives of CPU tensors.

        Raises:
            ServiceError: it is in none, or carries the collectives of GPUs only.
        """
        if not self.cpu_collectives:
            raise _error("NCCL carries no collectives of CPU tensors", fix="set distributed.cpu_collectives to true")
        return self.group(kind)

    def set_timeout(self, timeout_s: float) -> None:
        """Change how long collectives of every group wait, from the next one on: such as less after the first step.

        Every rank should do so. An adopted world keeps its own timeout, its groups that are ours get this one.
        """
        if self.backend in ("gloo", "nccl"):
            world = [c10d.world_group()] if self.owned else []
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
    agreement: Agreement = Agreement(),  # noqa: B008 - frozen
) -> Generator[ProcessGroups, BaseException | None, None]:
    """Join the world and make this rank's groups, at most one call a kind whatever the size of the world.

    Args:
        distributed: how ranks talk to each other.
        parallel: how they are divided.
        launch: which rank of how many this is.
        device: that this rank computes on.
        store: where ranks meet, instead of the store at the launcher's address.
        embedding: which ranks of a pipeline group hold embeddings, instead of its first and last.
        agreement: what ranks must have alike, compared before the world is made.

    Raises:
        AgreementError: ranks have something different.
        ServiceError: the world cannot be made or adopted, or ranks did not come in time.
        SettingsError: the parallel sizes do not fit the world.
    """
    grid = parallel.grid(launch.world_size, embedding)
    return (yield from yielded(_opened(grid, distributed, launch, device, store=store, agreement=agreement)))


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
        parting(world.store, launch, distributed.timeout_s) if world.store else nullcontext(),
    ):
        opened = ProcessGroups(
            grid=grid,
            rank=launch.rank,
            backend=world.backend,
            device_type=device.type,
            owned=world.owned,
            store=world.store,
            cpu_collectives=distributed.cpu_collectives or world.backend != "nccl",
            _groups=groups,
        )
        opened.set_timeout(distributed.timeout_s)
        if store is None and world.owned and world.store:
            world.store.set_timeout(distributed.timeout)  # NCCL connects over it at the first collective
        yield opened


@contextmanager
def create_groups(
    grid: RankGrid,
    rank: int,
    world: World,
    timeout: timedelta,
    settings: Mapping[Kind, GroupSettings] = MappingProxyType({}),
    *,
    kinds: Sequence[Kind] = KINDS,
) -> Iterator[dict[Kind, ProcessGroup]]:
    """Make the groups that ``rank`` is in; every rank of the world must call this, in one order, on the grid or not.

    Torch names a group that only its members make by its ranks and by how many groups its maker has. So each rank
    makes one group a kind, a group of itself alone where it is in none; kinds whose groups are the same share them,
    which sizes alone decide. In an adopted world ranks may have made different numbers of groups: there all ranks
    make all groups.

    Args:
        grid: how the ranks are laid out.
        rank: of this process in the world.
        world: that the ranks are in.
        timeout: of the groups.
        settings: what is particular about some kinds; heeded by NCCL only.
        kinds: to make groups of, in this order.
    """
    import torch.distributed as dist

    num_ranks = world.group.size()
    created: list[ProcessGroup] = []
    made: dict[Hashable, ProcessGroup | None] = {}
    if world.owned:
        made[((1, num_ranks),) if num_ranks > 1 else (), None] = world.group
    particular = settings if world.backend == "nccl" else {}
    keys = {kind: (grid.partition(kind), particular.get(kind)) for kind in kinds}
    with teardown(lambda failure: _end(created, world, failure)):
        for kind, key in keys.items():
            if key not in made:
                made[key] = None  # so that a rank in none of these groups does not make them again
                options = particular[kind].options(timeout) if kind in particular else None
                for ranks in [grid.group_of(rank, kind) or (rank,)] if world.owned else grid.groups(kind):
                    group = dist.new_group(
                        [*ranks], timeout, None, options, use_local_synchronization=world.owned, group_desc=kind
                    )
                    if rank in ranks:
                        created.append(group)
                        made[key] = group
        yield {kind: group for kind, key in keys.items() if (group := made[key])}


@contextmanager
def create_group(
    ranks: Sequence[int], rank: int, world: World, timeout: timedelta, name: str
) -> Iterator[ProcessGroup | None]:
    """Make one group of any ranks, ``None`` where ``rank`` is none of them; every rank of the world must call this."""
    import torch.distributed as dist

    made = [*ranks] if rank in ranks or not world.owned else [rank]
    group = dist.new_group(made, timeout, use_local_synchronization=world.owned, group_desc=name)
    with teardown(lambda failure: _end([group] if rank in made else [], world, failure)):
        yield group if rank in ranks else None


def _end(created: list[ProcessGroup], world: World, failure: BaseException | None) -> None:
    """End each group once, the last one first; tell the first error after trying all."""
    abort = failure is not None and world.backend == "nccl"
    if abort and world.owned:
        return  # aborted together with the world: one after the other, NCCL's aborts wait for each other
    errors: list[Exception] = []
    while created:
        group = created.pop()
        try:
            if c10d.is_registered(group):  # else the caller has ended it
                c10d.end_group(group, abort=abort)
        except Exception as error:  # noqa: BLE001 - the other groups must be ended too
            errors.append(error)
    if errors:
        for other in errors[1:]:
            errors[0].add_note(f"and another group: {other!r}")
        raise errors[0]


def _check(kind: str) -> None:
    if kind not in KINDS:
        raise _error(f"there is no kind of group named {kind!r}", fix=f"choose from {', '.join(KINDS)}")


def _error(what: str, fix: str) -> ServiceError:
    return ServiceError("There is no such group:", [Problem("process_groups", what, fix=fix)])
