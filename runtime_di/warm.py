"""What warm reads find without the lifecycle: values in the Runtime's instance, Singletons in its container."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any

from dependency_injector import containers, providers

from runtime_di.declarations import declared, names_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime_di.plan import Plan
    from runtime_di.settings import RuntimeSettings
    from runtime_di.specs import PlainProvider


class Warm:
    """The cached side of one opening.

    Attributes:
        attributes: the instance dictionary of the Runtime.
        container: an argument-less Singleton for every service, and copies of every other provider.
    """

    def __init__(self, attributes: MutableMapping[str, Any]) -> None:
        self.attributes = attributes
        self.container = containers.DynamicContainer()
        self._services: dict[str, providers.Singleton[Any]] = {}
        self._copies: dict[int, Any] = {}

    def bind(self, plan: Plan, settings: RuntimeSettings, resolve: Callable[[str], Any]) -> None:
        """Fill the container; everything in it that names a declaration gets this opening's own provider."""
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
        """Call this opening's copy of a provider that is no service."""
        return self._copy(plain.provider)()

    def publish(self, name: str, value: Any) -> None:
        """Let later reads of the Runtime's attribute find ``value`` without asking."""
        self.attributes[name] = value

    def forget(self) -> None:
        """Let every read ask again."""
        for name, provider in self._services.items():
            self.attributes.pop(name, None)
            provider.reset()

    def release(self) -> None:
        """Undo the wiring, and drop what other providers of the container hold."""
        self.container.unwire()
        self._copies.clear()
        for provider in self.container.traverse(types=[providers.BaseSingleton]):
            provider.reset()

    def _copy(self, provider: providers.Provider[Any]) -> providers.Provider[Any]:
        """A copy bound to this opening, once; what a provider is given stays the very object."""
        for related in (provider, *provider.traverse()):
            self._copies.update((id(given), given) for given in _given(related))
        copied: providers.Provider[Any] = providers.deepcopy(provider, self._copies)
        return copied


def _given(provider: providers.Provider[Any]) -> Iterator[Any]:
    """The plain values in a declaration; asked of the type, since ``.provided`` has every attribute."""
    own = {name: getattr(provider, name) for name in ("provides", "args", "kwargs") if hasattr(type(provider), name)}
    for given in (own.get("provides"), *own.get("args", ()), *own.get("kwargs", {}).values()):
        if not isinstance(given, providers.Provider):
            yield given
