"""Signals to stop that wait until it is time, on ranks that follow another one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Hold signals to stop back until the block ends: the leader has them too, and says when to go."""
    came: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)  # none where it was not Python that set it
    if came:
        signal.raise_signal(came[0])
