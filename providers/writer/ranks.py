"""Which rank writes metrics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

from pydantic import NonNegativeInt

from runtime_di.errors import Problem

RankChoice: TypeAlias = Literal["first", "last"] | NonNegativeInt
"""A rank of the world, by its place or by its number."""


def writing_rank(choice: RankChoice, world_size: int) -> int:
    """The rank of the world that writes."""
    named = {"first": 0, "last": world_size - 1}
    return named[choice] if isinstance(choice, str) else choice


def rank_problems(choice: RankChoice, world_size: int) -> Iterable[Problem]:
    """Yield a problem if the rank that writes is not in the world: nothing would be written."""
    if writing_rank(choice, world_size) >= world_size:
        yield Problem(
            "writer.rank",
            f"is not a rank of this world of {world_size}",
            value=str(choice),
            fix=f"set it to a rank from 0 to {world_size - 1}, 'first' or 'last'",
            involves=("launch",),
        )
