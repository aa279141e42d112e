"""The writer of a run's metrics."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from runtime_di.errors import ClosedError, SettingsError
from runtime_di.providers.writer.jsonl import BLOCK_BYTES, JsonLinesWriter
from runtime_di.providers.writer.null import NullWriter
from runtime_di.providers.writer.service import open_writer
from runtime_di.providers.writer.settings import WriterSettings
from runtime_di.providers.writer.tensorboard import TensorBoardSettings, TensorBoardWriter
from runtime_di.settings.capabilities import Module, WritableFolder
from runtime_di.settings.launch import LaunchSettings

opened = contextmanager(open_writer)
ALONE = LaunchSettings()


def rank_of(rank: int, world_size: int) -> LaunchSettings:
    return LaunchSettings(rank=rank, world_size=world_size)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def events(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder)).Reload()


def test_json_lines_have_time_step_name_and_value(tmp_path: Path) -> None:
    """Each call appends one JSON object, which another process can read immediately."""
    path = tmp_path / "metrics.jsonl"
    writer = JsonLinesWriter(path, clock=lambda: 12.5)

    writer.settings({"seed": 1, "folder": tmp_path})
    writer.scalar("loss", 0.25, step=3)
    writer.text("sample", "héllo\n", step=4)
    written = path.read_text(encoding="utf-8")
    writer.close()

    assert written == (
        f'{{"time": 12.5, "settings": {{"seed": 1, "folder": "{tmp_path}"}}}}\n'
        '{"time": 12.5, "step": 3, "name": "loss", "value": 0.25}\n'
        '{"time": 12.5, "step": 4, "name": "sample", "text": "h\\u00e9llo\\n"}\n'
    )


def test_diverged_loss_is_valid_json(tmp_path: Path) -> None:
    """NaN and infinities, which JSON lacks, are strings that float() reads, in scalars and in settings."""
    writer = JsonLinesWriter(tmp_path / "metrics.jsonl")

    for value in (math.nan, math.inf, -math.inf):
        writer.scalar("loss", value, step=0)
    writer.settings({"clip": [math.inf]})
    writer.close()

    *scalars, settings = lines(tmp_path / "metrics.jsonl")
    assert [record["value"] for record in scalars] == ["NaN", "Infinity", "-Infinity"]
    assert settings["settings"] == {"clip": ["Infinity"]}
    assert [str(float(record["value"])) for record in scalars] == ["nan", "inf", "-inf"]


@pytest.mark.parametrize(
    ("left", "kept"),
    [
        (b"", b""),
        (b'{"a": 1}\n', b'{"a": 1}\n'),
        (b'{"a": 1}\n{"b": 2', b'{"a": 1}\n'),
        (b'{"torn', b""),
        (b'{"a": 1}\n' + b"x" * 3 * BLOCK_BYTES, b'{"a": 1}\n'),
        (b"{}\n" + b"x" * (BLOCK_BYTES - 1), b"{}\n"),
        (b"{}\n" + b"x" * BLOCK_BYTES, b"{}\n"),
    ],
)
def test_unfinished_line_is_removed(tmp_path: Path, left: bytes, kept: bytes) -> None:
    """A restarted run removes the unfinished last line of a killed one and appends to the rest."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(left)

    writer = JsonLinesWriter(path)
    writer.scalar("loss", 1.0, step=0)
    writer.close()

    written = path.read_bytes()
    assert written.startswith(kept)
    assert json.loads(written[len(kept) :])["value"] == 1.0


@pytest.mark.processes
def test_killed_process_leaves_complete_lines(tmp_path: Path) -> None:
    """The file contains what a process wrote before it was killed, without a flush or a close."""
    program = (
        "import os, pathlib, signal, sys\n"
        "from runtime_di.providers.writer.jsonl import JsonLinesWriter\n"
        "writer = JsonLinesWriter(pathlib.Path(sys.argv[1]))\n"
        "for step in range(1000):\n"
        "    writer.scalar('loss', 1.0, step)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )

    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path / "metrics.jsonl")], check=False)

    assert killed.returncode == -signal.SIGKILL
    assert [record["step"] for record in lines(tmp_path / "metrics.jsonl")] == list(range(1000))


