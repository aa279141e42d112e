"""Checkpoints of a run: saved by all ranks together, complete or not there at all, loaded at any parallel size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from pydantic import PositiveInt
from pydantic_core import to_jsonable_python

from runtime_di.capabilities import WritableFolder
from runtime_di.providers.checkpoint_loader import CheckpointLoader, LoadSettings
from runtime_di.providers.snapshot import ReadableCheckpoint, Snapshot, latest_complete, layout_of
from runtime_di.section import Mark

if TYPE_CHECKING:
    from runtime_di.capabilities import Requirement
    from runtime_di.launch import LaunchSettings
    from runtime_di.providers.process_groups import ProcessGroups
    from runtime_di.providers.rank_grid import RankGrid
    from runtime_di.providers.vocabulary import Vocabulary


class CheckpointSettings(LoadSettings):
    """Where checkpoints are written and read; those in ``folder`` come before the one in ``load``."""

    folder: Annotated[Path | None, Mark.NOT_PORTABLE] = None
    """Where this run saves, and resumes from when it is started again; nothing is saved without one."""
    every: Annotated[PositiveInt, Mark.NOT_PORTABLE] = 1000
    """Steps from one save to the next."""
    keep: Annotated[PositiveInt | None, Mark.NOT_PORTABLE] = None
    """How many of the latest checkpoints stay in ``folder``; all of them if unset."""

    @property
    def start(self) -> Path | None:
        resumed = self.folder and latest_complete(self.folder)
        return resumed or super().start

    def requires(self, launch: LaunchSettings) -> Iterable[Requirement]:
        if self.folder is not None:
            yield WritableFolder("folder", self.folder)
        if self.load is not None:
            yield ReadableCheckpoint("load", self.load, unless=self.folder)


class Checkpointer(CheckpointLoader, Protocol):
    """Saves and loads a state, of what a `CheckpointLoader` says; of a tensor that is no DTensor one copy is kept."""

    def due(self, step: int, last: int | None = None) -> bool:
        """Whether a checkpoint is to be saved at the end of ``step``, the ``last`` one included.

        Never without a folder to save in.
        """
        ...

    def save(self, state: Mapping[str, Any], step: int) -> Path:
        """Save ``state``; collective. The step last saved or resumed from is not saved again.

        Raises:
            CheckpointError: on every rank, if one of them could not save its part; earlier checkpoints stay.
        """
        ...


def open_checkpointer(
    settings: CheckpointSettings,
    process_groups: ProcessGroups,
    vocabulary: Vocabulary | None,
    snapshot: Mapping[str, Any],
    grids: Mapping[str, RankGrid] = MappingProxyType({}),
) -> Checkpointer:
    """Make the checkpointer of this run; nothing is read or written yet.

    Args:
        settings: where, and how often.
        process_groups: the ranks that save and load together.
        vocabulary: told in every checkpoint, so that a later run can size its embedding without a tokenizer.
        snapshot: this run's portable settings, told in every checkpoint as they are now.
        grids: what divides the world, if anything does; a rank's part in the run is its place on them.
    """
    from runtime_di.providers.checkpoint_ranks import Ranks
    from runtime_di.providers.folder_checkpointer import FolderCheckpointer

    origin = Snapshot(
        step=0,
        settings=to_jsonable_python(snapshot),
        vocabulary=to_jsonable_python(vocabulary),
        **layout_of(process_groups.grid, grids),
    )
    return FolderCheckpointer(settings, Ranks(process_groups.rank, process_groups.world_size), origin)
