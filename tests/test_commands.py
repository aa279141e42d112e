"""The commands that the documents show, run as they are written, on a checkpoint that takes a second to make."""

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
from pathlib import Path
from typing import IO

import psutil
import pytest

from asking import ask, until_accepted
from tiny_checkpoint import Tiny, make_tiny

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TIMEOUT_S = 90
MODEL = json.dumps({"num_layers": 1, "width": 32, "context_length": 32})
SMALLER = {
    "entry.py": {},
    "serve.py": {"RUNTIME_DI_SAMPLING__MAX_TOKENS": "3"},
    "convert_checkpoint.py": {},
    "train_rl.py": {"RUNTIME_DI_LEARN__STEPS": "2", "RUNTIME_DI_MODEL": MODEL},
    "train_mimo.py": {"RUNTIME_DI_LEARN__STEPS": "2", "RUNTIME_DI_MODEL": MODEL},
}
"""Script to what makes it quick."""
FROM_CHECKPOINT = "vocabulary of 512 tokens (from checkpoint runs/gpt/checkpoints/step-00000002)"
TOLD = {
    "entry.py": ["5 tokens, 512 embedding rows"],
    "serve.py": ["def main("],
    "convert_checkpoint.py": ["runs/gpt/checkpoints/step-00000002 -> runs/gpt-"],
    "train_rl.py": [FROM_CHECKPOINT, "mean reward 0.", "in step 2"],
    "train_mimo.py": [FROM_CHECKPOINT, "in step 2"],
}
"""Script to what it prints and logs."""


def commands() -> Iterator[str]:
    """The lines of the documents' shell blocks that start a script; each once."""
    text = "".join(document.read_text() for document in DOCUMENTS)
    blocks = "".join(re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    for line in dict.fromkeys(re.sub(r" +# .*", "", line) for line in blocks.splitlines()):
        if script_of(line):
            yield line


def script_of(line: str) -> str:
    """The name of the script that a line starts, or nothing."""
    return next((Path(word).name for word in shlex.split(line) if word.endswith(".py")), "")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny"), num_tokens=512)  # rows that two tensor-parallel ranks can share


@pytest.fixture
def folder(tiny: Tiny, tmp_path: Path) -> Path:
    """Where a user would be who has run `make train`, with the first script of the README."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "runs" / "gpt").mkdir(parents=True)
    (tmp_path / "runs" / "corpus").symlink_to(tiny.corpus)
    (tmp_path / "runs" / "gpt" / "checkpoints").symlink_to(tiny.checkpoints)
    (entry,) = re.findall(r"^## An entrypoint\n.*?^```python\n(.*?)^```", DOCUMENTS[0].read_text(), re.M | re.S)
    (tmp_path / "entry.py").write_text(entry)
    return tmp_path


@contextmanager
def started(
    line: str, folder: Path, stdin: int | IO[str] = subprocess.DEVNULL, **more: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a line in a session of its own; whatever of it still runs at the end is killed."""
    binaries = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    rest = {"OMP_NUM_THREADS": "1", "PET_STANDALONE": "1", "RUNTIME_DI_DEVICE__KIND": "cpu"}
    with (folder / "told").open("w") as told:
        process = subprocess.Popen(
            ["env", *shlex.split(line)],  # which takes the variables before a command as a shell does
            cwd=folder,
            env={**os.environ, **rest, "PATH": binaries, **SMALLER[script_of(line)], **more},
            stdin=stdin,
            stdout=told,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    except subprocess.TimeoutExpired as late:
        late.add_note((folder / "told").read_text())
        raise
    finally:
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(process.pid)
            for member in (*family.children(recursive=True), family):  # torchrun's ranks have sessions of their own
                with suppress(psutil.NoSuchProcess):
                    member.kill()
        process.wait()


@pytest.mark.parametrize("line", [pytest.param(line, id=line[-60:]) for line in commands() if "--http" not in line])
def test_command_does_what_the_documents_say(line: str, folder: Path) -> None:
    """A command of the documents works as it stands, from the folders that `make train` leaves."""
    with started(line, folder) as process:
        process.wait(TIMEOUT_S)

    told = (folder / "told").read_text()
    assert process.returncode == 0, told
    assert [text for text in TOLD[script_of(line)] if text not in told] == []


@pytest.mark.timeout(240)
def test_endpoint_answers_and_ends_cleanly(folder: Path) -> None:
    """Health, answers and mistakes over HTTP; at SIGTERM what is in flight is answered before the process ends."""
    (line,) = [line for line in commands() if "--http" in line]
    with started(line, folder, RUNTIME_DI_HTTP__PORT="0") as process, ThreadPoolExecutor(12) as pool:
        (url,) = told_by(process, folder / "told", r"serving at (http://\S+)")
        health = ask(f"{url}/health")
        answer = ask(f"{url}/generate", {"prompt": "import os"})
        wrong = [ask(f"{url}/generate", body)[0] for body in (b"{", [1], {}, {"prompt": "a", "temperature": -1})]
        full = ask(f"{url}/generate", {"prompt": "import os" * 99})
        asked = [pool.submit(ask, f"{url}/generate", {"prompt": "x", "max_tokens": 25}) for _ in range(12)]
        until_accepted(url, asked)
        process.send_signal(signal.SIGTERM)
        statuses = [future.result()[0] for future in asked]
        status = process.wait(TIMEOUT_S)

    assert health == (200, {"status": "ok", "running": 0, "waiting": 0})
    assert (answer[0], answer[1]["num_tokens"]) == (200, 3)
    assert wrong == [422] * 4
    assert full[1] == {"error": full[1]["error"]}
    assert "a sequence at most 32" in full[1]["error"]
    assert statuses == [200] * 12
    assert status == 128 + signal.SIGTERM


def test_a_signal_ends_the_prompts_cleanly(folder: Path) -> None:
    """At SIGTERM the prompts that wait are dropped, and the process ends with its status and no error."""
    (folder / "prompts").write_text("def f(\n" * 10_000)
    more = {"RUNTIME_DI_SAMPLING__MAX_TOKENS": "25"}
    with (
        (folder / "prompts").open() as prompts,
        started("python examples/serve.py", folder, prompts, **more) as process,
    ):
        told_by(process, folder / "told", "answering 10000 prompts\n")
        process.send_signal(signal.SIGTERM)
        status = process.wait(TIMEOUT_S)

    assert status == 128 + signal.SIGTERM
    assert (folder / "told").read_text().endswith("answering 10000 prompts\n")


def told_by(process: subprocess.Popen[bytes], log: Path, pattern: str) -> tuple[str, ...]:
    """What a process logs, once it does: the groups of a pattern."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(pattern, log.read_text()):
            return found.groups()
        time.sleep(0.05)
    raise TimeoutError(log.read_text())
