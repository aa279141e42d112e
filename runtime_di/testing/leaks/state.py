"""Probes of process-wide state in comparable form; libraries that are not imported are skipped."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import random
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

Key = tuple[str, Hashable]
"""A kind of state and an item of that kind."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One piece of state.

    Attributes:
        value: the value to compare.
        text: the value as text; a resource with an empty text is never reported.
    """

    value: Hashable
    text: str


Probe = Callable[[], Iterable[tuple[Hashable, Observation]]]


_SET_BY_IMPORTS = ("TORCHINDUCTOR_", "TRITON_")
"""Prefixes of the variables that torch sets once, when its compiler is imported."""


def _plain(values: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Observation]]:
    for name, value in values:
        yield name, Observation(repr(value), repr(value))


def environment() -> Iterator[tuple[Hashable, Observation]]:
    """Environment variables, by name without their values, which may be secrets."""
    for name, value in os.environ.items():
        if name != "PYTEST_CURRENT_TEST" and not name.startswith(_SET_BY_IMPORTS):
            yield name, Observation(value, "set")


def signal_handlers() -> Iterator[tuple[Hashable, Observation]]:
    """The handler of every signal that has a name."""
    return _plain((signal.Signals(number).name, signal.getsignal(number)) for number in _signals())


def _signals() -> list[int]:
    return [number for number in signal.valid_signals() if number in set(signal.Signals)]


def interpreter() -> Iterator[tuple[Hashable, Observation]]:
    """Process-wide state of Python itself."""
    yield from _plain(
        {
            "working directory": _working_directory(),
            "sys.path": sys.path,
            "sys.excepthook": _exception_hook(),
            "threading.excepthook": threading.excepthook,
            "recursion limit": sys.getrecursionlimit(),
            "switch interval": sys.getswitchinterval(),
            "garbage collection": gc.isenabled(),
            "start method of multiprocessing": _start_method(),
            "timeout of sockets": socket.getdefaulttimeout(),
            "warnings.filters": _blanket_filters(),
        }.items()
    )


def _working_directory() -> str | None:
    with suppress(FileNotFoundError):
        return os.getcwd()
    return None


def _exception_hook() -> object:
    """The exception hook, except torch's: torch installs it with a world and never removes it, which is harmless."""
    ours = "_distributed_excepthook" not in getattr(sys.excepthook, "__qualname__", "")
    return sys.excepthook if ours else sys.__excepthook__


def _blanket_filters() -> list[tuple[str, str]]:
    """The filters of built-in warnings without text or module; imported libraries add narrower ones."""
    return [
        (action, str(category))
        for action, message, category, module, _ in warnings.filters
        if message is None and module is None and category.__module__ == "builtins"
    ]


def _start_method() -> str:
    """The start method, or the default if none is set: the first use of multiprocessing sets the default."""
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def loggers() -> Iterator[tuple[Hashable, Observation]]:
    """The root logger and those of runtime-di; other libraries configure theirs on import."""
    own = [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "runtime_di"]
    default = {"level": 0, "propagate": True, "disabled": False, "handlers": [], "filters": []}
    for name in ("root", *own):
        logger = logging.getLogger(None if name == "root" else name)
        for what, usual in default.items():
            value = getattr(logger, what)
            if what == "handlers":
                value = [handler for handler in value if not type(handler).__module__.startswith("_pytest")]
            if value != usual or name == "root":
                yield f"{what} of logger {name}", Observation(repr(value), repr(value))
    yield "logging.disable", Observation(logging.root.manager.disable, repr(logging.root.manager.disable))


def torch_flags() -> Iterator[tuple[Hashable, Observation]]:
    """Torch's global switches, or their defaults if torch is not imported."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        yield from _plain(_TORCH_FLAGS.items())
    elif hasattr(torch, "backends"):
        yield from _plain((name, read(torch)) for name, read in _READ_TORCH_FLAGS.items())
        yield from _plain([("threads", torch.get_num_threads())])


_READ_TORCH_FLAGS: dict[str, Callable[[Any], Any]] = {
    "deterministic algorithms": lambda torch: torch.are_deterministic_algorithms_enabled(),
    "deterministic algorithms only warn": lambda torch: torch.is_deterministic_algorithms_warn_only_enabled(),
    "cudnn.benchmark": lambda torch: torch.backends.cudnn.benchmark,
    "cudnn.deterministic": lambda torch: torch.backends.cudnn.deterministic,
    "default dtype": lambda torch: str(torch.get_default_dtype()),
    "default device": lambda torch: str(torch.get_default_device()),
    "gradients": lambda torch: torch.is_grad_enabled(),
    "anomaly detection": lambda torch: torch.is_anomaly_enabled(),
    "precision of float32 products": lambda torch: torch.get_float32_matmul_precision(),
}
_TORCH_FLAGS = {
    **dict.fromkeys(_READ_TORCH_FLAGS, False),
    "default dtype": "torch.float32",
    "default device": "cpu",
    "gradients": True,
    "precision of float32 products": "highest",
}


def distributed() -> Iterator[tuple[Hashable, Observation]]:
    """Whether torch.distributed is initialised, and the sizes of its group registries."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    yield from _plain({"initialised": bool(c10d and c10d.is_initialized())}.items())
    for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg"):
        registry = getattr(getattr(c10d, "_world", None), name, ())
        yield from _plain([(f"entries of {name}", len(registry))])


def random_states() -> dict[str, Hashable]:
    """Name of a global random generator to its state."""
    states: dict[str, Hashable] = {"random": random.getstate()}
    if "numpy.random" in sys.modules:
        _, words, *rest = sys.modules["numpy.random"].get_state()
        states["numpy.random"] = (words.tobytes(), *rest)
    if hasattr(sys.modules.get("torch"), "get_rng_state"):
        states["torch"] = sys.modules["torch"].get_rng_state().numpy().tobytes()
    return states


VALUES: dict[str, Probe] = {
    "environment": environment,
    "signal handler": signal_handlers,
    "interpreter": interpreter,
    "logging": loggers,
    "torch": torch_flags,
    "torch.distributed": distributed,
}
"""Kinds of state that must be unchanged."""
