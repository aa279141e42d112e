"""Opens the checkpointer of a run, or the checkpoint loader of a process that saves nothing."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

from pydantic_core import to_jsonable_python

from runtime_di.providers.checkpoint.format.snapshot import Snapshot, layout_of
from runtime_di.providers.checkpoint.protocols import Checkpointer, CheckpointLoader
from runtime_di.providers.checkpoint.settings import CheckpointSettings, LoadSettings
from runtime_di.providers.process_groups.rank_grid import RankGrid
from runtime_di.providers.process_groups.service import ProcessGroups


class VocabularySizes(Protocol):
    """The vocabulary that a checkpoint records: a dataclass, whose fields all go into the snapshot."""

    @property
    def size(self) -> int: ...

    @property
    def padded_size(self) -> int: ...

    @property
    def tensor_parallel(self) -> int: ...


def open_checkpoint_loader(
    settings: LoadSettings, process_groups: ProcessGroups, vocabulary: VocabularySizes | None = None
) -> CheckpointLoader:
    """Create the loader of this run; nothing is read yet.

    Args:
        settings: the checkpoint to load.
        process_groups: the ranks that load together.
        vocabulary: sizes for the error about rows that were padded for another tensor-parallel size.
    """
    from runtime_di.providers.checkpoint.loader import FolderLoader
    from runtime_di.providers.checkpoint.rank_sync import RankSync

    own = Snapshot(step=0, settings={}, vocabulary=to_jsonable_python(vocabulary), **layout_of(process_groups.grid, {}))
    return FolderLoader(settings, RankSync(process_groups.rank, process_groups.world_size), own)


def open_checkpointer(
    settings: CheckpointSettings,
    process_groups: ProcessGroups,
    vocabulary: VocabularySizes | None,
    snapshot: Mapping[str, Any],
    grids: Mapping[str, RankGrid] = MappingProxyType({}),
) -> Checkpointer:
    """Create the checkpointer of this run; nothing is read or written yet.

    Args:
        settings: where and how often to save.
        process_groups: the ranks that save and load together.
        vocabulary: recorded in every checkpoint, so that a later run can size its embedding without a tokenizer.
        snapshot: this run's portable settings, recorded in every checkpoint as they are now.
        grids: name to each grid that divides the world; recorded as part of the parallel layout.
    """
    from runtime_di.providers.checkpoint.checkpointer import FolderCheckpointer
    from runtime_di.providers.checkpoint.rank_sync import RankSync

    origin = Snapshot(
        step=0,
        settings=to_jsonable_python(snapshot),
        vocabulary=to_jsonable_python(vocabulary),
        **layout_of(process_groups.grid, grids),
    )
    return FolderCheckpointer(settings, RankSync(process_groups.rank, process_groups.world_size), origin)
