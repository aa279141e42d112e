"""Polling with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable


def poll(done: Callable[[], bool], timeout_s: float, world_size: int = 1) -> bool:
    """Call ``done`` until it returns true; return whether it did so before the deadline.

    The pause between calls grows, up to a limit that rises with the world size, so that one store can answer every
    rank. The blocking waits of torch's stores are not used: they delay signals, and they write to standard error when
    they time out.
    """
    deadline, pause_s = time.monotonic() + timeout_s, 0.001
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.05 + world_size / 20_000)
    return True
