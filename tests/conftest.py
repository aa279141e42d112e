"""Fixtures of the whole suite."""

from __future__ import annotations

import multiprocessing.process
import os
import subprocess

import hypothesis
import pytest

from runtime_di.settings.launch import LAUNCH_VARIABLES
from runtime_di.settings.layers import ENV_PREFIX

os.environ.pop("PYTHONUNBUFFERED", None)  # most shells do not set it: no test may rely on it
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # torch's stores look up the names of connecting hosts

hypothesis.settings.register_profile("suite", deadline=None)  # a busy machine must not fail a test
hypothesis.settings.load_profile("suite")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees launch variables or settings of the shell that runs the suite."""
    for name in list(os.environ):
        if name in LAUNCH_VARIABLES.values() or name.startswith(ENV_PREFIX):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def no_process_unless_marked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test starts processes only if it is marked so: `make test-fast` runs those that are not."""
    if request.node.get_closest_marker("processes"):
        return

    def refuse(*_args: object, **_kwargs: object) -> None:
        pytest.fail("this test starts a process: mark it with @pytest.mark.processes")

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
    monkeypatch.setattr(os, "fork", refuse)
