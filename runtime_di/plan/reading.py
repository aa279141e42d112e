"""Reads the declarations of a container without building anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard, cast

from dependency_injector import providers

from runtime_di.errors import Problem
from runtime_di.plan.declarations import Declaration, RuntimeContainer
from runtime_di.plan.specs import Injection, PlainProvider, ServiceEdge, ServiceSpec, SettingsPath, Value


def declared(container: type[RuntimeContainer]) -> dict[str, providers.Provider[Any]]:
    """Name to provider of a container class, in declaration order; a redeclared name keeps its position."""
    found: dict[str, providers.Provider[Any]] = {}
    for owner in reversed(container.__mro__):
        found.update(getattr(owner, "cls_providers", {}))
    return {name: container.providers[name] for name in found}


def names_of(container: type[RuntimeContainer]) -> dict[int, str]:
    """``id()`` of a provider to its name, redeclared providers included."""
    return {
        id(provider): name
        for owner in container.__mro__
        for name, provider in getattr(owner, "cls_providers", {}).items()
    }


class Reader:
    """Reads the declarations of one container. Edges are bound by name, so that a redeclared service inherits them."""

    def __init__(self, container: type[RuntimeContainer]) -> None:
        self.container = container
        self.providers = declared(container)
        self.names = names_of(container)
        self.problems: list[Problem] = []

    def read(self) -> dict[str, ServiceSpec]:
        """Name to service, in declaration order; `problems` collects what cannot be read."""
        services = {name: provider for name, provider in self.providers.items() if _is_service(provider)}
        first_names: dict[int, str] = {}
        for name, provider in services.items():
            first = first_names.setdefault(id(provider), name)
            if first != name:
                self.problems.append(
                    Problem(name, f"is '{first}' by another name", fix=f"remove it, and use '{first}'")
                )
        return {name: self._spec(name, provider) for name, provider in services.items()}

    def _spec(self, name: str, provider: providers.Singleton[Any]) -> ServiceSpec:
        declaration = cast("Declaration", provider.provides)
        args = tuple(self._injection(name, arg) for arg in provider.args)
        kwargs = {key: self._injection(name, arg) for key, arg in provider.kwargs.items()}
        return ServiceSpec(name, declaration.phase, declaration.factory, args, kwargs)

    def _injection(self, owner: str, argument: Any) -> Injection:
        if not isinstance(argument, providers.Provider):
            if any(isinstance(part, providers.Provider) for part in _parts(argument)):
                fix = "use providers.List or providers.Dict of dependency-injector"
                what = f"has a plain {type(argument).__name__} argument with a provider in it, which is never resolved"
                self.problems.append(Problem(owner, what, fix=fix))
            return Value(argument)
        root, attributes = _unwrap(argument)
        name = self.names.get(id(root))
        if name == "settings":
            return SettingsPath(attributes)
        if name is not None and _is_service(root):
            return ServiceEdge(name, attributes)
        if _is_service(root):
            self.problems.append(_foreign(self.container, owner, root))
            return Value(None)
        return self._plain(owner, argument)

    def _plain(self, owner: str, provider: providers.Provider[Any]) -> PlainProvider:
        services: dict[str, None] = {}
        paths: list[SettingsPath] = []
        pending, seen = list(provider.related), {id(provider)}
        while pending:
            related = pending.pop()
            if id(related) in seen:
                continue
            seen.add(id(related))
            root, attributes = _unwrap(related)
            name = self.names.get(id(root))
            if name == "settings":
                paths.append(SettingsPath(attributes))
            elif name is not None and _is_service(root):
                services[name] = None
            elif _is_service(root):
                self.problems.append(_foreign(self.container, owner, root))
            else:
                pending += related.related
        return PlainProvider(provider, tuple(services), tuple(paths))


def _unwrap(provider: providers.Provider[Any]) -> tuple[providers.Provider[Any], tuple[str, ...]]:
    """The provider before ``.provided``, and the names of the attributes read from it."""
    attributes: list[str] = []
    while isinstance(provider, providers.AttributeGetter | providers.ProvidedInstance):
        if isinstance(provider, providers.AttributeGetter):
            attributes.insert(0, str(provider.name))
        provider = cast("providers.Provider[Any]", provider.provides)
    return provider, tuple(attributes)


def _is_service(provider: providers.Provider[Any]) -> TypeGuard[providers.Singleton[Any]]:
    return isinstance(provider, providers.Singleton) and isinstance(provider.provides, Declaration)


def _foreign(container: type[RuntimeContainer], owner: str, provider: providers.Provider[Any]) -> Problem:
    declared_in = {
        other.__name__: name for other in _containers() for name, own in other.cls_providers.items() if own is provider
    }
    name = next(iter(declared_in.values()), "?")
    return Problem(
        name,
        f"is not declared by {container.__name__}",
        fix=f"declare it in {container.__name__}, or remove '{owner}' there",
        details=(
            ("requested by", f"{owner} -> {name}"),
            ("declared in", ", ".join(sorted(declared_in)) or "no container"),
        ),
    )


def _containers() -> Iterator[type[RuntimeContainer]]:
    pending = [RuntimeContainer]
    while pending:
        container = pending.pop()
        yield container
        pending += container.__subclasses__()


def _parts(argument: Any) -> Iterable[Any]:
    if isinstance(argument, dict):
        return argument.values()
    return argument if isinstance(argument, list | tuple | set) else ()
