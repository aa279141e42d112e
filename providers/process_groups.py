"""The groups of ranks that talk to each other, each rank making its own alone."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Self

from runtime_di.errors import Problem, ServiceError
from runtime_di.launch import LaunchSettings
from runtime_di.providers.parallel import ParallelSettings
from runtime_di.providers.rank_grid import KINDS, EmbeddingRule, Kind, RankGrid
from runtime_di.providers.rendezvous import Agreement, parting
from runtime_di.providers.teardown import teardown
from runtime_di.providers.world import DistributedSettings, World, end_group, join_world

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
    """

    grid: RankGrid
    rank: int
    backend: str = "none"
    device_type: str = "cpu"
    owned: bool = True
    _groups: Mapping[Kind, ProcessGroup] = field(default_factory=dict, repr=False)

    @classmethod
    def pretend(cls, grid: RankGrid, rank: int = 0) -> Self:
        """Be one rank of a grid without torch.distributed: everything but ``group`` works."""
        return cls(grid=grid, rank=rank)

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
        if kind not in self._groups:
            what = "these process groups only pretend: they have ranks and sizes, and nothing to communicate with"
            raise _error(what, fix="open a runtime; backend 'fake' needs no other ranks")
        return self._groups[kind]

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
    agree: Agreement | None = None,
) -> Generator[ProcessGroups, BaseException | None, None]:
    """Join the world and make this rank's groups, at most one call a kind whatever the size of the world.

    Args:
        distributed: how ranks talk to each other.
        parallel: how they are divided.
        launch: which rank of how many this is.
        device: that this rank computes on.
        store: where ranks meet, instead of the store at the launcher's address.
        embedding: which ranks of a pipeline group hold embeddings, instead of its first and last.
        agree: called before the world is made, to compare what ranks must agree on.

    Raises:
        ServiceError: the world cannot be made or adopted, or ranks did not come in time.
        SettingsError: the parallel sizes do not fit the world.
    """
    grid = parallel.grid(launch.world_size, embedding)
    failure: BaseException | None = None
    try:
        with (
            join_world(distributed, launch, device, store=store, agree=agree) as world,
            create_groups(grid, launch.rank, world, distributed.timeout) as groups,
            parting(world.store, launch, distributed.timeout_s) if world.store else nullcontext(),
        ):
            failure = yield ProcessGroups(
                grid=grid,
                rank=launch.rank,
                backend=world.backend,
                device_type=device.type,
                owned=world.owned,
                _groups=groups,
            )
            if failure is not None:
                raise _BodyFailed
    except _BodyFailed as failed:
        for note in getattr(failed, "__notes__", ()):
            if failure is not None:
                failure.add_note(note)


class _BodyFailed(Exception):  # noqa: N818 - no error of its own: it stands for the body's
    """Leaves the world and the groups as the body's exception would, which keeps its traceback."""


@contextmanager
def create_groups(grid: RankGrid, rank: int, world: World, timeout: timedelta) -> Iterator[dict[Kind, ProcessGroup]]:
    """Make the groups that ``rank`` is in; every rank of the world must call this, in one order, on the grid or not.

    Torch names a group that only its members make by its ranks and by how many groups its maker has. So each rank
    makes one group a kind, a group of itself alone where it is in none; kinds whose groups are the same share them,
    which sizes alone decide. In an adopted world ranks may have made different numbers of groups: there all ranks
    make all groups.
    """
    import torch.distributed as dist

    num_ranks = world.group.size()
    created: list[ProcessGroup] = []
    by_partition: dict[Hashable, ProcessGroup] = {}
    if world.owned:
        by_partition[((1, num_ranks),) if num_ranks > 1 else ()] = world.group
    with teardown(lambda failure: _end(created, world, failure)):
        for kind in KINDS:
            if (partition := grid.partition(kind)) not in by_partition:
                for ranks in [grid.group_of(rank, kind) or (rank,)] if world.owned else grid.groups(kind):
                    group = dist.new_group([*ranks], timeout, use_local_synchronization=world.owned, group_desc=kind)
                    if rank in ranks:
                        created.append(group)
                        by_partition[partition] = group
        yield {kind: group for kind in KINDS if (group := by_partition.get(grid.partition(kind)))}


def _end(created: list[ProcessGroup], world: World, failure: BaseException | None) -> None:
    """End each group once, the last one first; tell the first error after trying all."""
    from torch.distributed import distributed_c10d as c10d

    abort = failure is not None and world.backend == "nccl"
    if abort and world.owned:
        return  # aborted together with the world: one after the other, NCCL's aborts wait for each other
    errors: list[Exception] = []
    while created:
        group = created.pop()
        try:
            if group in c10d._world.pg_map:  # else the caller has ended it
                end_group(group, abort=abort)
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
