"""The code and commands in the documents, run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.warm_python import run_script

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def snippets(document: Path) -> list[tuple[str, str]]:
    """File name and content of every Python snippet; one that is a file of several says so in its first line."""
    found = re.findall(r"^```python\n(?:# (\w+\.py)\n)?(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)
    return [
        (name or f"{'test' if 'def test_' in code else 'entry'}_{place}.py", code)
        for place, (name, code) in enumerate(found)
    ]


def written(document: Path, folder: Path) -> list[Path]:
    paths = []
    for name, code in snippets(document):
        paths.append(folder / name)
        paths[-1].write_text(code)
    return paths


def run(command: Sequence[str | Path], folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", *command], cwd=folder, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.processes
@pytest.mark.parametrize(
    ("document", "name"),
    [
        pytest.param(document, name, id=f"{document.name}-{name}")
        for document in DOCUMENTS
        for name, code in snippets(document)
        if "def test_" not in code
    ],
)
def test_python_snippet_runs(document: Path, name: str, tmp_path: Path) -> None:
    """Every Python snippet of the documents runs as a script."""
    written(document, tmp_path)

    if document.name == "README.md":  # in a new interpreter, as a user's first script is
        run([name], tmp_path)
    else:
        done = run_script([name], tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.processes
@pytest.mark.parametrize(
    "document",
    [
        pytest.param(document, id=document.name)
        for document in DOCUMENTS
        if any("def test_" in code for _, code in snippets(document))
    ],
)
def test_tests_in_a_document_pass(document: Path, tmp_path: Path) -> None:
    """Tests in a document are run by pytest, warnings as errors."""
    paths = written(document, tmp_path)

    tests = [path for path in paths if path.name.startswith("test_")]
    run(["-m", "pytest", "-q", "-W", "error", "-p", "no:randomly", "-p", "no:cacheprovider", *tests], tmp_path)


@pytest.mark.processes
def test_error_message_of_the_readme_is_printed(tmp_path: Path) -> None:
    """The README's first entrypoint reports a wrong parallel size with the README's message."""
    readme = (ROOT / "README.md").read_text()
    script = tmp_path / "entry.py"
    script.write_text(re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)[0])
    (expected,) = re.findall(r"^```text\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)

    done = subprocess.run(
        [sys.executable, str(script), "--parallel.tensor", "3"],
        env={**os.environ, "RANK": "0", "WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.returncode, done.stderr) == (2, expected)


@pytest.mark.processes
def test_commands_of_the_readme_work() -> None:
    """runtime-di plan, check and explain do what the README says."""

    def answer(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from runtime_di.cli.commands import main; main()", *argv]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    plan, mermaid = answer("plan", "training"), answer("plan", "training", "--mermaid")
    check, wrong = answer("check", "training"), answer("check", "training", "--parallel.tensor", "2")
    explain, unknown = answer("explain", "training", "rng.seed", "--rng.seed", "7"), answer("plan", "trainin")

    assert plan.stdout.startswith("TOKENIZER\n  tokenizer <- settings.tokenizer\nVOCABULARY\n")
    assert mermaid.stdout.startswith("flowchart TD\n  subgraph TOKENIZER\n")
    assert check.stdout == "TrainingRuntime can start here.\n"
    assert (wrong.returncode, "does not divide the world size 1" in wrong.stderr) == (2, True)
    assert explain.stdout == "rng.seed = 7 (from command line --rng.seed)\n"
    assert (unknown.returncode, "name one of" in unknown.stderr) == (2, True)
