"""What the code of a process may have left running or open, in comparable form."""

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

from runtime_di import lifecycle, overrides
from runtime_di.testing.process_state import Probe, Seen

_THREADS_OF_LIBRARIES = ("execnet", "pytest_timeout", "torch._inductor", "tqdm._monitor", "xdist")
"""Modules whose threads run until the process ends, by design."""


def override_scopes() -> Iterator[tuple[Hashable, Seen]]:
    """Scopes that the next opening would be in."""
    for scope in overrides.open_scopes():
        yield id(scope), Seen("", f"of {', '.join(scope.overrides)} in {scope.runtime.__name__} has not ended")


def open_runtimes() -> Iterator[tuple[Hashable, Seen]]:
    """Runtimes that were opened and not closed."""
    for opened in list(lifecycle._alive):
        yield weakref.ref(opened), Seen("", f"{opened.plan.name} was not closed; built: {', '.join(opened.built)}")


def threads() -> Iterator[tuple[Hashable, Seen]]:
    """Python's threads, but for those that libraries keep."""
    for thread in threading.enumerate():
        target = getattr(thread, "_target", None) or type(thread)
        runs = f"{getattr(target, '__module__', '?')}.{getattr(target, '__qualname__', '?')}"
        if not isinstance(thread, threading._DummyThread) and not runs.startswith(_THREADS_OF_LIBRARIES):
            yield weakref.ref(thread), Seen("", f"'{thread.name}' of {runs} still runs")


def descriptors() -> Iterator[tuple[Hashable, Seen]]:
    """Open files, pipes and sockets, but for those of the helper processes of multiprocessing, and of libuv."""
    helpers = {getattr(forkserver._forkserver, "_forkserver_alive_fd", None), resource_tracker._resource_tracker._fd}  # type: ignore[attr-defined]
    folder = Path("/proc/self/fd" if sys.platform == "linux" else "/dev/fd")
    for name in os.listdir(folder):
        with suppress(OSError):  # that of the listing is closed by now
            target = os.readlink(folder / name) if sys.platform == "linux" else str(os.fstat(int(name)).st_ino)
            expected = int(name) in helpers or (target.startswith("pipe:") and _is_of_libuv(int(name)))
            yield (name, target), Seen("", "" if expected else f"{name} ({target}) is still open")


def _is_of_libuv(pipe: int) -> bool:
    """Whether a pipe is one that the event loop of torch's stores makes once, for as long as the process runs.

    Those wake it, and never block, or are its lock, which is one unread byte.
    """
    unread = array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, unread)
    return unread[0] == 1 or not os.get_blocking(pipe)


def child_processes() -> Iterator[tuple[Hashable, Seen]]:
    """Processes that this one started, but for the helpers of multiprocessing."""
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
        yield pid, Seen("", f"{pid} ({command[:80] or 'ended, and not waited for'}) is still there")


def files(*folders: Path) -> Iterator[tuple[Hashable, Seen]]:
    """Files and folders, but for hidden folders and compiled modules."""
    for root in folders:
        for place, names, file_names in os.walk(root):
            names[:] = [name for name in names if not name.startswith(".") and name != "__pycache__"]
            for name in names:
                yield str(Path(place, name)), Seen("", "there")
            for name in file_names:
                with suppress(OSError):
                    status = Path(place, name).stat()
                    yield (
                        str(Path(place, name)),
                        Seen((status.st_size, status.st_mtime_ns), f"{status.st_size} bytes"),
                    )


RESOURCES: dict[str, Probe] = {
    "override scope": override_scopes,
    "runtime": open_runtimes,
    "thread": threads,
    "file descriptor": descriptors,
    "child process": child_processes,
}
"""State of which there is to be no more than there was."""
