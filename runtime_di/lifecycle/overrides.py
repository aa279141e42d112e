"""Overrides: objects that replace services, in one open runtime or in all that are opened within a scope."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from runtime_di.errors import OverrideError, Problem
from runtime_di.plan import conformance, type_hints
from runtime_di.plan.model import Plan
from runtime_di.plan.reading import names_of


@dataclass(frozen=True, eq=False, slots=True)
class Scope:
    """Overrides for a Runtime class and its subclasses."""

    runtime: type
    overrides: Mapping[str, Any]


_scopes: ContextVar[tuple[Scope, ...]] = ContextVar("runtime_di_override_scopes", default=())


def open_scopes() -> tuple[Scope, ...]:
    """The active scopes of this thread or task, innermost last."""
    return _scopes.get()


@contextmanager
def overriding(scope: Scope) -> Iterator[None]:
    """Apply the overrides to the runtimes that this thread or task opens in the body."""
    _scopes.set((*_scopes.get(), scope))
    try:
        yield
    finally:
        _scopes.set(tuple(other for other in _scopes.get() if other is not scope))


def effective_overrides(plan: Plan, overrides: Mapping[Any, Any]) -> dict[str, Any]:
    """The overrides for ``open()``: its own, over those of inner scopes, over those of outer scopes.

    Raises:
        OverrideError: see `validated_overrides`.
    """
    found: dict[str, Any] = {}
    for scope in _scopes.get():
        if isinstance(plan.runtime, type) and issubclass(plan.runtime, scope.runtime):
            found.update(scope.overrides)
    return validated_overrides(plan, found | _keyed_by_name(plan, overrides))


def validated_overrides(plan: Plan, *overrides: Mapping[Any, Any]) -> dict[str, Any]:
    """Name to object of overrides that are keyed by name or by container attribute.

    Raises:
        OverrideError: an override names an unknown service, or one that is overridden twice, or does not fit its
            annotated type.
    """
    named = _keyed_by_name(plan, *overrides)
    annotated = plan.runtime.service_annotations() if plan.runtime else {}
    problems = []
    for name, value in named.items():
        if name not in plan.services:
            fix = f"override one of {', '.join(plan.services)}"
            problems.append(Problem(name, f"is not a service of {plan.name}", fix=fix))
        elif name in annotated:
            fix = f"pass an object that fits {annotated[name][0]}"
            kind = type(value).__name__
            mismatches = _mismatches(value, *annotated[name])
            problems += [Problem(name, f"the override of type {kind} {text}", fix=fix) for text in mismatches]
    if problems:
        raise OverrideError(f"{plan.name} cannot be opened with these overrides.", problems)
    return named


def _mismatches(value: Any, annotation: Any, module: str) -> list[str]:
    """Why a value does not fit an annotation; imports the annotation's modules if they are not loaded yet."""
    wanted = type_hints.resolve(annotation, module)
    if wanted is type_hints.UNDECIDED:
        with suppress(ImportError):
            wanted = type_hints.resolve_importing(annotation, module)
    return [] if wanted is type_hints.UNDECIDED else conformance.value_mismatches(value, wanted)


def _keyed_by_name(plan: Plan, *overrides: Mapping[Any, Any]) -> dict[str, Any]:
    known = names_of(plan.container)
    named = [(known.get(id(key), str(key)), value) for mapping in overrides for key, value in mapping.items()]
    names = [name for name, _ in named]
    if twice := {name: None for name in names if names.count(name) > 1}:
        problems = [Problem(name, "is overridden twice", fix="pass one override, by name") for name in twice]
        raise OverrideError(f"{plan.name} cannot be opened with these overrides.", problems)
    return dict(named)
