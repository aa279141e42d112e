"""Deferred SIGTERM and SIGINT, on the ranks that follow a tensor-parallel leader."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def defer_signals() -> Iterator[None]:
    """Raise SIGTERM and SIGINT only after the block: the leader receives them too, and ends the block on every rank."""
    received: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: the handler was not set from Python
    if received:
        signal.raise_signal(received[0])
