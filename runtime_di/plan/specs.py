"""The specification of one declared service: its phase, its factory and the factory's arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dependency_injector import providers

from runtime_di.phases import Phase


@dataclass(frozen=True, slots=True)
class SettingsPath:
    """An argument ``settings.provided.a.b``; an empty path is the whole settings."""

    names: tuple[str, ...]

    def __str__(self) -> str:
        return ".".join(self.names)

    def read(self, settings: Any) -> Any:
        """The value in ``settings``; ``None`` if a section on the path is ``None``."""
        for name in self.names:
            if settings is None:
                return None
            settings = getattr(settings, name)
        return settings


@dataclass(frozen=True, slots=True)
class ServiceEdge:
    """An argument that is another service, or its attribute ``service.provided.a.b``."""

    name: str
    attributes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlainProvider:
    """An argument that is a plain dependency-injector provider, such as a Factory."""

    provider: providers.Provider[Any]
    services: tuple[str, ...]
    paths: tuple[SettingsPath, ...]


@dataclass(frozen=True, slots=True)
class Value:
    """An argument that is passed unchanged."""

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
        """All arguments of the factory."""
        return (*self.args, *self.kwargs.values())

    @cached_property
    def dependencies(self) -> tuple[str, ...]:
        """Names of the services that the factory receives, each once."""
        names: dict[str, None] = {}
        for injection in self.injections:
            if isinstance(injection, ServiceEdge):
                names[injection.name] = None
            elif isinstance(injection, PlainProvider):
                names.update(dict.fromkeys(injection.services))
        return tuple(names)

    @cached_property
    def settings(self) -> tuple[SettingsPath, ...]:
        """Paths of the settings that the factory receives."""
        return tuple(
            path
            for injection in self.injections
            for path in ((injection,) if isinstance(injection, SettingsPath) else getattr(injection, "paths", ()))
        )
