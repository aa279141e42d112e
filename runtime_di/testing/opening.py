"""Settings and overrides of a runtime in a unit test: one process, and files only in the test's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from runtime_di.lifecycle.overrides import effective_overrides
from runtime_di.plan import conformance, type_hints
from runtime_di.runtime import Runtime
from runtime_di.settings import fields
from runtime_di.settings.launch import LaunchSettings
from runtime_di.testing.fakes import FakeWriter

R = TypeVar("R", bound=Runtime)

_DEFAULTS = {"distributed": {"backend": "fake"}, "device": {"kind": "cpu"}}
"""Default settings of a test, for fields that the settings class has and the test does not set."""


def settings_for_test(runtime: type[Runtime], folder: Path, explicit: Mapping[str, Any]) -> Any:
    """Create settings from ``explicit`` values; all others are those of one process on the fake backend.

    The launcher's variables are not read. A section that is set without its optional ``folder`` gets one below
    ``folder``.
    """
    settings_class = runtime.settings_class()
    values = {name: _completed(settings_class, name, value, folder) for name, value in explicit.items()}
    for name, defaults in _DEFAULTS.items():
        if isinstance(values.get(name, {}), Mapping):
            known = {key: value for key, value in defaults.items() if fields.find(settings_class, f"{name}.{key}")}
            values.update({name: {**known, **values.get(name, {})}} if known else {})
    launch = values.get("launch", {})
    return settings_class(**{**values, "launch": LaunchSettings(**launch) if isinstance(launch, Mapping) else launch})


def open_for_test(
    runtime: type[R], folder: Path, overrides: Mapping[Any, Any] | None, explicit: Mapping[str, Any]
) -> R:
    """Open a runtime whose writer is a `FakeWriter`, unless the test overrides the writer or sets its settings."""
    settings = settings_for_test(runtime, folder, explicit)
    plan = runtime.plan()
    named = effective_overrides(plan, overrides or {})
    if "writer" in plan.services and "writer" not in named and "writer" not in explicit:
        wanted = type_hints.resolve(*runtime.service_annotations().get("writer", (None, "")))
        named |= {} if conformance.value_mismatches(FakeWriter(), wanted) else {"writer": FakeWriter()}
    return runtime.open(settings, overrides=named)


def _completed(settings_class: type[BaseModel], name: str, value: Any, folder: Path) -> Any:
    found = fields.find(settings_class, f"{name}.folder")
    if isinstance(value, Mapping) and "folder" not in value and any(field.default is None for field in found):
        return {**value, "folder": folder / name}
    return value
