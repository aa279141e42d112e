"""Explanations of settings: where a value comes from, what it overrides, and what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from runtime_di.errors import Problem
from runtime_di.settings import fields
from runtime_di.settings.layers import Layer


@dataclass(frozen=True, slots=True)
class Explanation:
    """A setting's value, the source that set it, and the values it overrode, the strongest source first."""

    path: str
    value: str
    source: str
    overrode: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        overrode = "".join(f"\n  overrode {value} from {source}" for source, value in self.overrode)
        return f"{self.path} = {self.value} (from {self.source}){overrode}"


def problem_of(settings: type[BaseModel], layers: Sequence[Layer], detail: Any) -> Problem:
    """Convert one pydantic error to a problem with path, value, source and fix."""
    path = fields.locate(settings, detail["loc"])
    layer = next((layer for layer in layers if layer.has(path)), None)
    has_value = detail["type"] != "missing" and not isinstance(detail["input"], Mapping | BaseModel)
    what, fix = detail["msg"].removeprefix("Value error, "), None
    if detail["type"] == "extra_forbidden":
        near = fields.closest(settings, path)
        what, fix = "unknown setting", f"did you mean {near}?" if near else "remove it"
    return Problem(
        path,
        what[:1].lower() + what[1:],
        value=format_value(settings, path, detail["input"]) if has_value else None,
        source=layer.origin(path) if layer else None,
        fix=fix,
    )


def format_value(settings: type[BaseModel], path: str, value: Any) -> str:
    """Format a value as text, with secrets masked."""
    if any(fields.is_secret(field) for field in fields.find(settings, path)):
        return fields.MASK
    if isinstance(value, BaseModel):
        return json.dumps(fields.nest({leaf.path: leaf.value for leaf in fields.leaves(value)}))
    if isinstance(value, Mapping):
        parts = [f"{name}: {format_value(settings, f'{path}.{name}', part)}" for name, part in value.items()]
        return "{" + ", ".join(parts) + "}"
    return str(value) if isinstance(value, str | Path) else repr(value)
