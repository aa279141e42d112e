"""The interface of metric writers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Writer(Protocol):
    """Writes a run's metrics; every rank has a writer, which is a `NullWriter` on ranks that do not write."""

    def scalar(self, name: str, value: float, step: int) -> None:
        """Write one number of a training step."""

    def text(self, name: str, text: str, step: int) -> None:
        """Write a piece of text, such as a generated sample."""

    def settings(self, values: Mapping[str, Any]) -> None:
        """Write the settings of the run."""

    def flush(self) -> None:
        """Flush everything written so far to the disk."""
