"""What a container declares, read without building anything: services, edges and their one order."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dependency_injector import providers

from runtime_di.errors import PlanError, Problem
from runtime_di.phases import Phase
from runtime_di.services import Declaration, RuntimeContainer

if TYPE_CHECKING:
    from runtime_di.runtime import Runtime


@dataclass(frozen=True, slots=True)
class SettingsPath:
    """An argument ``settings.provided.a.b``; an empty path is the whole settings."""

    names: tuple[str, ...]

    def __str__(self) -> str:
        return ".".join(self.names)

    def read(self, settings: Any) -> Any:
        """The value in ``settings``; ``None`` where a section on the way is ``None``."""
        for name in self.names:
            if settings is None:
                return None
            settings = getattr(settings, name)
        return settings


@dataclass(frozen=True, slots=True)
class ServiceEdge:
    """An argument that is another service, or ``service.provided.a.b`` of it."""

    name: str
    attributes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlainProvider:
    """An argument that is a provider of dependency-injector's own, such as a Factory."""

    provider: providers.Provider[Any]
    services: tuple[str, ...]
    paths: tuple[SettingsPath, ...]


@dataclass(frozen=True, slots=True)
class Value:
    """An argument that is given as it is."""

    value: Any


Injection = SettingsPath | ServiceEdge | PlainProvider | Value


@dataclass(frozen=True)
class ServiceSpec:
    """One declared service."""

    name: str
    phase: Phase
    factory: Callable[..., Any] = field(repr=False)
    args: tuple[Injection, ...] = ()
    kwargs: Mapping[str, Injection] = field(default_factory=dict)

    @property
    def injections(self) -> tuple[Injection, ...]:
        return (*self.args, *self.kwargs.values())

    @cached_property
    def dependencies(self) -> tuple[str, ...]:
        """Names of the services that it is built from, each once."""
        names: dict[str, None] = {}
        for injection in self.injections:
            if isinstance(injection, ServiceEdge):
                names[injection.name] = None
            elif isinstance(injection, PlainProvider):
                names.update(dict.fromkeys(injection.services))
        return tuple(names)

    @cached_property
    def settings(self) -> tuple[SettingsPath, ...]:
        """Paths of the settings that it reads."""
        return tuple(
            path
            for injection in self.injections
            for path in ((injection,) if isinstance(injection, SettingsPath) else getattr(injection, "paths", ()))
        )