def test_json_lines_of_threads_do_not_mix(tmp_path: Path) -> None:
    """Threads that write at the same time leave complete lines, and none is lost."""
    writer = JsonLinesWriter(tmp_path / "metrics.jsonl")

    def write() -> None:
        for step in range(50):
            writer.text("sample", "x" * 5000, step)

    threads = [threading.Thread(target=write) for _ in range(8)]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()

    assert len(lines(tmp_path / "metrics.jsonl")) == 400


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    """TensorBoard's own reader finds scalars, texts and settings; closing writes what was queued (B10)."""
    settings = WriterSettings(folder=tmp_path, jsonl=None, tensorboard=TensorBoardSettings(flush_interval_s=1000))

    with opened(settings, ALONE, {"seed": 7}) as writer:
        for step in range(3):
            writer.scalar("loss", step / 2, step)
        writer.scalar("norm", math.nan, 0)
        writer.text("sample", "hello", 2)

    read = events(tmp_path)
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert math.isnan(read.Scalars("norm")[0].value)
    assert [event.tensor_proto.string_val for event in read.Tensors("sample")] == [[b"hello"]]
    assert read.Tensors("settings")[0].tensor_proto.string_val == [b'    {\n      "seed": 7\n    }']
    assert read.PluginTagToContent("text").keys() == {"sample", "settings"}


def test_tensorboard_thread_ends_with_the_writer(tmp_path: Path) -> None:
    """Closing ends TensorBoard's writing thread, also when the body failed."""
    settings = WriterSettings(folder=tmp_path, tensorboard=TensorBoardSettings())
    before = threading.active_count()
    opening = open_writer(settings, ALONE, {})

    next(opening)
    during = threading.active_count()
    with pytest.raises(StopIteration):
        opening.send(ValueError("body"))  # type: ignore[attr-defined]

    assert (during, threading.active_count()) == (before + 1, before)


def test_tensorboard_failure_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the writing thread could not write, closing raises its error and still ends the thread."""
    writer = TensorBoardWriter(TensorBoardSettings(), tmp_path)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    broken = OSError("no space left on device")
    writer._open_events._async_writer._worker.exception = broken

    with pytest.raises(OSError, match="no space left") as error:
        writer.close()

    assert error.value is broken
    assert not writer._open_events._async_writer._worker.is_alive()


def error_in_fork(call: Callable[[], None]) -> str:
    """Call in a forked child, and return the error's text."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        try:
            call()
        except ClosedError as error:
            sender.send(str(error))
        finally:
            os._exit(0)
    text = receiver.recv() if receiver.poll(timeout=20) else "nothing"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return str(text)


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("call", ["flush", "scalar"])
def test_tensorboard_refuses_a_forked_process(tmp_path: Path, call: str) -> None:
    """A forked child has no writing thread: its calls raise instead of blocking forever."""
    writer = TensorBoardWriter(TensorBoardSettings(queue_size=1), tmp_path)
    calls = {"flush": writer.flush, "scalar": lambda: writer.scalar("loss", 0.0, 0)}

    error = error_in_fork(calls[call])
    writer.close()

    assert error == (
        "The TensorBoard writer belongs to the parent process:\n"
        "  writer.tensorboard: was opened before this process was forked\n"
        "    fix: open a runtime in this process"
    )


def test_every_backend_is_written(tmp_path: Path) -> None:
    """Every call reaches every backend, in a folder that is created if needed."""
    folder = tmp_path / "runs" / "a"
    settings = WriterSettings(folder=folder, tensorboard=TensorBoardSettings())

    with opened(settings, ALONE, {"seed": 1}) as writer:
        writer.scalar("loss", 0.5, 1)
        writer.text("sample", "hi", 1)
        writer.flush()
        written = lines(folder / "metrics.jsonl")

    assert [set(record) - {"time", "step", "name"} for record in written] == [{"settings"}, {"value"}, {"text"}]
    assert events(folder).Scalars("loss")[0].value == 0.5
    assert set(events(folder).Tags()["tensors"]) == {"settings", "sample"}


