"""Layers of settings: the values of one source each, and the merge of all layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from runtime_di.settings import fields
from runtime_di.settings.launch import LAUNCH_VARIABLES

ENV_PREFIX = "RUNTIME_DI_"
_MISSING = object()


@dataclass(frozen=True, slots=True)
class Layer:
    """The values of one source, nested by section."""

    name: str
    values: Mapping[str, Any]
    explicit_paths: tuple[str, ...] = ()
    """Paths of the flags or variables that were set; one of them may set a whole section as JSON."""

    def get(self, path: str) -> Any:
        """The value at a dotted path, or the sentinel that `has` tests for."""
        value: Any = self.values
        for part in path.split("."):
            if isinstance(value, BaseModel):
                value = dict(value)
            if not isinstance(value, Mapping) or part not in value:
                return _MISSING
            value = value[part]
        return value

    def has(self, path: str) -> bool:
        return self.get(path) is not _MISSING

    def origin(self, path: str) -> str:
        """How the user set ``path`` in this layer, such as ``environment RUNTIME_DI_PARALLEL__TENSOR``."""
        setting = [explicit for explicit in self.explicit_paths if f"{path}.".startswith(f"{explicit}.")]
        explicit_path = max(setting, key=len, default=path)
        if self.name == "command line":
            return f"command line --{explicit_path}"
        if self.name == "environment":
            return f"environment {variable_of(explicit_path)}"
        if self.name == "launcher":
            return f"environment {LAUNCH_VARIABLES.get(path.removeprefix('launch.'), path)}"
        return self.name


def variable_of(path: str) -> str:
    """The environment variable that sets the field at ``path``."""
    return ENV_PREFIX + path.upper().replace(".", "__")


def merge_layers(layers: Sequence[Layer], settings: type[BaseModel]) -> tuple[tuple[Layer, ...], dict[str, Any]]:
    """Merge layers, strongest first. A section of another ``kind`` replaces the weaker layers' whole section.

    Returns:
        The layers, strongest first, without replaced sections; and the merged values.
    """
    remaining: list[Layer] = []
    merged: dict[str, Any] = {}
    for layer in reversed(layers):
        replaced = list(_replaced(merged, layer.values, [settings]))
        remaining = [replace(weaker, values=without(weaker.values, replaced)) for weaker in remaining]
        merged = _merge(without(merged, replaced), layer.values)
        remaining.insert(0, layer)
    return tuple(remaining), merged


def _replaced(
    weaker: Mapping[str, Any], stronger: Mapping[str, Any], owners: Sequence[type[BaseModel]], prefix: str = ""
) -> Iterator[str]:
    """Paths of the sections to which ``stronger`` assigns another kind."""
    for name, value in stronger.items():
        below = weaker.get(name)
        nested = [
            model
            for owner in owners
            if name in owner.model_fields
            for model in fields.models(owner.model_fields[name].annotation)
        ]
        if not isinstance(value, Mapping) or not isinstance(below, Mapping):
            continue
        if any(map(fields.tag, nested)) and {"kind"} <= value.keys() & below.keys() and value["kind"] != below["kind"]:
            yield prefix + name
        else:
            yield from _replaced(below, value, nested, f"{prefix}{name}.")


def _merge(weaker: Any, stronger: Any) -> Any:
    if not isinstance(weaker, Mapping) or not isinstance(stronger, Mapping):
        return stronger
    return {**weaker, **{name: _merge(weaker.get(name), value) for name, value in stronger.items()}}


def without(values: Mapping[str, Any], paths: Sequence[str], prefix: str = "") -> dict[str, Any]:
    """Copy nested values without those at the dotted ``paths``."""
    kept = {name: value for name, value in values.items() if prefix + name not in paths}
    return {
        name: without(value, paths, f"{prefix}{name}.") if isinstance(value, Mapping) else value
        for name, value in kept.items()
    }
