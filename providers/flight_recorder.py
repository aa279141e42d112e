"""The variables that switch on torch's flight recorder, which tells what each rank last did before a hang."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_NEWER_NAMES = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE"}


@contextmanager
def flight_recorder(entries: int | None) -> Iterator[None]:
    """Record the last collectives, and dump them on a timeout, in groups made within; torch reads it from variables.

    Args:
        entries: collectives that are kept; ``None`` leaves the variables alone. A variable that is already set to
            something else wins, with a warning.
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
                told = f"{present}={os.environ[present]} is set in the environment and wins over the setting's {value}"
                warnings.warn(told, RuntimeWarning, stacklevel=4)
            return False
    os.environ[name] = value
    return True
