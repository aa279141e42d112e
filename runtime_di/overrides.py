"""Overrides: objects that take the place of services, for one opening or for every opening within a scope."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runtime_di import conformance, hints
from runtime_di.declarations import names_of
from runtime_di.errors import OverrideError, Problem
from runtime_di.plan import Plan

if TYPE_CHECKING:
    from runtime_di.runtime import Runtime


@dataclass(frozen=True, eq=False, slots=True)
class Scope:
    """Overrides of the openings of a Runtime and of its subclasses."""

    runtime: type[Runtime]
    overrides: Mapping[str, Any]


_scopes: ContextVar[tuple[Scope, ...]] = ContextVar("runtime_di_override_scopes", default=())


def open_scopes() -> tuple[Scope, ...]:
    """The scopes that this thread or task is in, the innermost last."""
    return _scopes.get()


@contextmanager
def overriding(scope: Scope) -> Iterator[None]:
    """Let openings of this thread or task have the overrides until the body ends."""
    _scopes.set((*_scopes.get(), scope))
    try:
        yield
    finally:
        _scopes.set(tuple(other for other in _scopes.get() if other is not scope))


def in_force(runtime: type[Runtime], plan: Plan, given: Mapping[Any, Any]) -> dict[str, Any]:
    """What an opening overrides: as its scopes say, the inner over the outer, and over these as it is given.

    Raises:
        OverrideError: see `checked`.
    """
    found: dict[str, Any] = {}
    for scope in _scopes.get():
        if issubclass(runtime, scope.runtime):
            found.update(scope.overrides)
    return checked(runtime, plan, found | _by_name(runtime, plan, given))


def checked(runtime: type[Runtime], plan: Plan, *given: Mapping[Any, Any]) -> dict[str, Any]:
    """Name to object, as ``given`` by name or by container attribute.

    Raises:
        OverrideError: an override names no service, or one that is given already, or does not fit its annotated type.
    """
    named = _by_name(runtime, plan, *given)
    annotated = runtime.service_annotations()
    problems = []
    for name, value in named.items():
        if name not in plan.services:
            fix = f"override one of {', '.join(plan.services)}"
            problems.append(Problem(name, f"no service of {runtime.__name__}", fix=fix))
        elif name in annotated:
            misfits = _misfits(value, *annotated[name])
            fix = f"give an object that fits {annotated[name][0]}"
            problems += [Problem(name, f"the given {type(value).__name__} {misfit}", fix=fix) for misfit in misfits]
    if problems:
        raise OverrideError(f"{runtime.__name__} cannot be opened with these overrides.", problems)
    return named


def _misfits(value: Any, annotation: Any, module: str) -> list[str]:
    """Why a value does not fit an annotation, for which a module is imported that nothing has imported yet."""
    wanted = hints.resolve(annotation, module)
    if wanted is hints.UNDECIDED:
        with suppress(ImportError):
            wanted = hints.resolve_importing(annotation, module)
    return [] if wanted is hints.UNDECIDED else conformance.value_misfits(value, wanted)


def _by_name(runtime: type[Runtime], plan: Plan, *given: Mapping[Any, Any]) -> dict[str, Any]:
    known = names_of(plan.container)
    named = [(known.get(id(key), str(key)), value) for mapping in given for key, value in mapping.items()]
    names = [name for name, _ in named]
    if twice := {name: None for name in names if names.count(name) > 1}:
        problems = [Problem(name, "is given twice", fix="give it by name alone, once") for name in twice]
        raise OverrideError(f"{runtime.__name__} cannot be opened with these overrides.", problems)
    return dict(named)
