"""What an entrypoint holds: a typed view of the services of one opening."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, dataclass_transform

from dependency_injector import containers

from runtime_di import hints
from runtime_di.errors import CapabilityError, CloseError, PlanError, Problem, SettingsError
from runtime_di.lifecycle import Lifecycle
from runtime_di.main import run_main
from runtime_di.overrides import Scope, checked, in_force, overriding
from runtime_di.phases import Phase
from runtime_di.plan import Plan
from runtime_di.requirements import unmet
from runtime_di.services import RuntimeContainer
from runtime_di.settings import RuntimeSettings
from runtime_di.warm import Warm
from runtime_di.wiring import wire_modules

_NAMES_OF_CONTAINERS = frozenset(dir(containers.DynamicContainer()))


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
            name = type(self).__name__
            raise TypeError(f"{name} is not made by calling it; use {name}.open(settings)")

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
        return {"settings", "container", *vars(Runtime), *_NAMES_OF_CONTAINERS}

    @classmethod
    def service_annotations(cls) -> dict[str, tuple[Any, str]]:
        """Service to its annotation and the module that it was written in."""
        own = cls.own_names()
        return {
            name: found
            for name, found in hints.annotations_of(cls).items()
            if name not in own and not name.startswith("_") and not hints.is_class_variable(*found)
        }

    @classmethod
    def settings_class(cls) -> type[RuntimeSettings]:
        """The class that ``settings`` is annotated with."""
        annotation, module = hints.annotations_of(cls)["settings"]
        resolved = hints.resolve(annotation, module)
        if not (isinstance(resolved, type) and issubclass(resolved, RuntimeSettings)):
            what = f"its annotation {annotation} is no RuntimeSettings that module {module} knows"
            fix = f"annotate a class of that module in {cls.__name__}"
            raise PlanError(f"{cls.__name__} cannot be built as declared.", [Problem("settings", what, fix=fix)])
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
            overrides: service, by name or by container attribute, to the object that takes its place; stronger than
                those of an `overriding` scope.
            wire: modules whose ``@inject`` functions receive services of this runtime until it is closed.

        Raises:
            SettingsError: the settings are invalid, or of another class than this runtime's.
            PlanError: the container is wrongly declared.
            OverrideError: an override names no service, or does not fit its annotated type.
            CapabilityError: this machine lacks what the settings of an enabled service need.
            ServiceError: a module to wire asks for a service that does not exist.
        """
        settings = cls._validated(settings)
        plan = cls._checked_plan()
        given = in_force(cls, plan, overrides or {})
        runtime = object.__new__(cls)
        warm = Warm(vars(runtime))
        lifecycle = Lifecycle(plan, settings, given, warm)
        try:
            if problems := list(unmet(lifecycle.enabled, settings)):
                raise CapabilityError(f"This machine lacks what {cls.__name__} needs as set.", problems)
            warm.bind(plan.overriding(given), settings, lifecycle.resolve)
            vars(runtime).update(settings=settings, container=warm.container, _lifecycle=lifecycle)
            wire_modules(wire, warm.container)
        except BaseException:
            lifecycle.close(None)
            raise
        return runtime

    @classmethod
    def overriding(cls, overrides: Mapping[Any, Any] | None = None, /, **by_name: Any) -> AbstractContextManager[None]:
        """Have every opening within a ``with`` block take these overrides; an open runtime keeps what it has.

        The scope is that of the thread or task that enters it; it holds for subclasses too, and an inner scope is
        stronger than an outer one.

        Args:
            overrides: as for `open`.
            **by_name: the same, by name.

        Raises:
            OverrideError: as for `open`, at once.
        """
        given = checked(cls, cls._checked_plan(), overrides or {}, by_name)
        return overriding(Scope(cls, given))

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
