"""Probes of process resources: threads, descriptors, child processes, files and open runtimes."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import sys
import termios
import threading
import weakref
from array import array
from collections.abc import Hashable, Iterator
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

from runtime_di.lifecycle import build as lifecycle
from runtime_di.lifecycle import overrides
from runtime_di.testing.leaks.state import Observation, Probe

_THREADS_OF_LIBRARIES = ("execnet", "pytest_timeout", "torch._inductor", "tqdm._monitor", "xdist")
"""Modules whose threads run until the process ends."""


def override_scopes() -> Iterator[tuple[Hashable, Observation]]:
    """Override scopes that are still active."""
    for scope in overrides.open_scopes():
        yield id(scope), Observation("", f"of {', '.join(scope.overrides)} in {scope.runtime.__name__} has not ended")


def open_runtimes() -> Iterator[tuple[Hashable, Observation]]:
    """Runtimes that are open."""
    for opened in list(lifecycle._open_lifecycles):
        yield (
            weakref.ref(opened),
            Observation("", f"{opened.plan.name} was not closed; built: {', '.join(opened.built)}"),
        )


def threads() -> Iterator[tuple[Hashable, Observation]]:
    """Python threads, except those of libraries."""
    for thread in threading.enumerate():
        target = getattr(thread, "_target", None) or type(thread)
        runs = f"{getattr(target, '__module__', '?')}.{getattr(target, '__qualname__', '?')}"
        if not isinstance(thread, threading._DummyThread) and not runs.startswith(_THREADS_OF_LIBRARIES):
            yield weakref.ref(thread), Observation("", f"'{thread.name}' of {runs} still runs")


def descriptors() -> Iterator[tuple[Hashable, Observation]]:
    """Open files, pipes and sockets, except those of multiprocessing's helper processes and of libuv."""
    helpers = {getattr(forkserver._forkserver, "_forkserver_alive_fd", None), resource_tracker._resource_tracker._fd}  # type: ignore[attr-defined]
    folder = Path("/proc/self/fd" if sys.platform == "linux" else "/dev/fd")
    for name in os.listdir(folder):
        with suppress(OSError):  # the descriptor of the listing itself is closed by now
            target = os.readlink(folder / name) if sys.platform == "linux" else str(os.fstat(int(name)).st_ino)
            expected = int(name) in helpers or (target.startswith("pipe:") and _is_of_libuv(int(name)))
            yield (name, target), Observation("", "" if expected else f"{name} ({target}) is still open")


def _is_of_libuv(pipe: int) -> bool:
    """Whether the event loop of torch's stores created this pipe; it does so once per process.

    Such a pipe either wakes the loop and is non-blocking, or is the loop's lock and has one unread byte.
    """
    unread = array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, unread)
    return unread[0] == 1 or not os.get_blocking(pipe)


def child_processes() -> Iterator[tuple[Hashable, Observation]]:
    """Processes that this one started, except the helpers of multiprocessing."""
    helpers = {getattr(forkserver._forkserver, "_forkserver_pid", None), resource_tracker._resource_tracker._pid}  # type: ignore[attr-defined]
    known = {process.pid for process in multiprocessing.active_children()}  # reaps those that have ended
    with suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):
                known |= {int(pid) for pid in (task / "children").read_text().split()}
    for pid in known - helpers:
        command = ""
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        yield pid, Observation("", f"{pid} ({command[:80] or 'ended, but not reaped'}) is still there")


def files(*folders: Path) -> Iterator[tuple[Hashable, Observation]]:
    """Files and folders, except hidden folders and compiled modules."""
    for root in folders:
        for place, names, file_names in os.walk(root):
            names[:] = [name for name in names if not name.startswith(".") and name != "__pycache__"]
            for name in names:
                yield str(Path(place, name)), Observation("", "there")
            for name in file_names:
                with suppress(OSError):
                    status = Path(place, name).stat()
                    yield (
                        str(Path(place, name)),
                        Observation((status.st_size, status.st_mtime_ns), f"{status.st_size} bytes"),
                    )


RESOURCES: dict[str, Probe] = {
    "override scope": override_scopes,
    "runtime": open_runtimes,
    "thread": threads,
    "file descriptor": descriptors,
    "child process": child_processes,
}
"""Kinds of state of which nothing may be added."""
