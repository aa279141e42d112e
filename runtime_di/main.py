"""The main of an entrypoint: from the command line to an exit status."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from runtime_di import sources
from runtime_di.errors import CapabilityError, ProblemsError, ServiceError, SettingsError, VocabularyError

if TYPE_CHECKING:
    from runtime_di.runtime import Runtime

_log = logging.getLogger("runtime_di")

R = TypeVar("R", bound="Runtime")

STATUS_FAILED = 1
STATUS_REFUSED = 2


class Stopped(SystemExit):
    """A signal asked this process to stop; it leaves through every teardown."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum


def run_main(runtime: type[R], body: Callable[[R], object], argv: Sequence[str] | None) -> NoReturn:
    """Run ``body`` in an opened ``runtime`` and exit; see `Runtime.main`."""
    with _stopping_on(signal.SIGTERM):
        try:
            with runtime.open(runtime.settings_class().load(argv)) as opened:
                body(opened)
        except KeyboardInterrupt:
            _leave(128 + signal.SIGINT)
        except Stopped as stopped:
            _leave(128 + stopped.signum)
        except (SettingsError, CapabilityError, VocabularyError) as error:
            _tell(error, str(error))
            _leave(STATUS_REFUSED)
        except Exception as error:  # noqa: BLE001 - the outermost frame: told, then an exit status
            mendable = isinstance(error, ProblemsError) and not isinstance(error, ServiceError)
            _tell(error, str(error) if mendable else traceback.format_exc())
            _leave(STATUS_FAILED)
    _leave(0)


def _leave(status: int) -> NoReturn:
    raise SystemExit(status)


@contextmanager
def _stopping_on(signum: signal.Signals) -> Iterator[None]:
    """Turn a signal into an exception while the block runs; a handler that was there is put back."""
    if threading.current_thread() is not threading.main_thread():
        _log.warning("%s is not handled: Python lets the main thread alone handle signals", signum.name)
        yield
        return

    def stop(number: int, _frame: FrameType | None) -> None:
        raise Stopped(number)

    previous = signal.signal(signum, stop)
    try:
        yield
    finally:
        signal.signal(signum, previous or signal.SIG_DFL)


def _tell(error: BaseException, text: str) -> None:
    launch: dict[str, Any] = dict(sources.launch_layer().values.get("launch", {}))
    prefix = f"[rank {launch['rank']}] " if launch.get("world_size", "1") != "1" and "rank" in launch else ""
    sys.stderr.write("".join(f"{prefix}{line}\n" for line in text.splitlines()))
    if "error_file" in launch:
        _write_error_file(Path(launch["error_file"]), error, text)


def _write_error_file(path: Path, error: BaseException, text: str) -> None:
    """Tell torchelastic's agent why this process ends, in the form that its own ``record`` writes."""
    told = f"{type(error).__name__}: {error}"
    extra = {"py_callstack": told if text == str(error) else text, "timestamp": str(int(time.time()))}
    message = {"message": told, "extraInfo": extra}
    partial = path.with_suffix(".partial")
    try:
        partial.write_text(json.dumps({"message": message}))
        os.replace(partial, path)
    except OSError as failed:
        sys.stderr.write(f"could not write the launcher's error file {path}: {failed}\n")
