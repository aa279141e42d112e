"""Refuses what dependency-injector's wiring would let pass: a marker that names no provider."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Annotated, Any, get_args, get_origin

from dependency_injector import containers

from runtime_di.errors import Problem, ServiceError


def refuse_misspelt(modules: Sequence[ModuleType], container: containers.DynamicContainer) -> None:
    """Raise a `ServiceError` for every ``Provide["name"]`` in ``modules`` whose name the container lacks."""
    problems = [
        Problem(
            f"{module.__name__}.{name}",
            f"asks for {marked!r}, which is no service",
            fix=f"name one of {', '.join(container.providers)}",
        )
        for module in modules
        for name, marked in _markers(module)
        if marked.split(".")[0] not in container.providers
    ]
    if problems:
        raise ServiceError("The modules to wire ask for services that do not exist.", problems)


def _markers(module: ModuleType) -> Iterator[tuple[str, str]]:
    for name, member in inspect.getmembers(module):
        for qualified, function in _functions(name, member):
            for parameter in inspect.signature(function).parameters.values():
                for candidate in (parameter.default, *_annotated(parameter.annotation)):
                    if getattr(candidate, "__IS_MARKER__", False) and isinstance(candidate.provider, str):
                        yield qualified, candidate.provider


def _functions(name: str, member: Any) -> Iterator[tuple[str, Any]]:
    if inspect.isfunction(member):
        yield name, member
    elif inspect.isclass(member):
        yield from ((f"{name}.{own}", function) for own, function in vars(member).items() if inspect.isfunction(function))


def _annotated(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
