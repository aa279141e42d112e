"""The main function, from the command line to an exit status, in real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from runtime_di import Runtime

PROGRAM = """
import os, signal, sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from runtime_di import *

class WriterSettings(Section):
    folder: Path = Path("out")
    depth: int = 1
    package: str | None = None
    def requires(self, launch: LaunchSettings) -> Iterable[Requirement]:
        yield WritableFolder("folder", self.folder)
        if self.package:
            yield Module("package", self.package, "sentencepiece")

class JobSettings(RuntimeSettings):
    writer: WriterSettings = WriterSettings()

def open_writer(settings: WriterSettings) -> Iterator[str]:
    settings.folder.mkdir()
    failure = yield "writer"
    print("teardown", repr(failure), flush=True)
    settings.folder.rmdir()

class JobContainer(RuntimeContainer):
    writer = service(Phase.RUNTIME, open_writer, RuntimeContainer.settings.provided.writer)

class JobRuntime(Runtime, container=JobContainer):
    settings: JobSettings
    writer: str

def body(runtime: JobRuntime) -> None:
    runtime.writer
    print("body", flush=True)
    {body}

JobRuntime.main(body)
print("never reached")
"""


def start(folder: Path, body: str, *flags: str, **environment: str) -> subprocess.Popen[str]:
    """Start the program in ``folder`` with this line in its body."""
    folder.mkdir(exist_ok=True)
    script = folder.parent / f"{folder.name}.py"
    script.write_text(PROGRAM.replace("{body}", textwrap.indent(textwrap.dedent(body), "    ").strip()))
    return subprocess.Popen(
        [sys.executable, str(script), *flags],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder: Path, body: str, *flags: str, **environment: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of the program."""
    process = start(folder, body, *flags, **environment)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.mark.processes
def test_good_run_exits_with_0(tmp_path: Path) -> None:
    """The body runs in an opened runtime, which is closed; nothing is printed on standard error."""
    result = run(tmp_path / "run", "assert runtime.settings.writer.depth == 3", "--writer.depth", "3")

    assert result == (0, "body\nteardown None\n", "")
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.processes
def test_failing_body_exits_with_1_and_its_traceback(tmp_path: Path) -> None:
    """An error that is not a settings error is printed with a traceback, after the teardown."""
    status, out, err = run(tmp_path / "run", "raise ValueError('loss')")

    assert (status, out) == (1, "body\nteardown ValueError('loss')\n")
    assert err.startswith("Traceback (most recent call last):\n")
    assert err.endswith("ValueError: loss\n")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--writer.depth", "many"),
            "JobSettings cannot be used: 1 problem.\n"
            "  writer.depth = many (from command line --writer.depth): input should be a valid integer, "
            "unable to parse string as an integer\n",
        ),
        (
            ("--writer.folder", "/dev/null/out"),
            "This machine lacks what JobRuntime needs with these settings.\n"
            "  writer.folder = /dev/null/out (from command line --writer.folder): "
            "cannot create the folder /dev/null/out: /dev/null is not a folder\n    fix: set another path\n",
        ),
        (
            ("--writer.dept", "1"),
            "The command line of JobSettings is wrong.\n"
            "  --writer.dept: unknown flag\n    fix: did you mean --writer.depth?\n",
        ),
    ],
)
def test_mistakes_exit_with_2_without_a_traceback_and_create_nothing(
    tmp_path: Path, flags: tuple[str, str], message: str
) -> None:
    """Errors in settings, command line and machine are printed, and leave nothing on disk."""
    status, out, err = run(tmp_path / "run", "pass", *flags)

    assert (status, out, err) == (2, "", message)
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.processes
@pytest.mark.parametrize(
    ("signum", "status", "failure"),
    [(signal.SIGINT, 130, "KeyboardInterrupt()"), (signal.SIGTERM, 143, "Stopped(143)")],
)
def test_signal_runs_the_teardown_and_exits_with_128_more(
    tmp_path: Path, signum: signal.Signals, status: int, failure: str
) -> None:
    """A stopped run executes its teardown, which receives the reason."""
    process = start(tmp_path / "run", "signal.pause()")
    assert process.stdout is not None
    assert process.stdout.readline() == "body\n"

    process.send_signal(signum)
    out, err = process.communicate(timeout=60)

    assert (process.returncode, out, err) == (status, f"teardown {failure}\n", "")


@pytest.mark.processes
def test_exit_status_of_the_body_passes(tmp_path: Path) -> None:
    """sys.exit(n) in the body is the program's status, after the teardown."""
    assert run(tmp_path / "run", "sys.exit(7)") == (7, "body\nteardown SystemExit(7)\n", "")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("body", "flags", "status", "message"),
    [
        ("raise ValueError('loss')", (), 1, "ValueError: loss"),
        ("pass", ("--writer.depth", "many"), 2, "SettingsError: JobSettings cannot be used: 1 problem.\n"),
    ],
)
def test_launcher_gets_the_error_in_its_file(
    tmp_path: Path, body: str, flags: tuple[str, ...], status: int, message: str
) -> None:
    """Under torchrun the error file has torchelastic's form, and standard error names the rank."""
    file = tmp_path / "error.json"
    launch = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}

    result = run(tmp_path / "run", body, *flags, **launch, TORCHELASTIC_ERROR_FILE=str(file))

    written = json.loads(file.read_text())["message"]
    assert result[0] == status
    assert written["message"].startswith(message)
    assert message.splitlines()[0] in written["extraInfo"]["py_callstack"]
    assert int(written["extraInfo"]["timestamp"]) > 0
    assert all(line.startswith("[rank 1] ") for line in result[2].splitlines())
    assert [path.name for path in tmp_path.glob("error*")] == ["error.json"]


@pytest.mark.processes
def test_handler_of_the_caller_is_restored(tmp_path: Path) -> None:
    """main() in a longer program restores the SIGTERM handler on any exit."""
    script = PROGRAM.replace("{body}", "assert signal.getsignal(signal.SIGTERM) is not mine").replace(
        "JobRuntime.main(body)",
        "mine = lambda *_: None\nsignal.signal(signal.SIGTERM, mine)\n"
        "try:\n    JobRuntime.main(body, [])\nexcept SystemExit as end:\n"
        "    print(end.code, signal.getsignal(signal.SIGTERM) is mine)",
    )

    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)

    assert done.stdout == "body\nteardown None\n0 True\nnever reached\n"


def test_off_the_main_thread_one_warning_says_that_signals_are_not_handled(caplog: pytest.LogCaptureFixture) -> None:
    """In another thread, main runs as usual and warns once that it handles no signal."""
    left: list[object] = []

    def run() -> None:
        try:
            Runtime.main(lambda runtime: left.append(runtime.built), [])
        except SystemExit as status:
            left.append(status.code)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

    assert left == [(), 0]
    assert [record.getMessage() for record in caplog.records] == [
        "SIGTERM is not handled: Python handles signals only in the main thread"
    ]
