"""The interfaces of checkpoint loaders and checkpointers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class CheckpointLoader(Protocol):
    """Loads a state: a dict of stateful objects, tensors, and plain values nested in any way.

    DTensors are loaded at any sharding, whatever they were saved with. Other tensors are assumed equal on all ranks.
    Plain values are ``None``, booleans, numbers, strings, bytes, lists, tuples and dicts. They and byte tensors such
    as ``torch.get_rng_state()`` may differ between ranks. In the same parallel layout each rank loads its own. In
    another layout each rank loads the values that are equal on all ranks that saved them; the others stay unchanged
    in ``state``, and the log names them.
    """

    @property
    def latest(self) -> Path | None:
        """The checkpoint that `load` would read, as this rank sees the disk."""
        ...

    @property
    def weights_only(self) -> bool:
        """Whether `latest`, as rank 0 sees it, contains only the weights of a model; collective.

        Raises:
            CheckpointError: its snapshot cannot be read.
        """
        ...

    def load(self, state: dict[str, Any]) -> int | None:
        """Load the entries that ``state`` has, and no others; collective.

        Tensors are filled in place, stateful objects load their state, plain values are replaced in the dict.

        Returns:
            The step of the checkpoint, or ``None`` if there is no checkpoint to start from.

        Raises:
            CheckpointError: on every rank, if a rank could not load its part; ``state`` may be partly loaded.
        """
        ...


class Checkpointer(CheckpointLoader, Protocol):
    """Saves and loads a state as a `CheckpointLoader` defines it; saves a tensor that is not a DTensor once."""

    def due(self, step: int, last: int | None = None) -> bool:
        """Whether to save a checkpoint at the end of ``step``; true for the ``last`` one.

        Always false without a folder to save in.
        """
        ...

    def save(self, state: Mapping[str, Any], step: int) -> Path:
        """Save ``state``; collective. The step last saved or resumed from is not saved again.

        Raises:
            CheckpointError: on every rank, if a rank could not save its part; earlier checkpoints stay.
        """
        ...
