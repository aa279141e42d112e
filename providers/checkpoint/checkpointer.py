"""Saves checkpoints to a file system that all ranks share; imports torch, so it is imported when opened."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save

from runtime_di.errors import Problem
from runtime_di.providers.checkpoint.format import folder as checkpoint_folder
from runtime_di.providers.checkpoint.format.snapshot import CheckpointError, Snapshot, folder_name
from runtime_di.providers.checkpoint.format.storage import TensorWriter
from runtime_di.providers.checkpoint.format.values import write_values
from runtime_di.providers.checkpoint.loader import FolderLoader
from runtime_di.providers.checkpoint.state import Leaves

if TYPE_CHECKING:
    from runtime_di.providers.checkpoint.rank_sync import RankSync
    from runtime_di.providers.checkpoint.settings import CheckpointSettings

_NOT_SAVED = "The checkpoint was not saved; earlier ones are unchanged."
_LOG = logging.getLogger(__name__)


class FolderCheckpointer(FolderLoader):
    """A `Checkpointer`: every rank writes its own files, rank 0 alone creates, renames and deletes folders."""

    def __init__(self, settings: CheckpointSettings, sync: RankSync, origin: Snapshot) -> None:
        """Take from ``origin`` all fields of this run's snapshots but their step."""
        super().__init__(settings, sync, origin)
        self._settings, self._origin = settings, origin
        self._own_step: int | None = None

    def due(self, step: int, last: int | None = None) -> bool:
        return self._settings.folder is not None and step > 0 and (step % self._settings.every == 0 or step == last)

    def save(self, state: Mapping[str, Any], step: int) -> Path:
        root = self._root()
        if step == self._own_step:
            return root / folder_name(step)
        partial = self._sync.on_first_rank(_NOT_SAVED, lambda: checkpoint_folder.begin(root, step))
        leaves = self._sync.on_every_rank(_NOT_SAVED, lambda: self._save_values(partial, state))
        self._save_tensors(partial, leaves)
        snapshot = replace(self._origin, step=step)
        complete = self._sync.on_first_rank(_NOT_SAVED, lambda: checkpoint_folder.commit(partial, snapshot))
        self._own_step = step
        self._prune(root)
        return complete

    def load(self, state: dict[str, Any]) -> int | None:
        loaded = self._load(state)
        if loaded is None:
            return None
        folder, step = loaded
        if folder.parent == self._settings.folder:
            self._own_step = step
        return step

    def _root(self) -> Path:
        if self._settings.folder is None:
            fix = "set checkpoint.folder, or save only when due(step)"
            raise CheckpointError(
                _NOT_SAVED, [Problem("checkpoint.folder", "not set, so there is no place to save", fix=fix)]
            )
        if self._sync.alone and self._sync.world_size > 1:
            what = f"the other ranks of rank {self._sync.rank} of {self._sync.world_size} are fake and save no shards"
            raise CheckpointError(_NOT_SAVED, [Problem("checkpointer", what, fix="save where all ranks run")])
        return self._settings.folder

    def _save_values(self, partial: Path, state: Mapping[str, Any]) -> Leaves:
        leaves = Leaves(state)
        write_values(partial, self._sync.rank, leaves.values)
        return leaves

    def _save_tensors(self, partial: Path, leaves: Leaves) -> None:
        writer, planner = TensorWriter(partial, self._sync.rank), DefaultSavePlanner(flatten_state_dict=False)
        with self._sync.translate_failures(_NOT_SAVED):
            save(leaves.tensors, storage_writer=writer, planner=planner, no_dist=self._sync.alone)

    def _prune(self, root: Path) -> None:
        if self._settings.keep is None or self._sync.rank != 0:
            return
        try:
            checkpoint_folder.prune(root, self._settings.keep)
        except OSError as error:
            _LOG.warning("an old checkpoint could not be deleted: %s", error)
