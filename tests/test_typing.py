"""Type checkers see a runtime's services and settings in user code."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

CHECKERS = {
    "mypy": ["-m", "mypy", "--strict"],
    "pyright": ["-m", "pyright", "--pythonpath", sys.executable],
}


def run_checker(checker: str, file: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *CHECKERS[checker], f"tests/typing/{file}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("checker", CHECKERS)
def test_user_code_is_inferred(checker: str) -> None:
    """runtime.tokenizer, runtime.settings and a user's own service have their annotated types."""
    done = run_checker(checker, "user_code.py")

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("checker", CHECKERS)
def test_mistakes_in_user_code_are_reported(checker: str) -> None:
    """A misspelt member, a misspelt setting and an assignment to a service are errors, and nothing else is."""
    source = (ROOT / "tests/typing/wrong_user_code.py").read_text().splitlines()
    wrong = {number for number, line in enumerate(source, 1) if line.endswith("# wrong")}

    done = run_checker(checker, "wrong_user_code.py")

    reported = {int(number) for number in re.findall(r"wrong_user_code\.py:(\d+):.*error", done.stdout)}
    assert reported == wrong, done.stdout + done.stderr
