"""Settings of checkpoints: which one to load, and where and how often to save."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Self

from pydantic import PositiveInt, model_validator

from runtime_di.providers.checkpoint.format.snapshot import ReadableCheckpoint, find_checkpoint, latest_complete
from runtime_di.settings.capabilities import Requirement, WritableFolder
from runtime_di.settings.launch import LaunchSettings
from runtime_di.settings.marks import Mark
from runtime_di.settings.section import Section


class LoadSettings(Section):
    """Which checkpoint to load."""

    load: Annotated[Path | None, Mark.NOT_PORTABLE] = None
    """A checkpoint, or a folder of checkpoints, to start from."""
    load_settings: Annotated[bool, Mark.NOT_PORTABLE] = False
    """Whether to take portable settings that no other source sets from the checkpoint named by ``load``."""

    @property
    def start(self) -> Path | None:
        """The checkpoint that the run starts from, as this machine sees the disk now."""
        return self.load and find_checkpoint(self.load)

    def requires(self, launch: LaunchSettings) -> Iterable[Requirement]:
        if self.load is not None:
            yield ReadableCheckpoint("load", self.load)

    @model_validator(mode="after")
    def _settings_come_from_a_checkpoint(self) -> Self:
        if self.load_settings and self.load is None:
            raise ValueError(
                "load_settings reads the checkpoint named by load: set load as well, or unset load_settings"
            )
        return self


class CheckpointSettings(LoadSettings):
    """Where to save and load checkpoints; a checkpoint in ``folder`` takes precedence over ``load``."""

    folder: Annotated[Path | None, Mark.NOT_PORTABLE] = None
    """Folder in which this run saves, and from which it resumes when started again; if unset, nothing is saved."""
    every: Annotated[PositiveInt, Mark.NOT_PORTABLE] = 1000
    """Steps from one save to the next."""
    keep: Annotated[PositiveInt | None, Mark.NOT_PORTABLE] = None
    """How many of the latest checkpoints to keep in ``folder``; all of them if unset."""

    @property
    def start(self) -> Path | None:
        resumed = self.folder and latest_complete(self.folder)
        return resumed or super().start

    def requires(self, launch: LaunchSettings) -> Iterable[Requirement]:
        if self.folder is not None:
            yield WritableFolder("folder", self.folder)
        if self.load is not None:
            yield ReadableCheckpoint("load", self.load, unless=self.folder)
