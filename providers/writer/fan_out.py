"""A writer that passes every call on to several writers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from runtime_di.providers.writer.protocol import Writer


class FanOutWriter:
    """Passes every call on to several writers."""

    def __init__(self, writers: Iterable[Writer]) -> None:
        self._writers = tuple(writers)

    def scalar(self, name: str, value: float, step: int) -> None:
        for writer in self._writers:
            writer.scalar(name, value, step)

    def text(self, name: str, text: str, step: int) -> None:
        for writer in self._writers:
            writer.text(name, text, step)

    def settings(self, values: Mapping[str, Any]) -> None:
        for writer in self._writers:
            writer.settings(values)

    def flush(self) -> None:
        for writer in self._writers:
            writer.flush()
