"""A checkpointer in memory; torch is imported by the first save or load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime_di.errors import Problem
from runtime_di.providers.checkpoint.format.snapshot import CheckpointError, folder_name

if TYPE_CHECKING:
    from runtime_di.providers.checkpoint.state import Leaves

_FOLDER = Path("in-memory")
_NOT_SAVED = "The checkpoint was not saved; earlier ones are unchanged."


class FakeCheckpointer:
    """A checkpointer of one rank that saves to memory.

    It accepts and refuses the same states as the real one. ``FakeCheckpointer(saved=earlier.saved)`` resumes from the
    steps that an earlier one saved.

    Attributes:
        saved: step to its flat state: dotted path to tensor or plain value.
    """

    def __init__(self, every: int = 1000, saved: Mapping[int, Mapping[str, Any]] | None = None) -> None:
        self.saved: dict[int, Mapping[str, Any]] = dict(saved or {})
        self._every = every
        self._own_step: int | None = None

    @property
    def latest(self) -> Path | None:
        return _FOLDER / folder_name(max(self.saved)) if self.saved else None

    @property
    def weights_only(self) -> bool:
        return False

    def due(self, step: int, last: int | None = None) -> bool:
        return step > 0 and (step % self._every == 0 or step == last)

    def save(self, state: Mapping[str, Any], step: int) -> Path:
        from runtime_di.providers.checkpoint.state import Leaves

        if step != self._own_step:
            if step <= max(self.saved, default=-1):
                what, fix = f"step {step} is not after the latest one", "resume from it with load()"
                raise CheckpointError(_NOT_SAVED, [Problem(str(self.latest), what, fix=fix)])
            leaves = Leaves(state)
            tensors = {path: tensor.detach().clone() for path, tensor in leaves.tensors.items()}
            self.saved[step] = tensors | {path: _copied(path, value) for path, value in leaves.values.items()}
            self._own_step = step
        return _FOLDER / folder_name(step)

    def load(self, state: dict[str, Any]) -> int | None:
        from runtime_di.providers.checkpoint.state import Leaves

        if not self.saved:
            return None
        step = max(self.saved)
        leaves, saved = Leaves(state), self.saved[step]
        if problems := list(_mismatches(leaves, saved)):
            raise CheckpointError(f"{self.latest} does not contain this state.", problems)
        for path, tensor in leaves.tensors.items():
            tensor.detach().copy_(saved[path])
        leaves.values = {path: _copied(path, saved[path]) for path in leaves.values}
        leaves.put(state)
        self._own_step = step
        return step


def _copied(path: str, value: Any) -> Any:
    """The value as it is read back from a file."""
    from runtime_di.providers.checkpoint.format.encoding import decode, encode

    try:
        return decode(encode(value))
    except TypeError as error:
        problem = Problem(f"state {path}", f"contains a {error}, which a checkpoint cannot store")
        raise CheckpointError(_NOT_SAVED, [problem]) from None


def _mismatches(leaves: Leaves, saved: Mapping[str, Any]) -> Iterator[Problem]:
    from runtime_di.providers.checkpoint.format.encoding import is_byte_tensor

    for path, own in [*leaves.tensors.items(), *leaves.values.items()]:
        kept: Any = saved.get(path)
        if path not in saved:
            yield Problem(f"state {path}", "here, and not in the checkpoint")
        elif (path in leaves.tensors) != (hasattr(kept, "shape") and not is_byte_tensor(kept)):
            yield Problem(f"state {path}", "a tensor on one side, and a plain value on the other")
        elif path in leaves.tensors and own.shape != kept.shape:
            yield Problem(f"state {path}", f"of size {list(own.shape)} here, and {list(kept.shape)} in the checkpoint")
