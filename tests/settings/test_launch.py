"""Rank and world of this process, from the launcher's variables."""

from __future__ import annotations

import pytest

from runtime_di import LaunchSettings
from tests.support.job_settings import JobSettings, error_of


def test_constructor_reads_the_launcher_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The constructor takes rank and world from the launcher, and no variable of ours."""
    monkeypatch.setenv("RUNTIME_DI_SEED", "77")
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)

    settings = JobSettings()

    assert (settings.seed, settings.launch.rank, settings.launch.world_size) == (1234, 3, 4)
    assert settings.explain("launch.rank").source == "environment RANK"


def test_launch_settings_of_the_caller_override_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """LaunchSettings passed by the caller replace the launcher's variables."""
    monkeypatch.setenv("WORLD_SIZE", "4")

    assert JobSettings(launch=LaunchSettings(rank=2, world_size=8)).launch.rank == 2


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2"}, "launch.rank: WORLD_SIZE is set, but RANK is not"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "launch.rank = 2 (from environment RANK): rank 2 must be below the world"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "launch.rank = one (from environment RANK): input should be a valid"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"},
            "launch.local_rank = 1 (from environment LOCAL_RANK): local rank 1 must be below",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "4"},
            "launch.local_world_size = 4 (from environment LOCAL_WORLD_SIZE): local world size 4 must not be above",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "0"},
            "launch.master_port = 0 (from environment MASTER_PORT): 2 ranks cannot rendezvous on port 0",
        ),
    ],
)
def test_contradictory_launch_variables_are_reported(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B3: launch variables that contradict each other are a SettingsError that names them."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert message in error_of([])
