"""Loads checkpoints from a file system that all ranks share; imports torch, so it is imported when opened."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load

from runtime_di.errors import Problem
from runtime_di.providers.checkpoint_index import Index, Sizes, read_index
from runtime_di.providers.checkpoint_state import Leaves
from runtime_di.providers.checkpoint_storage import TensorReader
from runtime_di.providers.checkpoint_values import Values, read_common_values, read_values
from runtime_di.providers.snapshot import CheckpointError, Snapshot, read_snapshot

if TYPE_CHECKING:
    from runtime_di.providers.checkpoint_loader import LoadSettings
    from runtime_di.providers.checkpoint_ranks import Ranks

_NOT_LOADED = "The checkpoint was not loaded."
_LACKING = "load a checkpoint that has it, or leave it out of the state that is loaded"
_Vocabularies = tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]
"""What this run tells of its vocabulary, and what the checkpoint tells."""
_LOG = logging.getLogger(__name__)


class FolderLoader:
    """A `CheckpointLoader` whose files every rank reads."""

    def __init__(self, settings: LoadSettings, ranks: Ranks, own: Snapshot) -> None:
        """Take layout and vocabulary of this run from ``own``: in the same layout, each rank gets its own values."""
        self._start, self._ranks, self._own = settings, ranks, own

    @property
    def latest(self) -> Path | None:
        return self._start.start

    @property
    def weights_only(self) -> bool:
        return self._ranks.first(_NOT_LOADED, lambda: self._find_weights() is not None)

    def _find_weights(self) -> str | None:
        return read_snapshot(self.latest).weights if self.latest else None

    def load(self, state: dict[str, Any]) -> int | None:
        loaded = self._load(state)
        return loaded and loaded[1]

    def _load(self, state: dict[str, Any]) -> tuple[Path, int] | None:
        found = self._ranks.first(_NOT_LOADED, self._find)
        if found is None:
            return None
        folder, snapshot = found
        values = self._load_values(folder, snapshot)
        leaves, index = self._ranks.together(_NOT_LOADED, lambda: self._matched(folder, snapshot, state, values))
        if values.differing:
            self._tell_differing(folder, values.differing & leaves.values.keys())
        self._load_tensors(folder, leaves, index)
        self._ranks.together(_NOT_LOADED, lambda: leaves.put(state))
        return folder, snapshot.step

    def _find(self) -> tuple[Path, Snapshot] | None:
        folder = self.latest or self._start.load
        return (folder, read_snapshot(folder)) if folder else None

    def _load_values(self, folder: Path, snapshot: Snapshot) -> Values:
        """This rank's plain values: its own, or what ranks that were laid out otherwise had in common."""
        if snapshot.layout == self._own.layout:
            return self._ranks.together(_NOT_LOADED, lambda: read_values(folder, self._ranks.rank))
        return self._ranks.first(_NOT_LOADED, lambda: read_common_values(folder, snapshot.world_size))

    def _matched(
        self, folder: Path, snapshot: Snapshot, state: Mapping[str, Any], values: Values
    ) -> tuple[Leaves, Index]:
        """The leaves of ``state`` with the checkpoint's values, once each leaf is known to have its like there."""
        leaves, index = Leaves(state), read_index(folder)
        vocabularies = (self._own.vocabulary, snapshot.vocabulary)
        if problems := [*_problems(leaves, values, index, snapshot.weights, vocabularies)]:
            raise CheckpointError(f"{folder} does not hold this state.", problems)
        leaves.values.update({path: value for path, value in values.known.items() if path in leaves.values})
        return leaves, index

    def _tell_differing(self, folder: Path, own: Set[str]) -> None:
        """Tell, on rank 0, what any rank has and did not get."""
        paths = {path for of_rank in self._ranks.gathered(own) for path in of_rank}
        if paths and self._ranks.rank == 0:
            what = "%s is of another parallel layout; not loaded, since ranks differed in it: %s"
            _LOG.warning(what, folder, ", ".join(sorted(paths)))

    def _load_tensors(self, folder: Path, leaves: Leaves, index: Index) -> None:
        reader, planner = TensorReader(folder, index), DefaultLoadPlanner(flatten_state_dict=False)
        with failures_told(self._ranks, _NOT_LOADED):
            load(leaves.tensors, storage_reader=reader, planner=planner, no_dist=self._ranks.alone)


@contextmanager
def failures_told(ranks: Ranks, heading: str) -> Iterator[None]:
    """Turn torch's account of failed ranks, which it raises on all of them, into ours."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as error:
        own = error.failures.get(ranks.rank)
        if own and not isinstance(own[0], Exception):
            raise own[0] from None
        told = [Problem(f"rank {rank}", f"{type(e).__name__}: {e}") for rank, (e, _) in error.failures.items()]
        raise CheckpointError(heading, told) from error


def _problems(
    leaves: Leaves, values: Values, index: Index, weights: str | None, vocabularies: _Vocabularies
) -> Iterator[Problem]:
    """Tell what does not fit; of a checkpoint of ``weights`` alone, what it cannot hold is one problem."""
    if beside := [path for path in (*leaves.tensors, *leaves.values) if not path.startswith(weights or "")]:
        what = f"the checkpoint holds the weights alone, {weights}*, and nothing such as {beside[0]}"
        fix = "where checkpointer.weights_only says so, load the model's part alone and start the rest afresh"
        yield Problem("state", what, fix=fix)
    told = (*_tensor_problems(leaves, index, vocabularies), *_value_problems(leaves, values, index))
    yield from (problem for problem in told if problem.where.removeprefix("state ") not in beside)


def _tensor_problems(leaves: Leaves, index: Index, vocabularies: _Vocabularies) -> Iterator[Problem]:
    for path, tensor in leaves.tensors.items():
        if path not in index:
            yield Problem(f"state {path}", "a tensor here, and not in the checkpoint", fix=_LACKING)
        elif (here := list(tensor.shape)) != (there := index[path].size):
            what = f"of size {here} here, and {there} in the checkpoint"
            yield Problem(f"state {path}", what, fix=_size_fix(here, there, vocabularies))


def _size_fix(here: Sizes, there: Sizes, vocabularies: _Vocabularies) -> str:
    """Two ways to mend rows of a vocabulary that was padded otherwise, or what to do about any other size."""
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
