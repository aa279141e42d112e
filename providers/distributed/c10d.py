"""Functions of torch.distributed that have no public name there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import ProcessGroup, Store


def world_group() -> ProcessGroup:
    """Return the group of the initialised world."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_group()


def world_store() -> Store:
    """Return the store that the world was initialised on."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def backends() -> dict[str, str]:
    """Return the backend of each kind of device in the initialised world."""
    from torch.distributed import distributed_c10d

    return dict(part.split(":") for part in distributed_c10d.get_backend_config().split(","))


def is_registered(group: ProcessGroup) -> bool:
    """Whether the group still exists: it has been created and not destroyed."""
    from torch.distributed import distributed_c10d

    return group in distributed_c10d._world.pg_map


def import_early() -> None:
    """Import the modules of torch that would keep the current world for good, as the default of their functions."""
    import torch.distributed.nn.functional  # noqa: F401


def reset_group_count() -> None:
    """Give the next world the name of the first: it contains a count of groups, which a failed attempt has raised."""
    from torch.distributed import distributed_c10d

    distributed_c10d._world.group_count = 0


@contextmanager
def use_group_number(number: int | None) -> Iterator[None]:
    """Name the group that the body creates by ``number``, equal on all ranks, instead of by each rank's group count."""
    from torch.distributed import distributed_c10d

    world = distributed_c10d._world
    count = world.group_count
    world.group_count = count if number is None else number
    try:
        yield
    finally:
        if number is not None:
            world.group_count = count


def end_group(group: ProcessGroup | None, *, abort: bool) -> None:
    """Destroy a group, or the world for ``None``; ``abort`` cancels its collectives, which otherwise finish first."""
    from torch.distributed import distributed_c10d

    world = distributed_c10d._world
    tag = world.pg_to_tag.get(group) if group else None
    (distributed_c10d._abort_process_group if abort else distributed_c10d.destroy_process_group)(group)
    if tag and not world.tags_to_pg.get(tag):
        world.tags_to_pg.pop(tag, None)  # torch leaves an empty list for each destroyed group


def set_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Change the timeout of the group's collectives, from the next one on; the fake backend has none."""
    from torch.distributed import distributed_c10d

    if distributed_c10d.get_backend(group) != "fake":
        distributed_c10d._set_pg_timeout(timeout, group)


def register_fake_backend() -> None:
    """Register the backend ``fake`` in torch; its collectives do nothing."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 - importing it registers the backend
