"""How a container declares its services."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, overload

from dependency_injector import containers, providers

from runtime_di.errors import ServiceError
from runtime_di.phases import Phase
from runtime_di.settings import RuntimeSettings

if TYPE_CHECKING:
    from runtime_di.plan import Plan

T = TypeVar("T")


class Declaration:
    """What a declared provider carries; it refuses to be called, since only an opened runtime builds services."""

    def __init__(self, phase: Phase, factory: Callable[..., Any]) -> None:
        self.phase = phase
        self.factory = factory

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        name = getattr(self.factory, "__name__", repr(self.factory))
        raise ServiceError(
            f"The service that '{name}' makes was asked of a declaration.\n"
            "  fix: open a Runtime of this container, and ask that"
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
        phase: when it is built.
        factory: makes it; a generator function yields it, and what follows its ``yield`` is teardown.
        *args: what the factory is given: other services, ``settings.provided`` paths, or plain values.
        **kwargs: the same by name.

    Returns:
        A declaration, for use in the body of a `RuntimeContainer` and as an argument of other services.
    """
    return providers.Singleton(Declaration(phase, factory), *args, **kwargs)


class RuntimeContainer(containers.DeclarativeContainer):
    """Base of the containers that declare an entrypoint's services; what opens is there for them to be built from."""

    settings: providers.Dependency[RuntimeSettings] = providers.Dependency(instance_of=RuntimeSettings)
    plan: providers.Dependency[Plan] = providers.Dependency()
