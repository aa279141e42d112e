"""The settings of an entrypoint: frozen, validated, copied and pickled."""

from __future__ import annotations

import pickle

import pytest

from runtime_di import SettingsError
from tests.support.job_settings import JobSettings, SizeSettings, error_of


def test_rule_that_reads_an_invalid_field_is_not_reported() -> None:
    """A rule is silent where one of the values it reads is invalid by itself."""
    message = error_of(["--launch.world_size", "0", "--sizes.tensor", "3"])

    assert "launch.world_size = 0" in message
    assert "does not divide" not in message


def test_settings_are_frozen_and_forbid_unknown_names() -> None:
    """No field can be assigned, and unknown fields are refused."""
    settings = JobSettings()

    with pytest.raises(ValueError, match="frozen"):
        settings.seed = 2
    with pytest.raises(SettingsError, match=r"sizes.tensr = 2 \(from constructor\): unknown setting"):
        JobSettings(sizes={"tensr": 2})


def test_copies_are_validated() -> None:
    """model_copy refuses what the constructor refuses, in settings and in sections."""
    settings = JobSettings(seed=5)

    with pytest.raises(SettingsError, match="greater than 0"):
        settings.model_copy(update={"seed": 0})
    with pytest.raises(ValueError, match="greater than 0"):
        settings.sizes.model_copy(update={"tensor": 0})
    assert settings.model_copy(update={"node": "x"}).seed == 5


def test_unvalidated_settings_are_refused() -> None:
    """B34, B87: validating again changes nothing, and finds values that model_construct accepted."""
    settings = JobSettings(seed=5)

    assert settings.revalidated() is settings
    with pytest.raises(SettingsError, match="seed = -1"):
        JobSettings.model_construct(**{**dict(settings), "seed": -1}).revalidated()
    raw = JobSettings.model_construct(**{**dict(settings), "sizes": {"tensor": 1}})
    assert raw.revalidated().sizes == SizeSettings()


def test_settings_travel_between_processes() -> None:
    """Settings pickle with their provenance."""
    settings = JobSettings.load(["--seed", "6"])

    copy = pickle.loads(pickle.dumps(settings))

    assert copy == settings
    assert copy.explain("seed").source == "command line --seed"
