"""Marks on settings fields and sections: per-rank, not portable."""

from __future__ import annotations

from enum import Enum


class Mark(Enum):
    """A property of a field or a whole section: ``rank: Annotated[int, Mark.PER_RANK]``."""

    PER_RANK = "per-rank"
    """May differ between ranks. It is left out of the agreement between ranks and of checkpoints."""
    NOT_PORTABLE = "not portable"
    """Belongs to this run. It is never read from a checkpoint's settings."""
