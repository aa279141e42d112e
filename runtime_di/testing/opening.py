"""Settings and overrides of a runtime in a unit test: one process, nothing on the disk but in the test's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from runtime_di import conformance, fields, hints
from runtime_di.launch import LaunchSettings
from runtime_di.overrides import in_force
from runtime_di.runtime import Runtime
from runtime_di.testing.fakes import FakeWriter

R = TypeVar("R", bound=Runtime)

_DEFAULTS = {"distributed": {"backend": "fake"}, "device": {"kind": "cpu"}}
"""Fields of a test's settings, where the settings class has them and the test says nothing else."""


def settings_for_test(runtime: type[Runtime], folder: Path, given: Mapping[str, Any]) -> Any:
    """The settings of a runtime as ``given``, and where nothing is given, of one process on the fake backend.

    The launcher's variables are not read. A section given without its ``folder``, where that is optional, gets one
    below ``folder``.
    """
    settings_class = runtime.settings_class()
    values = {name: _completed(settings_class, name, value, folder) for name, value in given.items()}
    for name, defaults in _DEFAULTS.items():
        if isinstance(values.get(name, {}), Mapping):
            known = {key: value for key, value in defaults.items() if fields.find(settings_class, f"{name}.{key}")}
            values.update({name: {**known, **values.get(name, {})}} if known else {})
    launch = values.get("launch", {})
    return settings_class(**{**values, "launch": LaunchSettings(**launch) if isinstance(launch, Mapping) else launch})


def open_for_test(runtime: type[R], folder: Path, overrides: Mapping[Any, Any] | None, given: Mapping[str, Any]) -> R:
    """Open a runtime whose writer is a `FakeWriter`, unless the test gives a writer or its settings."""
    settings = settings_for_test(runtime, folder, given)
    plan = runtime.plan()
    named = in_force(runtime, plan, overrides or {})
    if "writer" in plan.services and "writer" not in named and "writer" not in given:
        wanted = hints.resolve(*runtime.service_annotations().get("writer", (None, "")))
        named |= {} if conformance.value_misfits(FakeWriter(), wanted) else {"writer": FakeWriter()}
    return runtime.open(settings, overrides=named)


def _completed(settings_class: type[BaseModel], name: str, value: Any, folder: Path) -> Any:
    found = fields.find(settings_class, f"{name}.folder")
    if isinstance(value, Mapping) and "folder" not in value and any(field.default is None for field in found):
        return {**value, "folder": folder / name}
    return value
