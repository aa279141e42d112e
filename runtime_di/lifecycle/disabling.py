"""The reason why the settings disable a service."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping

from runtime_di.errors import Problem
from runtime_di.plan import type_hints
from runtime_di.plan.specs import Injection, ServiceEdge, ServiceSpec, SettingsPath
from runtime_di.settings.model import RuntimeSettings


def why_disabled(spec: ServiceSpec, settings: RuntimeSettings, disabled: Mapping[str, Problem]) -> Problem | None:
    """The null setting or disabled service that the factory needs as an argument that does not accept ``None``."""
    missing = {
        id(injection): problem
        for injection in spec.injections
        if (problem := _missing(spec, injection, settings, disabled)) is not None
    }
    if missing:
        for injection, parameter in _bound(spec):
            if id(injection) in missing and not (parameter and type_hints.accepts_none(parameter, spec.factory)):
                return missing[id(injection)]
    return None


def _missing(
    spec: ServiceSpec, injection: Injection, settings: RuntimeSettings, disabled: Mapping[str, Problem]
) -> Problem | None:
    if isinstance(injection, SettingsPath):
        setting = _null_setting(injection, settings)
        if setting is None:
            return None
        source = settings.explain(setting).source
        return Problem(setting, f"is null, so '{spec.name}' is off", source=source, fix=f"set '{setting}'")
    needed = (injection.name,) if isinstance(injection, ServiceEdge) else getattr(injection, "services", ())
    for name in needed:
        if name in disabled:
            cause = disabled[name]
            what = f"needs '{name}', which is off: {cause.where} {cause.what}"
            return Problem(spec.name, what, cause.value, cause.source, cause.fix)
    return None


def _null_setting(path: SettingsPath, settings: RuntimeSettings) -> str | None:
    """The first field on a path that is ``None``; a property's value never disables a service."""
    value: object = settings
    for length, name in enumerate(path.names, 1):
        if name not in getattr(type(value), "model_fields", {}):
            return None
        value = getattr(value, name)
        if value is None:
            return ".".join(path.names[:length])
    return None


def _bound(spec: ServiceSpec) -> Iterator[tuple[Injection, inspect.Parameter | None]]:
    try:
        signature = inspect.signature(spec.factory)
        bound = signature.bind(*spec.args, **spec.kwargs)
    except (TypeError, ValueError):
        yield from ((injection, None) for injection in spec.injections)
        return
    for name, value in bound.arguments.items():
        parameter = signature.parameters[name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            yield from ((injection, parameter) for injection in value)
        elif parameter.kind is parameter.VAR_KEYWORD:
            yield from ((injection, parameter) for injection in value.values())
        else:
            yield value, parameter
