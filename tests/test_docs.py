"""What the documents show, run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SNIPPETS = [
    pytest.param(code, id=f"{path.name}-{number}")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL))
]


@pytest.mark.parametrize("code", SNIPPETS)
def test_python_snippet_runs(code: str, tmp_path: Path) -> None:
    """Every Python snippet of the documents runs as a script."""
    script = tmp_path / "entry.py"
    script.write_text(code)

    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr


def test_mistake_of_the_readme_is_told_so(tmp_path: Path) -> None:
    """The README's first entrypoint tells a wrong parallel size as the README shows it."""
    readme = (ROOT / "README.md").read_text()
    script = tmp_path / "entry.py"
    script.write_text(re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)[0])
    (shown,) = re.findall(r"^```text\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)

    done = subprocess.run(
        [sys.executable, str(script), "--parallel.tensor", "3"],
        env={**os.environ, "RANK": "0", "WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.returncode, done.stderr) == (2, shown)


def test_commands_of_the_readme_answer() -> None:
    """runtime-di plan, check and explain do what the README says."""

    def answer(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from runtime_di.cli import main; main()", *argv]
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
