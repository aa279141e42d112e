"""The phases in which services are built, in order."""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """When a service is built. A service depends only on services of its own phase and earlier ones."""

    TOKENIZER = 0
    VOCABULARY = 1
    RUNTIME = 2
    """Rank-local services: log, writers, timers."""
    DISTRIBUTED = 3
    RNG = 4
    WARMUP = 5

    @property
    def is_collective(self) -> bool:
        """Whether services of this phase may communicate; such services are built in the same order on every rank."""
        return self >= Phase.DISTRIBUTED
