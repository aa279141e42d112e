"""The main function of an entrypoint: from the command line to an exit status."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Protocol, Self, TypeVar

from runtime_di.errors import CapabilityError, ProblemsError, ServiceError, SettingsError, VocabularyError
from runtime_di.settings import sources

_log = logging.getLogger("runtime_di")


class OpenedRuntime(Protocol):
    """A runtime that its ``with`` block closes."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None, /
    ) -> None: ...


R = TypeVar("R", bound=OpenedRuntime)

STATUS_FAILED = 1
STATUS_REFUSED = 2


class Stopped(SystemExit):
    """Raised when a signal stops this process, so that every teardown runs."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum


def run_main(open_runtime: Callable[[], R], body: Callable[[R], object]) -> NoReturn:
    """Open a runtime, run ``body`` in it and exit; see `Runtime.main`."""
    with _stopping_on(signal.SIGTERM):
        try:
            with open_runtime() as opened:
                body(opened)
        except KeyboardInterrupt:
            _leave(128 + signal.SIGINT)
        except Stopped as stopped:
            _leave(128 + stopped.signum)
        except (SettingsError, CapabilityError, VocabularyError) as error:
            _report(error, str(error))
            _leave(STATUS_REFUSED)
        except Exception as error:  # noqa: BLE001 - the outermost frame reports it and exits
            explains_itself = isinstance(error, ProblemsError) and not isinstance(error, ServiceError)
            _report(error, str(error) if explains_itself else traceback.format_exc())
            _leave(STATUS_FAILED)
    _leave(0)


def _leave(status: int) -> NoReturn:
    raise SystemExit(status)


@contextmanager
def _stopping_on(signum: signal.Signals) -> Iterator[None]:
    """Raise `Stopped` when the signal arrives during the block; the previous handler is restored afterwards."""
    if threading.current_thread() is not threading.main_thread():
        _log.warning("%s is not handled: Python handles signals only in the main thread", signum.name)
        yield
        return

    def stop(number: int, _frame: FrameType | None) -> None:
        raise Stopped(number)

    previous = signal.signal(signum, stop)
    try:
        yield
    finally:
        signal.signal(signum, previous or signal.SIG_DFL)


def _report(error: BaseException, text: str) -> None:
    launch: dict[str, Any] = dict(sources.launch_layer().values.get("launch", {}))
    prefix = f"[rank {launch['rank']}] " if launch.get("world_size", "1") != "1" and "rank" in launch else ""
    sys.stderr.write("".join(f"{prefix}{line}\n" for line in text.splitlines()))
    if "error_file" in launch:
        _write_error_file(Path(launch["error_file"]), error, text)


def _write_error_file(path: Path, error: BaseException, text: str) -> None:
    """Write the error for torchelastic's agent, in the format of torchelastic's ``record`` decorator."""
    summary = f"{type(error).__name__}: {error}"
    extra = {"py_callstack": summary if text == str(error) else text, "timestamp": str(int(time.time()))}
    message = {"message": summary, "extraInfo": extra}
    partial = path.with_suffix(".partial")
    try:
        partial.write_text(json.dumps({"message": message}))
        os.replace(partial, path)
    except OSError as failed:
        sys.stderr.write(f"could not write the launcher's error file {path}: {failed}\n")
