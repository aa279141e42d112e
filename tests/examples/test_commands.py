"""The shell commands in the documents, run as written, on a checkpoint of a two-step training run."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import IO

import psutil
import pytest

from tests.support.checkpoints.tiny import TinyCheckpoint, train_tiny_checkpoint
from tests.support.http_client import request_json, wait_until_accepted
from tests.support.paths import ROOT
from tests.support.warm_python import run_script

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TIMEOUT_S = 90
BINARIES = Path(sys.executable).parent
MODEL = json.dumps({"num_layers": 1, "width": 32, "context_length": 32})
SMALLER = {
    "entry.py": {},
    "serve.py": {"RUNTIME_DI_SAMPLING__MAX_TOKENS": "3"},
    "convert_checkpoint.py": {},
    "train_rl.py": {"RUNTIME_DI_LEARN__STEPS": "2", "RUNTIME_DI_MODEL": MODEL},
    "train_mimo.py": {"RUNTIME_DI_LEARN__STEPS": "2", "RUNTIME_DI_MODEL": MODEL},
}
"""Environment variables of each script that shorten its run."""
FROM_CHECKPOINT = "vocabulary of 512 tokens (from checkpoint runs/gpt/checkpoints/step-00000002)"
EXPECTED_OUTPUT = {
    "entry.py": ["5 tokens, 512 embedding rows"],
    "serve.py": ["def main("],
    "convert_checkpoint.py": ["runs/gpt/checkpoints/step-00000002 -> runs/gpt-"],
    "train_rl.py": [FROM_CHECKPOINT, "mean reward 0.", "in step 2"],
    "train_mimo.py": [FROM_CHECKPOINT, "in step 2"],
}
"""Texts that each script prints or logs."""


def commands() -> Iterator[str]:
    """Lines of the documents' shell blocks that start a script, without duplicates."""
    text = "".join(document.read_text() for document in DOCUMENTS)
    blocks = "".join(re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    for line in dict.fromkeys(re.sub(r" +# .*", "", line) for line in blocks.splitlines()):
        if script_of(line):
            yield line


def script_of(line: str) -> str:
    """Name of the script that a line starts; empty if it starts none."""
    return next((Path(word).name for word in shlex.split(line) if word.endswith(".py")), "")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return train_tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"), num_tokens=512
    )  # rows that two tensor-parallel ranks can share


@pytest.fixture
def folder(tiny: TinyCheckpoint, tmp_path: Path) -> Path:
    """A folder as `make train` leaves it, with the README's first script as entry.py."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "runs" / "gpt").mkdir(parents=True)
    (tmp_path / "runs" / "corpus").symlink_to(tiny.corpus)
    (tmp_path / "runs" / "gpt" / "checkpoints").symlink_to(tiny.checkpoints)
    (entry,) = re.findall(r"^## An entrypoint\n.*?^```python\n(.*?)^```", DOCUMENTS[0].read_text(), re.M | re.S)
    (tmp_path / "entry.py").write_text(entry)
    return tmp_path


def environment_of(line: str) -> dict[str, str]:
    """The environment in which a line runs, with what shortens its script."""
    rest = {"OMP_NUM_THREADS": "1", "PET_STANDALONE": "1", "RUNTIME_DI_DEVICE__KIND": "cpu"}
    return {**os.environ, **rest, "PATH": f"{BINARIES}{os.pathsep}{os.environ['PATH']}", **SMALLER[script_of(line)]}


@contextmanager
def started(
    line: str, folder: Path, stdin: int | IO[str] = subprocess.DEVNULL, **more: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a line in its own session; at the end, kill the processes of it that still run."""
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            ["env", *shlex.split(line)],  # env sets the variables before a command as a shell does
            cwd=folder,
            env=environment_of(line) | more,
            stdin=stdin,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    except subprocess.TimeoutExpired as error:
        error.add_note((folder / "output").read_text())
        raise
    finally:
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(process.pid)
            for member in (*family.children(recursive=True), family):  # torchrun's ranks have sessions of their own
                with suppress(psutil.NoSuchProcess):
                    member.kill()
        process.wait()


@pytest.mark.processes
@pytest.mark.parametrize("line", [pytest.param(line, id=line[-60:]) for line in commands() if "--http" not in line])
def test_documented_command_works(line: str, folder: Path) -> None:
    """A command of the documents works as written, in a folder that `make train` leaves."""
    words = shlex.split(line)
    variables = dict(word.split("=", 1) for word in takewhile(lambda word: "=" in word, words))
    command, *flags = words[len(variables) :]
    argv = flags if command == "python" else [BINARIES / command, *flags]

    done = run_script(argv, folder, environment_of(line) | variables, TIMEOUT_S, warnings_are_errors=False)

    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert [text for text in EXPECTED_OUTPUT[script_of(line)] if text not in output] == []


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_endpoint_answers_requests_and_shuts_down(folder: Path) -> None:
    """The endpoint serves health, answers and errors; after SIGTERM it first answers the requests in flight."""
    (line,) = [line for line in commands() if "--http" in line]
    with started(line, folder, RUNTIME_DI_HTTP__PORT="0") as process, ThreadPoolExecutor(12) as pool:
        (url,) = wait_for_log(process, folder / "output", r"serving at (http://\S+)")
        health = request_json(f"{url}/health")
        answer = request_json(f"{url}/generate", {"prompt": "import os"})
        wrong = [
            request_json(f"{url}/generate", body)[0] for body in (b"{", [1], {}, {"prompt": "a", "temperature": -1})
        ]
        too_long = request_json(f"{url}/generate", {"prompt": "import os" * 99})
        futures = [pool.submit(request_json, f"{url}/generate", {"prompt": "x", "max_tokens": 25}) for _ in range(12)]
        wait_until_accepted(url, futures)
        process.send_signal(signal.SIGTERM)
        statuses = [future.result()[0] for future in futures]
        status = process.wait(TIMEOUT_S)

    assert health == (200, {"status": "ok", "running": 0, "queued": 0})
    assert (answer[0], answer[1]["num_tokens"]) == (200, 3)
    assert wrong == [422] * 4
    assert too_long[1] == {"error": too_long[1]["error"]}
    assert "a sequence at most 32" in too_long[1]["error"]
    assert statuses == [200] * 12
    assert status == 128 + signal.SIGTERM


@pytest.mark.processes
def test_sigterm_drops_the_queued_prompts(folder: Path) -> None:
    """After SIGTERM the queued prompts are dropped, and the process ends with status 143 and without an error."""
    (folder / "prompts").write_text("def f(\n" * 10_000)
    more = {"RUNTIME_DI_SAMPLING__MAX_TOKENS": "25"}
    with (
        (folder / "prompts").open() as prompts,
        started("python examples/serve.py", folder, prompts, **more) as process,
    ):
        wait_for_log(process, folder / "output", "answering 10000 prompts\n")
        process.send_signal(signal.SIGTERM)
        status = process.wait(TIMEOUT_S)

    assert status == 128 + signal.SIGTERM
    assert (folder / "output").read_text().endswith("answering 10000 prompts\n")


def wait_for_log(process: subprocess.Popen[bytes], log: Path, pattern: str) -> tuple[str, ...]:
    """Wait until a process has logged a pattern, and return the groups of the match."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(pattern, log.read_text()):
            return found.groups()
        time.sleep(0.05)
    raise TimeoutError(log.read_text())
