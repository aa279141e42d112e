"""Fake process groups: any rank of any world, without torch.distributed."""

from __future__ import annotations

from typing import Any

from runtime_di.providers.process_groups import ProcessGroups, RankGrid


def fake_process_groups(rank: int = 0, world_size: int = 1, **sizes: Any) -> ProcessGroups:
    """Create the process groups of one rank of any world.

    Ranks, sizes and indices are the real ones; the groups cannot communicate.

    Args:
        rank: the simulated rank.
        world_size: size of the simulated world.
        sizes: axis sizes of the `RankGrid`, such as ``tp=2``.
    """
    return ProcessGroups.pretend(RankGrid(world_size=world_size, **sizes), rank)
