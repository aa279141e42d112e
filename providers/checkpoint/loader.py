"""Loads checkpoints from a file system that all ranks share; imports torch, so it is imported when opened."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load

from runtime_di.errors import Problem
from runtime_di.providers.checkpoint.format.index import Index, Sizes, read_index
from runtime_di.providers.checkpoint.format.snapshot import CheckpointError, Snapshot, read_snapshot
from runtime_di.providers.checkpoint.format.storage import TensorReader
from runtime_di.providers.checkpoint.format.values import Values, read_common_values, read_values
from runtime_di.providers.checkpoint.state import Leaves

if TYPE_CHECKING:
    from runtime_di.providers.checkpoint.rank_sync import RankSync
    from runtime_di.providers.checkpoint.settings import LoadSettings

_NOT_LOADED = "The checkpoint was not loaded."
_LACKING = "load a checkpoint that has it, or leave it out of the state that is loaded"
_Vocabularies = tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]
"""The vocabulary of this run, and the one that the checkpoint records."""
_LOG = logging.getLogger(__name__)


class FolderLoader:
    """A `CheckpointLoader` that reads the files on every rank."""

    def __init__(self, settings: LoadSettings, sync: RankSync, own: Snapshot) -> None:
        """Take layout and vocabulary of this run from ``own``; in an equal layout, each rank loads its own values."""
        self._start, self._sync, self._own = settings, sync, own

    @property
    def latest(self) -> Path | None:
        return self._start.start

    @property
    def weights_only(self) -> bool:
        return self._sync.on_first_rank(_NOT_LOADED, lambda: self._find_weights() is not None)

    def _find_weights(self) -> str | None:
        return read_snapshot(self.latest).weights if self.latest else None

    def load(self, state: dict[str, Any]) -> int | None:
        loaded = self._load(state)
        return loaded and loaded[1]

    def _load(self, state: dict[str, Any]) -> tuple[Path, int] | None:
        found = self._sync.on_first_rank(_NOT_LOADED, self._find)
        if found is None:
            return None
        folder, snapshot = found
        values = self._load_values(folder, snapshot)
        leaves, index = self._sync.on_every_rank(_NOT_LOADED, lambda: self._matched(folder, snapshot, state, values))
        if values.differing:
            self._log_differing(folder, values.differing & leaves.values.keys())
        self._load_tensors(folder, leaves, index)
        self._sync.on_every_rank(_NOT_LOADED, lambda: leaves.put(state))
        return folder, snapshot.step

    def _find(self) -> tuple[Path, Snapshot] | None:
        folder = self.latest or self._start.load
        return (folder, read_snapshot(folder)) if folder else None

    def _load_values(self, folder: Path, snapshot: Snapshot) -> Values:
        """Read this rank's own plain values; in another layout, those on which the saving ranks agree."""
        if snapshot.layout == self._own.layout:
            return self._sync.on_every_rank(_NOT_LOADED, lambda: read_values(folder, self._sync.rank))
        return self._sync.on_first_rank(_NOT_LOADED, lambda: read_common_values(folder, snapshot.world_size))

    def _matched(
        self, folder: Path, snapshot: Snapshot, state: Mapping[str, Any], values: Values
    ) -> tuple[Leaves, Index]:
        """Check that the checkpoint contains every leaf of ``state``; return the leaves with the loaded values."""
        leaves, index = Leaves(state), read_index(folder)
        vocabularies = (self._own.vocabulary, snapshot.vocabulary)
        if problems := [*_problems(leaves, values, index, snapshot.weights, vocabularies)]:
            raise CheckpointError(f"{folder} does not contain this state.", problems)
        leaves.values.update({path: value for path, value in values.known.items() if path in leaves.values})
        return leaves, index

    def _log_differing(self, folder: Path, own: Set[str]) -> None:
        """Log on rank 0 the values that any rank has and did not get."""
        paths = {path for of_rank in self._sync.all_gather(own) for path in of_rank}
        if paths and self._sync.rank == 0:
            what = "%s is of another parallel layout; these values differ between its ranks and were not loaded: %s"
            _LOG.warning(what, folder, ", ".join(sorted(paths)))

    def _load_tensors(self, folder: Path, leaves: Leaves, index: Index) -> None:
        reader, planner = TensorReader(folder, index), DefaultLoadPlanner(flatten_state_dict=False)
        with self._sync.translate_failures(_NOT_LOADED):
            load(leaves.tensors, storage_reader=reader, planner=planner, no_dist=self._sync.alone)


def _problems(
    leaves: Leaves, values: Values, index: Index, weights: str | None, vocabularies: _Vocabularies
) -> Iterator[Problem]:
    """Yield what does not fit; leaves that a checkpoint of ``weights`` alone cannot contain are one problem."""
    if outside := [path for path in (*leaves.tensors, *leaves.values) if not path.startswith(weights or "")]:
        what = f"the checkpoint contains the weights alone, {weights}*, and nothing such as {outside[0]}"
        fix = "if checkpointer.weights_only, load the model's part alone and start the rest anew"
        yield Problem("state", what, fix=fix)
    problems = (*_tensor_problems(leaves, index, vocabularies), *_value_problems(leaves, values, index))
    yield from (problem for problem in problems if problem.where.removeprefix("state ") not in outside)


def _tensor_problems(leaves: Leaves, index: Index, vocabularies: _Vocabularies) -> Iterator[Problem]:
    for path, tensor in leaves.tensors.items():
        if path not in index:
            yield Problem(f"state {path}", "a tensor here, and not in the checkpoint", fix=_LACKING)
        elif (here := list(tensor.shape)) != (there := index[path].size):
            what = f"of size {here} here, and {there} in the checkpoint"
            yield Problem(f"state {path}", what, fix=_size_fix(here, there, vocabularies))


def _size_fix(here: Sizes, there: Sizes, vocabularies: _Vocabularies) -> str:
    """Return two fixes for vocabulary rows with another padding, or the fix for any other size."""
    own, saved = vocabularies
    rows = tuple(vocabulary and vocabulary.get("padded_size") for vocabulary in vocabularies)
    if own and saved and here[1:] == there[1:] and (*here[:1], *there[:1]) == rows:
        size = own["tensor_parallel"]
        return f"convert the checkpoint for tensor-parallel size {size}, or set vocabulary.padded_size to {rows[1]}"
    return "give the model the shape that it was saved with; checkpoint.load_settings takes it from there"


def _value_problems(leaves: Leaves, values: Values, index: Index) -> Iterator[Problem]:
    for path in leaves.values:
        if path in values.known or path in values.differing:
            continue
        if any(tensor.startswith(f"{path}.") for tensor in index):
            fix = "give the state its tensors before loading, as get_optimizer_state_dict does"
            yield Problem(f"state {path}", "without tensors here, and with tensors in the checkpoint", fix=fix)
        else:
            yield Problem(f"state {path}", "a plain value here, and not in the checkpoint", fix=_LACKING)
