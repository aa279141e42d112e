"""Fixtures of the whole suite."""

from __future__ import annotations

import os

import hypothesis
import pytest

from runtime_di.launch import LAUNCH_VARIABLES
from runtime_di.sources import ENV_PREFIX

os.environ.pop("PYTHONUNBUFFERED", None)  # most shells do not set it, and what relies on it fails there
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # torch's stores ask for the name of who connects

hypothesis.settings.register_profile("suite", deadline=None)  # a busy machine is no fault
hypothesis.settings.load_profile("suite")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees launch variables or settings of the shell that runs the suite."""
    for name in list(os.environ):
        if name in LAUNCH_VARIABLES.values() or name.startswith(ENV_PREFIX):
            monkeypatch.delenv(name)