def test_failing_close_does_not_keep_others_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one backend cannot be closed, the others are still closed, and its error is raised."""
    closed = []

    def fail(writer: TensorBoardWriter, close: Callable[[TensorBoardWriter], None] = TensorBoardWriter.close) -> None:
        close(writer)
        raise OSError("disk gone")

    monkeypatch.setattr(TensorBoardWriter, "close", fail)
    monkeypatch.setattr(JsonLinesWriter, "close", lambda writer: closed.append(writer._file.close()))
    settings = WriterSettings(folder=tmp_path, tensorboard=TensorBoardSettings())

    with pytest.raises(OSError, match="disk gone"), opened(settings, ALONE, {}):
        pass

    assert closed == [None]


def test_failed_opening_closes_opened_backends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a backend cannot be opened, those opened before it are closed, and the error names the folder and reason."""
    closed = []

    def fail(*_: object) -> None:
        raise OSError("no thread")

    monkeypatch.setattr(TensorBoardWriter, "__init__", fail)
    monkeypatch.setattr(JsonLinesWriter, "close", lambda writer: closed.append(writer._file.close()))
    settings = WriterSettings(folder=tmp_path, tensorboard=TensorBoardSettings())

    with pytest.raises(SettingsError, match=r"writer\.folder = .*: no thread"), opened(settings, ALONE, {}):
        pass

    assert closed == [None]


@pytest.mark.parametrize(
    ("settings", "launch"),
    [
        (WriterSettings(), ALONE),
        (WriterSettings(folder=Path("run"), jsonl=None), ALONE),
        (WriterSettings(folder=Path("run")), rank_of(0, 2)),
        (WriterSettings(folder=Path("run"), rank="first"), rank_of(1, 2)),
        (WriterSettings(folder=Path("run"), rank=1), rank_of(0, 2)),
    ],
)
def test_rank_that_does_not_write_has_a_null_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: WriterSettings, launch: LaunchSettings
) -> None:
    """Without a folder (B40) or backend, or on other ranks (B4), the writer accepts every call and writes nothing."""
    monkeypatch.chdir(tmp_path)

    with opened(settings, launch, {}) as writer:
        writer.scalar("loss", 1.0, 0)
        writer.text("sample", "hi", 0)
        writer.settings({})
        writer.flush()

    assert isinstance(writer, NullWriter)
    assert not settings.writes(launch)
    assert list(settings.requires(launch)) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("rank", "writing"), [("first", 0), ("last", 5), (3, 3), ("3", 3)])
def test_exactly_one_rank_of_the_world_writes(rank: str | int, writing: int) -> None:
    """Exactly one rank of the whole world writes (B3, B48)."""
    settings = WriterSettings.model_validate({"folder": "run", "rank": rank})

    assert [r for r in range(6) if settings.writes(rank_of(r, 6))] == [writing]


def test_rank_outside_the_world_is_refused(tmp_path: Path) -> None:
    """A rank outside the world is an error rather than a run that writes nothing (B3)."""
    settings = WriterSettings(folder=tmp_path, rank=8)

    with pytest.raises(SettingsError) as error, opened(settings, rank_of(0, 8), {}):
        pass

    assert str(error.value) == (
        "The writer cannot be opened:\n"
        "  writer.rank = 8: is not a rank of this world of 8\n"
        "    fix: set it to a rank from 0 to 7, 'first' or 'last'"
    )


def test_only_the_rank_that_writes_has_requirements(tmp_path: Path) -> None:
    """The folder and the package are required only on the rank that writes."""
    settings = WriterSettings(folder=tmp_path, tensorboard=TensorBoardSettings())

    needed = list(settings.requires(rank_of(1, 2)))

    assert needed == [WritableFolder("folder", tmp_path), Module("tensorboard", "tensorboard", extra="tensorboard")]
    assert list(settings.requires(rank_of(0, 2))) == []


def test_file_stays_in_the_folder() -> None:
    """The file of JSON lines is a file name, not a path that leads out of the run folder."""
    with pytest.raises(ValidationError, match="file"):
        WriterSettings.model_validate({"jsonl": {"file": "../metrics.jsonl"}})


@pytest.mark.processes
def test_writers_import_no_torch(tmp_path: Path) -> None:
    """TensorBoard events are written without importing torch."""
    program = (
        "import pathlib, sys\n"
        "from runtime_di.providers.writer.tensorboard import TensorBoardSettings, TensorBoardWriter\n"
        "assert 'tensorboard' not in sys.modules\n"
        "writer = TensorBoardWriter(TensorBoardSettings(), pathlib.Path(sys.argv[1]))\n"
        "writer.scalar('loss', 1.0, 0)\n"
        "writer.text('sample', 'hi', 0)\n"
        "writer.close()\n"
        "assert 'torch' not in sys.modules\n"
    )

    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)

    assert events(tmp_path).Scalars("loss")[0].value == 1.0
