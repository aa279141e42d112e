"""The variables that enable torch's flight recorder, which dumps the last collectives of each rank after a hang."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_NEWER_NAMES = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE"}


@contextmanager
def flight_recorder(entries: int | None) -> Iterator[None]:
    """Record the last collectives of groups that the body creates, and dump them on a timeout.

    Torch reads both from environment variables, which are unset again after the body.

    Args:
        entries: number of collectives to keep; ``None`` changes no variable. A variable that is already set to another
            value stays, with a warning.
    """
    wanted = {"TORCH_NCCL_TRACE_BUFFER_SIZE": str(entries), "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"} if entries else {}
    written = [name for name, value in wanted.items() if _write(name, value)]
    try:
        yield
    finally:
        for name in written:
            os.environ.pop(name, None)


def _write(name: str, value: str) -> bool:
    for present in (name, _NEWER_NAMES.get(name, name)):
        if present in os.environ:
            if os.environ[present] != value:
                text = f"{present}={os.environ[present]} is set in the environment and wins over the setting's {value}"
                warnings.warn(text, RuntimeWarning, stacklevel=4)
            return False
    os.environ[name] = value
    return True
