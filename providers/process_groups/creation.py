"""Group creation: the same number of calls on every rank, and destruction in reverse order."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING

from runtime_di.lifecycle.teardown import run_on_exit
from runtime_di.providers.distributed import c10d
from runtime_di.providers.distributed.errors import connection_errors, format_ranks
from runtime_di.providers.distributed.world import World
from runtime_di.providers.process_groups.rank_grid import KINDS, Kind, RankGrid
from runtime_di.providers.process_groups.settings import GroupSettings

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
    """Create the groups of ``rank``; every rank of the world calls this, in one order, on the grid or not.

    Torch names a locally synchronised group by its ranks and by the number of groups that exist on the creating rank.
    So every rank creates one group a kind: where it is in no group of a kind, a group of itself alone. Kinds with equal
    groups share them, see `RankGrid.partition`. In an adopted world, whose ranks may have created different numbers of
    groups, all ranks create all groups, and use equal numbers in their names.

    Args:
        grid: layout of the ranks.
        rank: of this process in the world.
        world: that the ranks are in.
        timeout: of the groups.
        settings: options of some kinds; used by NCCL only.
        kinds: to create, in this order.
    """
    num_ranks = world.group.size()
    created: list[ProcessGroup] = []
    groups: dict[Hashable, ProcessGroup | None] = {}
    if world.owned:
        groups[((1, num_ranks),) if num_ranks > 1 else (), None] = world.group
    options_of = settings if world.backend == "nccl" else {}
    keys = {kind: (grid.partition(kind), options_of.get(kind)) for kind in kinds}
    with run_on_exit(lambda failure: _destroy(created, world, failure)):
        for kind, key in keys.items():
            if key not in groups:
                groups[key] = None  # stays None on a rank in none of these groups, which creates them once too
                options = options_of[kind].options(timeout) if kind in options_of else None
                for ranks in [grid.group_of(rank, kind) or (rank,)] if world.owned else grid.groups(kind):
                    new = _create(ranks, world, timeout, kind, options)
                    if rank in ranks:
                        created.append(new)
                        groups[key] = new
        yield {kind: group for kind, key in keys.items() if (group := groups[key])}


@contextmanager
def create_group(
    ranks: Sequence[int], rank: int, world: World, timeout: timedelta, name: str
) -> Iterator[ProcessGroup | None]:
    """Create one group of any ranks; every rank of the world calls this; non-members get ``None``."""
    members = ranks if rank in ranks or not world.owned else [rank]
    group = _create(members, world, timeout, name)
    with run_on_exit(lambda failure: _destroy([group] if rank in members else [], world, failure)):
        yield group if rank in ranks else None


def _create(ranks: Sequence[int], world: World, timeout: timedelta, name: str, options: object = None) -> ProcessGroup:
    import torch.distributed as dist

    number = next(world.group_numbers) if world.group_numbers else None
    failed_step = f"the {name} group of {format_ranks(ranks)} could not be created"
    with connection_errors(failed_step), c10d.use_group_number(number):
        group: ProcessGroup = dist.new_group(
            [*ranks], timeout, None, options, use_local_synchronization=world.owned, group_desc=name
        )
    return group


def _destroy(created: list[ProcessGroup], world: World, failure: BaseException | None) -> None:
    """Destroy each group once, the last one first; raise the first error after trying all."""
    abort = failure is not None and world.backend == "nccl"
    if abort and world.owned:
        return  # aborted together with the world: separate aborts of NCCL wait for each other
    errors: list[Exception] = []
    while created:
        group = created.pop()
        try:
            if c10d.is_registered(group):  # otherwise the caller has destroyed it
                c10d.end_group(group, abort=abort)
        except Exception as error:  # noqa: BLE001 - the other groups must be destroyed too
            errors.append(error)
    if errors:
        for other in errors[1:]:
            errors[0].add_note(f"and another group: {other!r}")
        raise errors[0]
