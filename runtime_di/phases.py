"""The phases of a start, in their order."""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """When a service is built; a service depends on its own phase and earlier ones only."""

    TOKENIZER = 0
    VOCABULARY = 1
    RUNTIME = 2
    """Services of this rank alone: log, writers, timers."""
    DISTRIBUTED = 3
    RNG = 4
    WARMUP = 5

    @property
    def is_collective(self) -> bool:
        """Whether services of this phase may talk to other ranks, and so are built in one order on all of them."""
        return self >= Phase.DISTRIBUTED
