"""What is needed of torch.distributed and has no public name there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import ProcessGroup, Store


def world_group() -> ProcessGroup:
    """Give the group of the initialised world."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_group()


def world_store() -> Store:
    """Give the store that the world was initialised on."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def backends() -> dict[str, str]:
    """Name the backend of each kind of device in the initialised world."""
    from torch.distributed import distributed_c10d

    return dict(part.split(":") for part in distributed_c10d.get_backend_config().split(","))


def is_registered(group: ProcessGroup) -> bool:
    """Whether torch has the group still, because nobody has ended it."""
    from torch.distributed import distributed_c10d

    return group in distributed_c10d._world.pg_map


def import_early() -> None:
    """Import what takes the world of the moment as the default of its functions, and keeps it for good."""
    import torch.distributed.nn.functional  # noqa: F401


def forget_count() -> None:
    """Let the next world have the name that the first has: it contains how many groups an attempt that failed made."""
    from torch.distributed import distributed_c10d

    distributed_c10d._world.group_count = 0


@contextmanager
def numbered(number: int | None) -> Iterator[None]:
    """Name the group made within by a number that ranks give it alike, not by how many groups each has made so far."""
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
    """End a group, or the world for ``None``; ``abort`` gives up its collectives instead of waiting for them."""
    from torch.distributed import distributed_c10d

    world = distributed_c10d._world
    tag = world.pg_to_tag.get(group) if group else None
    (distributed_c10d._abort_process_group if abort else distributed_c10d.destroy_process_group)(group)
    if tag and not world.tags_to_pg.get(tag):
        world.tags_to_pg.pop(tag, None)  # torch leaves an empty list for each group that has been


def set_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Change how long the group's collectives wait for their ranks, from the next one on, if they ever do."""
    from torch.distributed import distributed_c10d

    if distributed_c10d.get_backend(group) != "fake":
        distributed_c10d._set_pg_timeout(timeout, group)


def register_fake_backend() -> None:
    """Let torch know the backend ``fake``, whose collectives do nothing."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 - importing it registers the backend
