"""A fake writer that records its calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class FakeWriter:
    """A writer that records its calls.

    Attributes:
        scalars: name to pairs of step and value, in the order of writing.
        texts: name to pairs of step and text, in the order of writing.
        settings_written: the settings of each `settings` call.
        num_flushes: number of `flush` calls.
    """

    def __init__(self) -> None:
        self.scalars: dict[str, list[tuple[int, float]]] = {}
        self.texts: dict[str, list[tuple[int, str]]] = {}
        self.settings_written: list[Mapping[str, Any]] = []
        self.num_flushes = 0

    def scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.setdefault(name, []).append((step, float(value)))

    def text(self, name: str, text: str, step: int) -> None:
        self.texts.setdefault(name, []).append((step, text))

    def settings(self, values: Mapping[str, Any]) -> None:
        self.settings_written.append(dict(values))

    def flush(self) -> None:
        self.num_flushes += 1
