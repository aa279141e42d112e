"""One leak for every kind of process state that the watch checks."""

from __future__ import annotations

import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import warnings
from typing import Any

from runtime_di import Phase, Runtime, RuntimeContainer, RuntimeSettings, service

kept: list[Any] = []
released = threading.Event()


def keep(value: Any) -> Any:
    kept.append(value)
    return value


def uploads() -> None:
    released.wait(60)


class OtherContainer(RuntimeContainer):
    other = service(Phase.RUNTIME, lambda: 1)


class OtherRuntime(Runtime, container=OtherContainer):
    settings: RuntimeSettings
    other: Any


def enter_scope() -> None:
    keep(OtherRuntime.overriding(other=2)).__enter__()


def use_torch(change: str) -> None:
    import torch

    if change == "deterministic":
        torch.use_deterministic_algorithms(True, warn_only=True)
    elif change == "dtype":
        torch.set_default_dtype(torch.float64)
    elif change == "gradients":
        torch.set_grad_enabled(False)
    else:
        torch.set_default_device("meta")


def join_world() -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)


def handle(_signum: int, _frame: Any) -> None: ...


LEAKS = {
    "environment": (lambda: os.environ.update(LEAKED="secret"), "environment: LEAKED is set, and was not there"),
    "signal handler": (lambda: signal.signal(signal.SIGUSR2, handle), "signal handler: SIGUSR2 is <function handle"),
    "working directory": (lambda: os.chdir("/"), "interpreter: working directory is '/' instead of"),
    "import path": (lambda: sys.path.append("/nowhere"), "interpreter: sys.path is ["),
    "warnings": (lambda: warnings.simplefilter("ignore", ImportWarning), "interpreter: warnings.filters is [('ignore'"),
    "level": (lambda: logging.getLogger().setLevel(5), "logging: level of logger root is 5 instead of 30"),
    "handler": (
        lambda: logging.getLogger("runtime_di.x").addHandler(logging.NullHandler()),
        "logging: handlers of logger runtime_di.x is [<NullHandler (NOTSET)>], and was not there",
    ),
    "thread": (
        lambda: keep(threading.Thread(target=uploads, name="uploader", daemon=True)).start(),
        "thread: 'uploader' of tests.support.process_leaks.uploads still runs",
    ),
    "file": (lambda: kept.append(os.fdopen(os.open("/etc/hostname", os.O_RDONLY))), "(/etc/hostname) is still open"),
    "socket": (lambda: kept.append(socket.socket()), "file descriptor: "),
    "child process": (
        lambda: kept.append(subprocess.Popen(["sleep", "60"])),
        "(sleep 60) is still there",
    ),
    "runtime": (
        lambda: keep(OtherRuntime.open()).start(),
        "runtime: OtherRuntime was not closed; built: other",
    ),
    "override scope": (enter_scope, "override scope: of other in OtherRuntime has not ended"),
    "random state": (lambda: random.seed(7), "random state: that of random was not restored on close"),
    "deterministic algorithms": (
        lambda: use_torch("deterministic"),
        "torch: deterministic algorithms is True instead of False",
    ),
    "gradients": (lambda: use_torch("gradients"), "torch: gradients is False instead of True"),
    "default dtype": (
        lambda: use_torch("dtype"),
        "torch: default dtype is 'torch.float64' instead of 'torch.float32'",
    ),
    "world": (join_world, "torch.distributed: initialised is True instead of False"),
    "default device": (lambda: use_torch("device"), "torch: default device is 'meta' instead of 'cpu'"),
}
"""Kind of leak to a function that leaks, and the report of the watch."""
