"""How a rank waits for others, and what it says of those that do not come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from runtime_di.errors import Problem, ServiceError


def poll(done: Callable[[], bool], timeout_s: float, world_size: int = 1) -> bool:
    """Ask until it is so, ever less often and so that a store can answer every rank; tell whether it came to be.

    A wait inside torch's stores would hold back signals, and write to standard error each time it ends.
    """
    deadline, pause_s = time.monotonic() + timeout_s, 0.001
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.05 + world_size / 20_000)
    return True


def absent(what: str, timeout_s: float, setting: str = "startup_timeout_s") -> ServiceError:
    """Make the error of ranks that did not come in time."""
    fix = f"see why those ranks are late or gone, or raise distributed.{setting}"
    return ServiceError(
        "Ranks did not meet:", [Problem("process_groups", f"{what} within {round(timeout_s, 2):g} s", fix=fix)]
    )


@contextmanager
def connecting(what: str) -> Iterator[None]:
    """Say of an error of torch's ``what`` came of it, and that other ranks may be the reason."""
    import torch

    try:
        yield
    except (NotImplementedError, torch.OutOfMemoryError):
        raise  # which other ranks have no part in
    except RuntimeError as error:
        told = f"{what}: {type(error).__name__}: {error}"
        fix = "see why one of these ranks is late or gone, and whether they reach each other"
        raise ServiceError("Ranks did not connect:", [Problem("process_groups", told, fix=fix)]) from error
