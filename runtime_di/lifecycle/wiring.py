"""Wires modules, and refuses markers that name no provider, which dependency-injector accepts silently."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Annotated, Any, get_args, get_origin

from dependency_injector import containers, providers
from dependency_injector.wiring import Closing, Provide, Provider, ProvidersMap

from runtime_di.errors import Problem, ServiceError

_MARKERS: Any = (Provide, Provider, Closing)


def wire_modules(modules: Sequence[ModuleType], container: containers.DynamicContainer) -> None:
    """Inject the providers of ``container`` into the ``@inject`` functions of ``modules``.

    Raises:
        ServiceError: a marker names no provider of the container; nothing is wired.
    """
    if not modules:
        return
    names = ", ".join(container.providers)
    known = ProvidersMap(container)
    problems = [
        Problem(
            f"{module.__name__}.{name}",
            f"asks for {_description(marked)}, which is not a service",
            fix=f"name one of {names}",
        )
        for module in modules
        for name, marked in _markers(module)
        if not isinstance(known.resolve_provider(marked), providers.Provider)
    ]
    if problems:
        raise ServiceError("The wired modules ask for services that do not exist.", problems)
    container.wire(modules=modules)


def _markers(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Every marker's place in the module, and the name or provider in the marker."""
    members = [*inspect.getmembers(module)]
    for name, member in inspect.getmembers(module, inspect.isclass):
        members += [(f"{name}.{own}", _function(value)) for own, value in vars(member).items()]
    for name, member in members:
        candidates = [member]
        if inspect.isfunction(member):
            for parameter in inspect.signature(member).parameters.values():
                candidates += [parameter.default, *_annotated(parameter.annotation)]
        for candidate in candidates:
            marked = candidate
            while isinstance(marked, _MARKERS):
                marked = marked.provider
            if marked is not candidate:
                yield name, marked


def _function(member: Any) -> Any:
    return member.__func__ if isinstance(member, staticmethod | classmethod) else member


def _annotated(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()


def _description(marked: Any) -> str:
    return repr(marked) if isinstance(marked, str) else f"a provider of another container, {marked!r}"
