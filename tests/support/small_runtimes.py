"""Containers and runtimes for one test, whose services log what they do."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dependency_injector.wiring import Provide, Provider
from pydantic import PositiveInt

from runtime_di import (
    LaunchSettings,
    Phase,
    Plan,
    Requirement,
    Runtime,
    RuntimeContainer,
    RuntimeSettings,
    Section,
    WritableFolder,
    service,
)

Log = list[str]


def container_of(
    services: Mapping[str, Any], base: type[RuntimeContainer] = RuntimeContainer, name: str = "SmallContainer"
) -> type[RuntimeContainer]:
    """A container class that declares ``services``."""
    return types.new_class(name, (base,), {}, lambda body: body.update(services))


def runtime_of(
    services: Mapping[str, Any] | type[RuntimeContainer],
    annotations: Mapping[str, Any] | None = None,
    settings: type[RuntimeSettings] = RuntimeSettings,
) -> type[Runtime]:
    """A Runtime class of these services, annotated with ``Any`` unless ``annotations`` has another type."""
    container = services if isinstance(services, type) else container_of(services)
    names = Plan(container).services
    annotated = {"settings": settings, **dict.fromkeys(names, Any), **(annotations or {})}
    body = {"__annotations__": annotated, "__module__": __name__}
    return types.new_class(
        "SmallRuntime", (Runtime,), {"container": container}, lambda namespace: namespace.update(body)
    )


def opener(log: Log, name: str, fails: Sequence[BaseException] = ()) -> Callable[..., Any]:
    """A generator factory that logs ``+name`` and ``-name``; its first builds raise ``fails``, one each."""
    failures = list(fails)

    def open_service(*args: Any, **kwargs: Any) -> Iterator[Any]:
        if failures:
            raise failures.pop(0)
        log.append(f"+{name}")
        yield Service(name, args, kwargs)
        log.append(f"-{name}")

    return open_service


def needing(log: Log, name: str) -> Callable[..., Any]:
    """Like `opener`, with parameters that do not accept ``None``."""
    factory = opener(log, name)
    factory.__annotations__.update(args=Service, kwargs=Service)
    return factory


class Service:
    """A service that remembers what it was built from."""

    def __init__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.name, self.args, self.kwargs = name, args, kwargs


def declare(log: Log, phases: Mapping[str, Phase], edges: Mapping[str, Sequence[str]] | None = None) -> dict[str, Any]:
    """Logging services by phase, each with the dependencies in ``edges``."""
    declared: dict[str, Any] = {name: service(phase, opener(log, name)) for name, phase in phases.items()}
    for name, needed in (edges or {}).items():
        declared[name].set_args(*(declared[other] for other in needed))
    return declared


class FolderSettings(Section):
    folder: Path | None = None
    depth: PositiveInt = 1

    def requires(self, launch: LaunchSettings) -> Iterable[Requirement]:
        if self.folder is not None:
            yield WritableFolder("folder", self.folder)


class JobSettings(RuntimeSettings):
    writer: FolderSettings = FolderSettings()
    timers: FolderSettings = FolderSettings()
    retriever: FolderSettings | None = None


NOT_A_FOLDER = Path(__file__) / "below"


def reading(log: Log, *names: str) -> dict[str, Any]:
    """Services that read the settings section of their own name."""
    return {
        name: service(Phase.RUNTIME, opener(log, name), getattr(RuntimeContainer.settings.provided, name))
        for name in names
    }


def module_with(**functions: Any) -> types.ModuleType:
    """A module that has these members, as if written in it."""
    module = types.ModuleType("wired_for_a_test")
    for name, member in functions.items():
        if hasattr(member, "__module__") and not isinstance(member, Provide | Provider):
            member.__module__ = module.__name__
        setattr(module, name, member)
    return module
