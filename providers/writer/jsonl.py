"""A writer of JSON lines: one object a line, in a file that stays readable after a kill."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from pydantic import Field

from runtime_di.settings.section import Section

BLOCK_BYTES = 1 << 16


class JsonLinesSettings(Section):
    """A file of JSON lines in the run folder."""

    file: Annotated[str, Field(pattern=r"^[^/\\]*[^/\\.][^/\\]*$")] = "metrics.jsonl"
    """Name of the file; a restarted run appends to it."""


class JsonLinesWriter:
    """Appends one JSON object a line, each with a single unbuffered write.

    A killed process therefore leaves at most an unfinished last line, which the next opening removes. A forked process
    has nothing buffered that it could write twice, and calls from several threads are safe. Numbers that JSON lacks
    are written as the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which ``float`` reads. Values of other
    types are written as their ``str``.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._file = path.open("a+b", buffering=0)
        remove_unfinished_line(self._file)

    def scalar(self, name: str, value: float, step: int) -> None:
        self._append({"step": step, "name": name, "value": float(value)})

    def text(self, name: str, text: str, step: int) -> None:
        self._append({"step": step, "name": name, "text": text})

    def settings(self, values: Mapping[str, Any]) -> None:
        self._append({"settings": values})

    def flush(self) -> None:
        """Write to stable storage, so that a crash of the machine loses nothing; a crash of the process never does."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _append(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(json_value({"time": self._clock(), **record}), allow_nan=False, default=str) + "\n"
        left = memoryview(line.encode())
        while left:
            left = left[self._file.write(left) :]


def json_value(value: Any) -> Any:
    """Replace the floats that JSON cannot express by their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    return value


def remove_unfinished_line(file: BinaryIO) -> None:
    """Cut off what follows the last line end: part of a line, from a process killed while writing."""
    size = end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - BLOCK_BYTES)
        file.seek(start)
        line_end = file.read(end - start).rfind(b"\n") + 1
        end = start + line_end
        if line_end:
            break
    if end < size:
        file.truncate(end)
