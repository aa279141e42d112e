"""The writer of ranks that do not write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class NullWriter:
    """Writes nothing."""

    def scalar(self, name: str, value: float, step: int) -> None:
        pass

    def text(self, name: str, text: str, step: int) -> None:
        pass

    def settings(self, values: Mapping[str, Any]) -> None:
        pass

    def flush(self) -> None:
        pass
