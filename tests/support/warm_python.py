"""Runs scripts as ``python script.py`` does, in forks of a process that has imported torch already."""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from runtime_di.testing.ranks import run as ranks
from tests.support.paths import EXAMPLES, ROOT


@dataclass(frozen=True)
class Completed:
    """How a script ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def run_script(
    argv: Sequence[str | Path],
    folder: Path,
    environment: Mapping[str, str] = os.environ,
    timeout_s: float = 100,
    *,
    warnings_are_errors: bool = True,
) -> Completed:
    """Run ``argv``, a Python script and its arguments, in ``folder``.

    Raises:
        TimeoutError: the script still ran after ``timeout_s``; it was killed.
    """
    ranks._start_server()
    with TemporaryDirectory() as output:
        streams = Path(output, "stdout"), Path(output, "stderr")
        call = ([*map(str, argv)], folder, dict(environment), streams, warnings_are_errors)
        process = ranks._CONTEXT.Process(target=_run, args=call)
        process.start()
        process.join(timeout_s)
        if late := process.exitcode is None:
            _kill(process.pid or 0)
            process.join()
        completed = Completed(process.exitcode or 0, *(stream.read_text() for stream in streams))
        process.close()
    if late:
        raise TimeoutError(f"{argv} ran for more than {timeout_s} s:\n{completed.stdout}{completed.stderr}")
    return completed


def _kill(pid: int) -> None:
    """Kill a process and what it started; the ranks of torchrun have sessions of their own."""
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(pid)
        for member in (*family.children(recursive=True), family):
            with suppress(psutil.NoSuchProcess):
                member.kill()


def _run(
    argv: list[str],
    folder: Path,
    environment: Mapping[str, str],
    streams: tuple[Path, Path],
    warnings_are_errors: bool,
) -> None:
    os.setsid()
    for path, stream in zip(streams, (sys.stdout, sys.stderr), strict=True):
        with path.open("wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    own = {str(ROOT), str(EXAMPLES)}  # what pytest adds and a script does not have
    sys.path[:] = [str((folder / argv[0]).parent), *(place for place in sys.path if place not in own)]
    sys.argv = argv
    warnings.resetwarnings()
    if warnings_are_errors:
        warnings.simplefilter("error")
    try:
        runpy.run_path(str(folder / argv[0]), run_name="__main__")
    except SystemExit:
        raise
    except BaseException:  # noqa: BLE001 - printed as Python does, then an exit status
        traceback.print_exc()
        raise SystemExit(1) from None
    finally:
        atexit._run_exitfuncs()
