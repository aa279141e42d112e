"""How a container declares its services."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar, overload

from dependency_injector import containers, providers

from runtime_di.errors import ServiceError
from runtime_di.phases import Phase
from runtime_di.plan.graph import ServiceGraph
from runtime_di.settings.model import RuntimeSettings

T = TypeVar("T")


class Declaration:
    """Phase and factory of a declared provider. Calling it is an error: only an open runtime builds services."""

    def __init__(self, phase: Phase, factory: Callable[..., Any]) -> None:
        self.phase = phase
        self.factory = factory

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        name = getattr(self.factory, "__name__", repr(self.factory))
        raise ServiceError(
            f"The service of factory '{name}' was requested from its declaration.\n"
            "  fix: open a Runtime of this container, and request the service from it"
        )


@overload
def service(
    phase: Phase, factory: Callable[..., Generator[T, Any, Any]], /, *args: Any, **kwargs: Any
) -> providers.Singleton[T]: ...
@overload
def service(
    phase: Phase, factory: Callable[..., Iterator[T]], /, *args: Any, **kwargs: Any
) -> providers.Singleton[T]: ...
@overload
def service(phase: Phase, factory: Callable[..., T], /, *args: Any, **kwargs: Any) -> providers.Singleton[T]: ...
def service(phase: Phase, factory: Callable[..., Any], /, *args: Any, **kwargs: Any) -> providers.Singleton[Any]:
    """Declare a service.

    Args:
        phase: the phase in which it is built.
        factory: creates the service; a generator function yields it, and the code after its ``yield`` is teardown.
        *args: the factory's arguments: other services, ``settings.provided`` paths, or plain values.
        **kwargs: further arguments, by name.

    Returns:
        A declaration, for the body of a `RuntimeContainer` and as an argument of other services.
    """
    return providers.Singleton(Declaration(phase, factory), *args, **kwargs)


class RuntimeContainer(containers.DeclarativeContainer):
    """Base of the containers that declare an entrypoint's services.

    Attributes:
        settings: the settings of the open runtime, as an argument of services.
        plan: the `Plan` of the open runtime, as an argument of services.
    """

    settings: providers.Dependency[RuntimeSettings] = providers.Dependency(instance_of=RuntimeSettings)
    plan: providers.Dependency[ServiceGraph] = providers.Dependency()
