"""Settings of checkpoints."""

from __future__ import annotations

import pytest

from runtime_di.providers.checkpoint.format.snapshot import (
    ReadableCheckpoint,
)
from runtime_di.providers.checkpoint.settings import CheckpointSettings
from runtime_di.settings.capabilities import WritableFolder
from runtime_di.settings.launch import LaunchSettings


def test_load_settings_without_load_is_refused():
    """load_settings without load is a contradiction."""
    with pytest.raises(ValueError, match="set load as well, or unset load_settings"):
        CheckpointSettings(load_settings=True)


def test_requirements_are_a_writable_folder_and_a_checkpoint(tmp_path):
    """The folder must be writable on every rank, and the checkpoint must exist unless the folder contains one."""
    settings = CheckpointSettings(folder=tmp_path / "run", load=tmp_path / "base")

    required = list(settings.requires(LaunchSettings(rank=1, world_size=2)))

    assert required == [
        WritableFolder("folder", tmp_path / "run"),
        ReadableCheckpoint("load", tmp_path / "base", unless=tmp_path / "run"),
    ]
