"""A nested state as flat leaves: tensors, which ranks share, and plain values, which each rank has on its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from runtime_di.errors import Problem
from runtime_di.providers.checkpoint.format.encoding import is_byte_tensor
from runtime_di.providers.checkpoint.format.snapshot import CheckpointError


class Leaves:
    """The leaves of a nested state by dotted path.

    A leaf is a tensor, or a largest part without tensors, which is saved and loaded as a whole.

    Attributes:
        trees: the state with each stateful object's own state in its place.
        tensors: path to tensor; DTensors are sharded, others assumed equal on all ranks.
        values: path to plain value.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.trees = {key: _tree(state[key]) for key in sorted(state)}
        self.tensors: dict[str, torch.Tensor] = {}
        self.values: dict[str, Any] = {}
        for path, leaf in self._walk():
            if path in self.tensors or path in self.values:
                problem = Problem(f"state {path}", "two entries share this path", fix="rename one of them")
                raise CheckpointError("The state cannot be saved.", [problem])
            (self.tensors if _is_shared_tensor(leaf) else self.values)[path] = leaf

    def _walk(self) -> Iterator[tuple[str, Any]]:
        for key, tree in self.trees.items():
            yield from _leaves(tree, key)

    def put(self, state: dict[str, Any]) -> None:
        """Write the current ``tensors`` and ``values`` into ``state``, from which these leaves were taken."""
        found = {**self.tensors, **self.values}
        for key, tree in self.trees.items():
            filled = _filled(tree, key, found)
            if isinstance(state[key], Stateful):
                state[key].load_state_dict(filled)
            else:
                state[key] = filled


def _tree(entry: Any) -> Any:
    return entry.state_dict() if isinstance(entry, Stateful) else entry


def _is_shared_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not is_byte_tensor(value)


def _items(node: Any) -> list[tuple[Any, Any]]:
    if isinstance(node, Mapping):
        return list(node.items())
    return list(enumerate(node)) if isinstance(node, list | tuple) else []


def _has_tensors(node: Any) -> bool:
    return isinstance(node, torch.Tensor) or any(_has_tensors(item) for _, item in _items(node))


def _leaves(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, torch.Tensor) or not _has_tensors(node):
        yield path, node
        return
    for key, item in _items(node):
        yield from _leaves(item, f"{path}.{key}")


def _filled(node: Any, path: str, found: Mapping[str, Any]) -> Any:
    """Replace every leaf of ``node`` by the one in ``found``; containers and byte tensors are filled in place."""
    if is_byte_tensor(node):
        return _copied(node, found[path], path)
    if isinstance(node, torch.Tensor) or not _has_tensors(node):
        return found[path]
    if isinstance(node, tuple):
        return tuple(_filled(item, f"{path}.{key}", found) for key, item in _items(node))
    for key, item in _items(node):
        node[key] = _filled(item, f"{path}.{key}", found)
    return node


def _copied(tensor: torch.Tensor, source: torch.Tensor, path: str) -> torch.Tensor:
    if source.shape != tensor.shape:
        raise ValueError(f"state {path} has {tensor.numel()} bytes, and {source.numel()} in the checkpoint")
    return tensor.copy_(source)
