"""A checkpointer on a file system that all ranks share; imports torch, so it is imported when opened."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save

from runtime_di.errors import Problem
from runtime_di.providers import checkpoint_folder
from runtime_di.providers.checkpoint_state import Leaves
from runtime_di.providers.checkpoint_storage import TensorWriter
from runtime_di.providers.checkpoint_values import write_values
from runtime_di.providers.folder_loader import FolderLoader, failures_told
from runtime_di.providers.snapshot import CheckpointError, Snapshot, folder_name

if TYPE_CHECKING:
    from runtime_di.providers.checkpoint_ranks import Ranks
    from runtime_di.providers.checkpointer import CheckpointSettings

_NOT_SAVED = "The checkpoint was not saved; earlier ones are as they were."
_LOG = logging.getLogger(__name__)


class FolderCheckpointer(FolderLoader):
    """A `Checkpointer` whose files are written by every rank, and whose folder by rank 0 alone."""

    def __init__(self, settings: CheckpointSettings, ranks: Ranks, origin: Snapshot) -> None:
        """Take what every snapshot of this run says, its step aside, from ``origin``."""
        super().__init__(settings, ranks, origin)
        self._settings, self._origin = settings, origin
        self._own_step: int | None = None

    def due(self, step: int, last: int | None = None) -> bool:
        return self._settings.folder is not None and step > 0 and (step % self._settings.every == 0 or step == last)

    def save(self, state: Mapping[str, Any], step: int) -> Path:
        root = self._root()
        if step == self._own_step:
            return root / folder_name(step)
        partial = self._ranks.first(_NOT_SAVED, lambda: checkpoint_folder.begin(root, step))
        leaves = self._ranks.together(_NOT_SAVED, lambda: self._save_values(partial, state))
        self._save_tensors(partial, leaves)
        snapshot = replace(self._origin, step=step)
        complete = self._ranks.first(_NOT_SAVED, lambda: checkpoint_folder.commit(partial, snapshot))
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
            raise CheckpointError(_NOT_SAVED, [Problem("checkpoint.folder", "not set: nowhere to save", fix=fix)])
        if self._ranks.alone and self._ranks.world_size > 1:
            what = f"rank {self._ranks.rank} of {self._ranks.world_size} has no real peers to save the other shards"
            raise CheckpointError(_NOT_SAVED, [Problem("checkpointer", what, fix="save where all ranks run")])
        return self._settings.folder

    def _save_values(self, partial: Path, state: Mapping[str, Any]) -> Leaves:
        leaves = Leaves(state)
        write_values(partial, self._ranks.rank, leaves.values)
        return leaves

    def _save_tensors(self, partial: Path, leaves: Leaves) -> None:
        writer, planner = TensorWriter(partial, self._ranks.rank), DefaultSavePlanner(flatten_state_dict=False)
        with failures_told(self._ranks, _NOT_SAVED):
            save(leaves.tensors, storage_writer=writer, planner=planner, no_dist=self._ranks.alone)

    def _prune(self, root: Path) -> None:
        if self._settings.keep is None or self._ranks.rank != 0:
            return
        try:
            checkpoint_folder.prune(root, self._settings.keep)
        except OSError as error:
            _LOG.warning("an old checkpoint could not be deleted: %s", error)
