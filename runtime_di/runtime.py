"""What an entrypoint holds: a typed view of the services of one opening."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, dataclass_transform

from dependency_injector import containers, providers

from runtime_di import conformance
from runtime_di.errors import CapabilityError, CloseError, OverrideError, Problem, RuntimeDIError, SettingsError
from runtime_di.lifecycle import Lifecycle
from runtime_di.main import run_main
from runtime_di.phases import Phase
from runtime_di.plan import PlainProvider, Plan, declared
from runtime_di.requirements import unmet
from runtime_di.services import RuntimeContainer
from runtime_di.settings import RuntimeSettings
from runtime_di.wiring import refuse_misspelt

if TYPE_CHECKING:
    from runtime_di.plan import ServiceSpec


class _Service:
    """Resolves a service on its first read; the value then lies in the instance, and a warm read is a plain one."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, runtime: Runtime | None, owner: type[Runtime]) -> Any:
        return self if runtime is None else runtime._lifecycle.resolve(self.name)


@dataclass_transform(frozen_default=True, eq_default=False)
class Runtime:
    """Base of the typed views; a subclass names its container and annotates one attribute a service.

    ``class MyRuntime(TrainingRuntime, container=MyContainer): retriever: Retriever``

    Attributes:
        settings: the validated settings; a subclass annotates its own class.
        container: the opened container, for ``@inject`` and for providers that are no services.
    """

    settings: RuntimeSettings

    _container_class: ClassVar[type[RuntimeContainer]] = RuntimeContainer
    _plan: ClassVar[Plan | None] = None

    if not TYPE_CHECKING:

        def __init__(self) -> None:
            raise TypeError(f"{type(self).__name__} is not made by calling it; use {type(self).__name__}.open(settings)")

    def __init_subclass__(cls, container: type[RuntimeContainer] | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._plan = None
        if container is not None:
            cls._container_class = container
        for name in Plan(cls._container_class).services:
            if name not in cls.own_names():
                setattr(cls, name, _Service(name))

    @classmethod
    def own_names(cls) -> set[str]:
        """Names that no service may have."""
        return {name for name in (*vars(Runtime), "settings") if not name.startswith("_")}

    @classmethod
    def service_annotations(cls) -> dict[str, tuple[Any, str]]:
        """Service to its annotation and the module that it was written in."""
        own = cls.own_names()
        return {
            name: found
            for name, found in conformance.annotations_of(cls).items()
            if name not in own and not name.startswith("_")
        }

    @classmethod
    def settings_class(cls) -> type[RuntimeSettings]:
        """The class that ``settings`` is annotated with."""
        annotation, module = conformance.annotations_of(cls)["settings"]
        resolved = conformance.resolve(annotation, module)
        if not (isinstance(resolved, type) and issubclass(resolved, RuntimeSettings)):
            raise TypeError(f"{cls.__name__} annotates 'settings' with {annotation}, which is no RuntimeSettings")
        return resolved

    @classmethod
    def plan(cls) -> Plan:
        """The services of this runtime, their edges and their order; nothing is built."""
        return Plan(cls._container_class, cls)

    @classmethod
    def open(
        cls,
        settings: RuntimeSettings | None = None,
        *,
        overrides: Mapping[Any, Any] | None = None,
        wire: Sequence[ModuleType] = (),
    ) -> Self:
        """Validate everything and return a runtime whose services are built when they are first asked for.

        Args:
            settings: validated anew here; the class's defaults if not given.
            overrides: service, by name or by container attribute, to the object that takes its place.
            wire: modules whose ``@inject`` functions receive services of this runtime until it is closed.

        Raises:
            SettingsError: the settings are invalid, or of another class than this runtime's.
            PlanError: the container is wrongly declared.
            OverrideError: an override names no service, or does not fit its annotated type.
            CapabilityError: this machine lacks what the settings of an enabled service need.
        """
        settings = cls._validated(settings)
        plan = cls._checked_plan()
        given = cls._checked_overrides(plan, overrides or {})
        runtime = object.__new__(cls)
        container = containers.DynamicContainer()
        lifecycle = Lifecycle(plan, settings, given, vars(runtime), partial(_call_plain, container, {}))
        problems = list(unmet(lifecycle.enabled, settings))
        if problems:
            raise CapabilityError(f"This machine lacks what {cls.__name__} needs as set.", problems)
        vars(runtime).update(settings=settings, container=container, _lifecycle=lifecycle)
        _bind(container, plan, settings, lifecycle)
        if wire:
            refuse_misspelt(wire, container)
            container.wire(modules=wire)
        return runtime

    @classmethod
    def main(cls, body: Callable[[Self], object], argv: Sequence[str] | None = None) -> NoReturn:
        """Load settings, open, run ``body``, close, and exit.

        Exits with 0, with 2 if settings, command line or machine do not allow the start, with 1 after any other
        error, and with 128 + signal when stopped by a signal. What the user can mend is told without a traceback.
        """
        run_main(cls, body, argv)

    def start(self, through: Phase = Phase.WARMUP) -> Self:
        """Build every enabled service of the phases up to ``through`` now, in order."""
        self._lifecycle.start(through)
        return self

    def close(self) -> None:
        """Take down in reverse what was built; a second call does nothing.

        Raises:
            CloseError: teardowns failed; all of them have run.
        """
        self._close(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close(error)

    @property
    def built(self) -> tuple[str, ...]:
        """Names of the services built so far, in build order."""
        return tuple(self._lifecycle.built)

    @property
    def disabled(self) -> Mapping[str, str]:
        """Name to reason of the services that the settings switch off."""
        return {name: str(problem) for name, problem in self._lifecycle.disabled.items()}

    if TYPE_CHECKING:

        @property
        def container(self) -> containers.DynamicContainer: ...
        @property
        def _lifecycle(self) -> Lifecycle: ...

    def _close(self, failure: BaseException | None) -> None:
        errors, interrupt = self._lifecycle.close(failure)
        self.container.unwire()
        for provider in self.container.providers.values():
            if isinstance(provider, providers.BaseSingleton):
                provider.reset()
        leaving = interrupt or failure
        if leaving is not None:
            for error in errors:
                leaving.add_note(f"teardown error: {type(error).__name__}: {error} ({'; '.join(error.__notes__)})")
        if interrupt is not None:
            raise interrupt
        if errors and failure is None:
            raise CloseError(f"{type(self).__name__} did not close cleanly", errors)

    @classmethod
    def _validated(cls, settings: RuntimeSettings | None) -> RuntimeSettings:
        wanted = cls.settings_class()
        if settings is None:
            return wanted()
        if not isinstance(settings, wanted):
            raise SettingsError(
                f"{cls.__name__} cannot open with a {type(settings).__name__}.\n"
                f"  fix: give it a {wanted.__name__}, made by {wanted.__name__}.load() or {wanted.__name__}(...)"
            )
        return settings.revalidated()

    @classmethod
    def _checked_plan(cls) -> Plan:
        if cls._plan is None:
            plan = cls.plan()
            plan.check()
            cls._plan = plan
        return cls._plan

    @classmethod
    def _checked_overrides(cls, plan: Plan, overrides: Mapping[Any, Any]) -> dict[str, Any]:
        names = {id(provider): name for name, provider in declared(cls._container_class).items()}
        given = {key if isinstance(key, str) else names.get(id(key), str(key)): value for key, value in overrides.items()}
        annotated = cls.service_annotations()
        problems = []
        for name, value in given.items():
            if name not in plan.services:
                fix = f"override one of {', '.join(plan.services)}"
                problems.append(Problem(name, f"no service of {cls.__name__}", fix=fix))
            elif name in annotated:
                wanted = conformance.resolve(*annotated[name])
                misfits = [] if wanted is conformance.UNDECIDED else conformance.value_misfits(value, wanted)
                fix = f"give an object that fits {annotated[name][0]}"
                problems += [Problem(name, f"the given {type(value).__name__} {misfit}", fix=fix) for misfit in misfits]
        if problems:
            raise OverrideError(f"{cls.__name__} cannot be opened with these overrides.", problems)
        return given


def _bind(container: containers.DynamicContainer, plan: Plan, settings: RuntimeSettings, lifecycle: Lifecycle) -> None:
    """Fill the opened container: argument-less Singletons for services, copies of every other provider."""
    settings_provider = providers.Object(settings)
    services = {name: providers.Singleton(lifecycle.resolve, name) for name in plan.services}
    rebound: dict[int, Any] = {}
    for owner in plan.container.__mro__:
        for name, provider in getattr(owner, "cls_providers", {}).items():
            rebound[id(provider)] = settings_provider if name == "settings" else services.get(name)
    rebound = {key: value for key, value in rebound.items() if value is not None}
    container.settings = settings_provider
    for name, provider in declared(plan.container).items():
        if name != "settings":
            bound = services.get(name) or providers.deepcopy(provider, rebound)
            container.set_provider(name, bound)
    container._rebound = rebound


def _call_plain(container: containers.DynamicContainer, copies: dict[int, Any], plain: PlainProvider) -> Any:
    key = id(plain.provider)
    if key not in copies:
        copies[key] = providers.deepcopy(plain.provider, container._rebound)
    return copies[key]()
