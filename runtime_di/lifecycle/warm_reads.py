"""Warm reads: built services cached in the Runtime instance and in the Singletons of its container."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from typing import Any

from dependency_injector import containers, providers

from runtime_di.plan.model import Plan
from runtime_di.plan.reading import declared, names_of
from runtime_di.plan.specs import PlainProvider
from runtime_di.settings.model import RuntimeSettings


class WarmReads:
    """The caches of one open runtime.

    Attributes:
        attributes: the instance dictionary of the Runtime.
        container: a Singleton without arguments for every service, and a copy of every other provider.
    """

    def __init__(self, attributes: MutableMapping[str, Any]) -> None:
        self.attributes = attributes
        self.container = containers.DynamicContainer()
        self._services: dict[str, providers.Singleton[Any]] = {}
        self._copies: dict[int, Any] = {}

    def bind(self, plan: Plan, settings: RuntimeSettings, resolve: Callable[[str], Any]) -> None:
        """Fill the container; references to declarations are replaced by the providers of this open runtime."""
        self._services = {name: providers.Singleton(partial(resolve, name)) for name in plan.services}
        bound: dict[str, providers.Provider[Any]] = {
            **self._services,
            "settings": providers.Object(settings),
            "plan": providers.Object(plan),
        }
        self._copies = {key: bound[name] for key, name in names_of(plan.container).items() if name in bound}
        self.container.declarative_parent = plan.container
        for name, provider in declared(plan.container).items():
            self.container.set_provider(name, bound.get(name) or self._copy(provider))

    def call(self, plain: PlainProvider) -> Any:
        """Call this open runtime's copy of a provider that is not a service."""
        return self._copy(plain.provider)()

    def publish(self, name: str, value: Any) -> None:
        """Store ``value`` on the instance, so that later reads of the attribute do not call the lifecycle."""
        self.attributes[name] = value

    def forget(self) -> None:
        """Clear the caches, so that every read calls the lifecycle again."""
        for name, provider in self._services.items():
            self.attributes.pop(name, None)
            provider.reset()

    def release(self) -> None:
        """Undo the wiring, and drop the objects cached by other providers of the container."""
        self.container.unwire()
        self._copies.clear()
        for provider in self.container.traverse(types=[providers.BaseSingleton]):
            provider.reset()

    def _copy(self, provider: providers.Provider[Any]) -> providers.Provider[Any]:
        """The copy of a provider for this open runtime, created once; plain arguments keep their identity."""
        for related in (provider, *provider.traverse()):
            self._copies.update((id(value), value) for value in _plain_values(related))
        copied: providers.Provider[Any] = providers.deepcopy(provider, self._copies)
        return copied


def _plain_values(provider: providers.Provider[Any]) -> Iterator[Any]:
    """The plain values in a declaration; the type is asked, since ``.provided`` has every attribute."""
    own = {name: getattr(provider, name) for name in ("provides", "args", "kwargs") if hasattr(type(provider), name)}
    for value in (own.get("provides"), *own.get("args", ()), *own.get("kwargs", {}).values()):
        if not isinstance(value, providers.Provider):
            yield value
