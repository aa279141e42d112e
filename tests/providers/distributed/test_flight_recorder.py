"""The variables of torch's flight recorder."""

from __future__ import annotations

import os
from contextlib import suppress

import pytest

from runtime_di.providers.distributed.flight_recorder import flight_recorder

SIZE, DUMP = "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (SIZE, DUMP, "TORCH_FR_BUFFER_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_variables_are_set_within_and_removed_after() -> None:
    """The setting becomes torch's variables while the world is open, and they are unset after the body fails too."""
    seen = []
    with suppress(KeyError), flight_recorder(2000):
        seen += [os.environ[SIZE], os.environ[DUMP]]
        raise KeyError

    assert seen == ["2000", "1"]
    assert SIZE not in os.environ
    assert DUMP not in os.environ


def test_no_setting_leaves_variables_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a setting, torch's variables stay as the user set them."""
    monkeypatch.setenv(SIZE, "7")

    with flight_recorder(None):
        assert os.environ[SIZE] == "7"
        assert DUMP not in os.environ


@pytest.mark.parametrize("name", [SIZE, "TORCH_FR_BUFFER_SIZE"])
def test_a_variable_of_the_user_wins(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable with another value, under its older or its newer name, stays, with a warning."""
    monkeypatch.setenv(name, "7")

    text = f"{name}=7 is set in the environment and wins over the setting's 2000"
    with pytest.warns(RuntimeWarning, match=text), flight_recorder(2000):
        during = os.environ[name]

    assert during == os.environ[name] == "7"