class Plan:
    """The services of a container and the order in which every rank builds them.

    Attributes:
        container: the container class that was read.
        runtime: the Runtime class whose annotations the services must fit, if there is one.
        services: name to what is declared, in the order of declaration.
        order: names in build order: by phase, then dependencies, then declaration.
        problems_found: problems met while reading, told by `check`.
    """

    def __init__(self, container: type[RuntimeContainer], runtime: type[Runtime] | None = None) -> None:
        self.container = container
        self.runtime = runtime
        reader = _Reader(container)
        self.services: Mapping[str, ServiceSpec] = reader.read()
        self.unreadable: tuple[Problem, ...] = tuple(reader.problems)
        self.order: tuple[str, ...] = tuple(_order(self.services))

    @property
    def name(self) -> str:
        return self.runtime.__name__ if self.runtime else self.container.__name__

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Name to place in `order`."""
        return {name: place for place, name in enumerate(self.order)}

    @cached_property
    def edges(self) -> tuple[tuple[str, str], ...]:
        """Pairs of a service and one it is built from."""
        return tuple((name, needed) for name in self.order for needed in self.services[name].dependencies)

    @cached_property
    def dependants(self) -> Mapping[str, tuple[str, ...]]:
        """Name to the services built from it."""
        found: dict[str, list[str]] = {name: [] for name in self.services}
        for name, needed in self.edges:
            if needed in found:
                found[needed].append(name)
        return {name: tuple(names) for name, names in found.items()}

    @property
    def phases(self) -> Mapping[Phase, tuple[str, ...]]:
        """Phase to its services in build order."""
        return {phase: tuple(name for name in self.order if self.services[name].phase == phase) for phase in Phase}

    def closure(self, name: str) -> set[str]:
        """A service and everything that it is built from."""
        found, pending = {name}, [name]
        while pending:
            new = set(self.services[pending.pop()].dependencies) - found
            found |= new
            pending += new
        return found

    def check(self) -> None:
        """Raise a `PlanError` that tells every fault of the declarations together, with drawn paths."""
        from runtime_di.check import problems  # noqa: PLC0415 - check reads plans

        found = list(problems(self))
        if found:
            count = "1 problem" if len(found) == 1 else f"{len(found)} problems"
            raise PlanError(f"{self.name} cannot be built as declared: {count}.", found)

    def text(self) -> str:
        """A table of the order: phase, service, what it is built from, and the settings it reads."""
        lines = []
        for phase, names in self.phases.items():
            lines += [phase.name] if names else []
            for name in names:
                spec = self.services[name]
                needs = ", ".join((*spec.dependencies, *(f"settings.{path}" for path in spec.settings)))
                lines.append(f"  {name}" + (f" <- {needs}" if needs else ""))
        return "\n".join(lines)

    def mermaid(self) -> str:
        """A Mermaid flow chart, one box a phase."""
        lines = ["flowchart TD"]
        for phase, names in self.phases.items():
            if names:
                lines += [f"  subgraph {phase.name}", *(f"    {name}" for name in names), "  end"]
        return "\n".join([*lines, *(f"  {needed} --> {name}" for name, needed in self.edges)])

    __str__ = text


def declared(container: type[RuntimeContainer]) -> dict[str, providers.Provider[Any]]:
    """Name to provider of a container class, in order of declaration; a redeclared name keeps its place."""
    found: dict[str, providers.Provider[Any]] = {}
    for owner in reversed(container.__mro__):
        found.update(getattr(owner, "cls_providers", {}))
    return {name: container.providers[name] for name in found}


class _Reader:
    """Reads the declarations of one container; edges are bound by name, so that a redeclaration takes them over."""

    def __init__(self, container: type[RuntimeContainer]) -> None:
        self.container = container
        self.providers = declared(container)
        self.names = {
            id(provider): name
            for owner in container.__mro__
            for name, provider in getattr(owner, "cls_providers", {}).items()
        }
        self.problems: list[Problem] = []

    def read(self) -> dict[str, ServiceSpec]:
        return {
            name: self._spec(name, provider, provider.provides)
            for name, provider in self.providers.items()
            if isinstance(provider, providers.Singleton) and isinstance(provider.provides, Declaration)
        }

    def _spec(self, name: str, provider: providers.Singleton[Any], declaration: Declaration) -> ServiceSpec:
        args = tuple(self._injection(name, arg) for arg in provider.args)
        kwargs = {key: self._injection(name, arg) for key, arg in provider.kwargs.items()}
        return ServiceSpec(name, declaration.phase, declaration.factory, args, kwargs)

    def _injection(self, owner: str, argument: Any) -> Injection:
        if not isinstance(argument, providers.Provider):
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
    """The provider under ``.provided`` and the attributes read from it."""
    attributes: list[str] = []
    while isinstance(provider, providers.AttributeGetter | providers.ProvidedInstance):
        if isinstance(provider, providers.AttributeGetter):
            attributes.insert(0, provider.name)
        provider = provider.provides
    return provider, tuple(attributes)


def _is_service(provider: providers.Provider[Any]) -> bool:
    return isinstance(provider, providers.Singleton) and isinstance(provider.provides, Declaration)


def _foreign(container: type[RuntimeContainer], owner: str, provider: providers.Provider[Any]) -> Problem:
    homes = {other.__name__: name for other in _containers() for name, own in other.cls_providers.items() if own is provider}
    name = next(iter(homes.values()), "?")
    return Problem(
        name,
        f"not declared by {container.__name__}",
        fix=f"declare it in {container.__name__}, or drop '{owner}' there",
        details=(("asked for by", f"{owner} -> {name}"), ("declared in", ", ".join(sorted(homes)) or "no container")),
    )


def _containers() -> Iterator[type[RuntimeContainer]]:
    pending = [RuntimeContainer]
    while pending:
        container = pending.pop()
        yield container
        pending += container.__subclasses__()


def _order(services: Mapping[str, ServiceSpec]) -> Iterator[str]:
    """Sort by phase, then dependencies, then declaration; what lies on a cycle comes last in its phase."""
    declared_at = {name: place for place, name in enumerate(services)}
    for phase in Phase:
        members = {name: spec for name, spec in services.items() if spec.phase == phase}
        waiting = {name: {needed for needed in spec.dependencies if needed in members} for name, spec in members.items()}
        needed_by: dict[str, list[str]] = {}
        for name, needed in waiting.items():
            for other in needed:
                needed_by.setdefault(other, []).append(name)
        ready = [(declared_at[name], name) for name, needed in waiting.items() if not needed]
        heapq.heapify(ready)
        while ready:
            _, name = heapq.heappop(ready)
            yield name
            del waiting[name]
            for other in needed_by.get(name, ()):
                waiting[other].discard(name)
                if not waiting[other]:
                    heapq.heappush(ready, (declared_at[other], other))
        yield from waiting
