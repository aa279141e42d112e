"""The process of one rank that `run_ranks` starts."""
# ruff: noqa: S301 the pickles come from run_ranks itself

from __future__ import annotations

import faulthandler
import fcntl
import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO, TextIOWrapper
from textwrap import indent
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

STACKS_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2)
"""The signal on which a rank writes the stacks of its threads; one that programs rarely handle themselves."""
OWN_STACK = re.compile(rf'  File "{re.escape(__file__)}", .*\n(  File .*\n)*')
"""The frames below the rank's function in faulthandler's output."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a rank ended: a pickled result, or a failure as text with the pickled exception, if there is one."""

    result: bytes = b""
    failure: str = ""
    exception: bytes = b""


def run_rank(base: Path, environment: Mapping[str, str], call: bytes) -> None:
    """Run a pickled call and write files at ``base`` with the suffixes .out, .err, .stacks and, last, .outcome."""
    os.setsid()
    _die_with_caller()
    _redirect(base)
    os.environ.clear()
    os.environ.update(environment)
    outcome = pickle.dumps(_outcome(call))
    partial = base.with_suffix(".partial")
    partial.write_bytes(outcome)
    partial.rename(base.with_suffix(".outcome"))


def _die_with_caller() -> None:
    """Have this process and its children killed when the caller dies, which closes the pipe between the two."""
    caller = multiprocessing.parent_process()
    assert caller is not None, "run_rank is the target of a process"  # noqa: S101
    if sys.platform == "linux":  # done by the kernel, so it works while this process is busy
        fcntl.fcntl(caller.sentinel, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(caller.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(caller.sentinel, fcntl.F_SETFL, fcntl.fcntl(caller.sentinel, fcntl.F_GETFL) | os.O_ASYNC)
        if not caller.is_alive():
            os.killpg(0, signal.SIGKILL)
    else:
        threading.Thread(target=lambda: (caller.join(), os.killpg(0, signal.SIGKILL)), daemon=True).start()


def _redirect(base: Path) -> None:
    """Write output, and stacks on a signal, to files: files survive a kill and never block."""
    for suffix, stream in ((".out", sys.stdout), (".err", sys.stderr)):
        with base.with_suffix(suffix).open("wb") as file:
            os.dup2(file.fileno(), stream.fileno())
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    # write-through, so that os._exit() loses no output; Python would buffer an unfinished line
    sys.stderr = TextIOWrapper(FileIO(sys.stderr.fileno(), "w", closefd=False), errors="replace", write_through=True)
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, base.with_suffix(".stacks").open("w"))


def _outcome(call: bytes) -> Outcome:
    try:
        function, args = pickle.loads(call)
        return Outcome(result=pickle.dumps(function(*args)))
    except BaseException as error:  # noqa: BLE001 every exception is reported to the caller
        own_frame = error.__traceback__
        text = "".join(traceback.format_exception(error.with_traceback(own_frame and own_frame.tb_next)))
        return Outcome(
            failure=f"raised {type(error).__name__}:\n{indent(text.rstrip(), '  ')}", exception=_pickled(error)
        )


def _pickled(error: BaseException) -> bytes:
    """Pickle an exception if it can also be unpickled; empty otherwise."""
    with suppress(Exception):
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
        return pickled
    return b""
