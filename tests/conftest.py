"""Fixtures of the whole suite."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from runtime_di.launch import LAUNCH_VARIABLES
from runtime_di.sources import ENV_PREFIX


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test sees launch variables or settings of the shell that runs the suite."""
    for name in list(os.environ):
        if name in LAUNCH_VARIABLES.values() or name.startswith(ENV_PREFIX):
            monkeypatch.delenv(name)
    yield
