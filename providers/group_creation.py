"""Makes this rank's groups, in the same number of calls on every rank, and ends them in reverse."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING

from runtime_di.providers import c10d
from runtime_di.providers.agreement import told
from runtime_di.providers.group_settings import GroupSettings
from runtime_di.providers.rank_grid import KINDS, Kind, RankGrid
from runtime_di.providers.teardown import teardown
from runtime_di.providers.waiting import connecting
from runtime_di.providers.world import World

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import ProcessGroup


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
    as `RankGrid.partition` says. In an adopted world ranks may have made different numbers of groups: there all ranks
    make all groups, and number them alike.

    Args:
        grid: how the ranks are laid out.
        rank: of this process in the world.
        world: that the ranks are in.
        timeout: of the groups.
        settings: what is particular about some kinds; heeded by NCCL only.
        kinds: to make groups of, in this order.
    """
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
                    new = _make(ranks, world, timeout, kind, options)
                    if rank in ranks:
                        created.append(new)
                        made[key] = new
        yield {kind: group for kind, key in keys.items() if (group := made[key])}


@contextmanager
def create_group(
    ranks: Sequence[int], rank: int, world: World, timeout: timedelta, name: str
) -> Iterator[ProcessGroup | None]:
    """Make one group of any ranks, ``None`` where ``rank`` is none of them; every rank of the world must call this."""
    made = ranks if rank in ranks or not world.owned else [rank]
    group = _make(made, world, timeout, name)
    with teardown(lambda failure: _end([group] if rank in made else [], world, failure)):
        yield group if rank in ranks else None


def _make(ranks: Sequence[int], world: World, timeout: timedelta, name: str, options: object = None) -> ProcessGroup:
    import torch.distributed as dist

    number = next(world.numbers) if world.numbers else None
    with connecting(f"the {name} group of {told(ranks)} could not be made"), c10d.numbered(number):
        group: ProcessGroup = dist.new_group(
            [*ranks], timeout, None, options, use_local_synchronization=world.owned, group_desc=name
        )
    return group


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
