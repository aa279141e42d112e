"""A checkpointer on a file system that all ranks share; imports torch, so it is imported when opened."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from runtime_di.errors import Problem
from runtime_di.providers import checkpoint_folder
from runtime_di.providers.checkpoint_index import Index, read_index
from runtime_di.providers.checkpoint_state import Leaves
from runtime_di.providers.checkpoint_storage import TensorReader, TensorWriter
from runtime_di.providers.checkpoint_values import Values, read_common_values, read_values, write_values
from runtime_di.providers.snapshot import (
    CheckpointError,
    Snapshot,
    folder_name,
    read_snapshot,
)

if TYPE_CHECKING:
    from runtime_di.providers.checkpoint_ranks import Ranks
    from runtime_di.providers.checkpointer import CheckpointSettings

_NOT_SAVED = "The checkpoint was not saved; earlier ones are as they were."
_NOT_LOADED = "The checkpoint was not loaded."
_LOG = logging.getLogger(__name__)


class FolderCheckpointer:
    """A `Checkpointer` whose files are written by every rank, and whose folder by rank 0 alone."""

    def __init__(self, settings: CheckpointSettings, ranks: Ranks, origin: Snapshot) -> None:
        """Take what every snapshot of this run says, its step aside, from ``origin``."""
        self._settings, self._ranks, self._origin = settings, ranks, origin
        self._own_step: int | None = None

    @property
    def latest(self) -> Path | None:
        return self._settings.start

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
        found = self._ranks.first(_NOT_LOADED, self._find)
        if found is None:
            return None
        folder, snapshot = found
        values = self._load_values(folder, snapshot)
        leaves, index = self._ranks.together(_NOT_LOADED, lambda: _matched(folder, state, values))
        self._load_tensors(folder, leaves, index)
        self._ranks.together(_NOT_LOADED, lambda: leaves.put(state))
        if folder.parent == self._settings.folder:
            self._own_step = snapshot.step
        return snapshot.step

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
        with self._failures_told(_NOT_SAVED):
            save(leaves.tensors, storage_writer=writer, planner=planner, no_dist=self._ranks.alone)

    def _prune(self, root: Path) -> None:
        if self._settings.keep is None or self._ranks.rank != 0:
            return
        try:
            checkpoint_folder.prune(root, self._settings.keep)
        except OSError as error:
            _LOG.warning("an old checkpoint could not be deleted: %s", error)

    def _find(self) -> tuple[Path, Snapshot] | None:
        folder = self.latest or self._settings.load
        return (folder, read_snapshot(folder)) if folder else None

    def _load_values(self, folder: Path, snapshot: Snapshot) -> Values:
        """This rank's plain values: its own, or what ranks that were laid out otherwise had in common."""
        if snapshot.layout == self._origin.layout:
            return self._ranks.together(_NOT_LOADED, lambda: read_values(folder, self._ranks.rank))
        values = self._ranks.first(_NOT_LOADED, lambda: read_common_values(folder, snapshot.world_size))
        if values.differing and self._ranks.rank == 0:
            _LOG.warning(
                "%s is of another parallel layout; not loaded, since ranks differed in it: %s",
                folder,
                ", ".join(sorted(values.differing)),
            )
        return values

    def _load_tensors(self, folder: Path, leaves: Leaves, index: Index) -> None:
        reader, planner = TensorReader(folder, index), DefaultLoadPlanner(flatten_state_dict=False)
        with self._failures_told(_NOT_LOADED):
            load(leaves.tensors, storage_reader=reader, planner=planner, no_dist=self._ranks.alone)

    @contextmanager
    def _failures_told(self, heading: str) -> Iterator[None]:
        """Turn torch's account of failed ranks, which it raises on all of them, into ours."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                yield
        except CheckpointException as error:
            own = error.failures.get(self._ranks.rank)
            if own and not isinstance(own[0], Exception):
                raise own[0] from None
            told = [Problem(f"rank {rank}", f"{type(e).__name__}: {e}") for rank, (e, _) in error.failures.items()]
            raise CheckpointError(heading, told) from error


def _matched(folder: Path, state: Mapping[str, Any], values: Values) -> tuple[Leaves, Index]:
    """The leaves of ``state`` with the checkpoint's values, once each leaf is known to have its like there."""
    leaves, index = Leaves(state), read_index(folder)
    problems = [*_tensor_problems(leaves, index), *_value_problems(leaves, values, index)]
    if problems:
        raise CheckpointError(f"{folder} does not hold this state.", problems)
    leaves.values.update({path: value for path, value in values.known.items() if path in leaves.values})
    return leaves, index


def _tensor_problems(leaves: Leaves, index: Index) -> Iterator[Problem]:
    for path, tensor in leaves.tensors.items():
        if path not in index:
            yield Problem(f"state {path}", "a tensor here, and not in the checkpoint")
        elif list(tensor.shape) != index[path].size:
            yield Problem(
                f"state {path}", f"of size {list(tensor.shape)} here, and {index[path].size} in the checkpoint"
            )


def _value_problems(leaves: Leaves, values: Values, index: Index) -> Iterator[Problem]:
    for path in leaves.values:
        if path in values.known or path in values.differing:
            continue
        if any(tensor.startswith(f"{path}.") for tensor in index):
            fix = "give the state its tensors before loading, as get_optimizer_state_dict does"
            yield Problem(f"state {path}", "without tensors here, and with tensors in the checkpoint", fix=fix)
        else:
            yield Problem(f"state {path}", "a plain value here, and not in the checkpoint")
