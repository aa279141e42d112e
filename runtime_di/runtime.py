"""The runtime of an entrypoint: a typed view of the services of one opening."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, dataclass_transform

from dependency_injector import containers

from runtime_di.errors import CapabilityError, CloseError, PlanError, Problem, SettingsError
from runtime_di.lifecycle.build import Lifecycle
from runtime_di.lifecycle.overrides import Scope, effective_overrides, overriding, validated_overrides
from runtime_di.lifecycle.requirements import unmet
from runtime_di.lifecycle.warm_reads import WarmReads
from runtime_di.lifecycle.wiring import wire_modules
from runtime_di.main import run_main
from runtime_di.phases import Phase
from runtime_di.plan import type_hints
from runtime_di.plan.declarations import RuntimeContainer
from runtime_di.plan.model import Plan
from runtime_di.settings.model import RuntimeSettings

_NAMES_OF_CONTAINERS = frozenset(dir(containers.DynamicContainer()))


class _Service:
    """Builds a service on its first read. The value is then stored on the instance: later reads are plain ones."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, runtime: Runtime | None, owner: type[Runtime]) -> Any:
        return self if runtime is None else runtime._lifecycle.resolve(self.name)


@dataclass_transform(frozen_default=True, eq_default=False)
class Runtime:
    """Base of the typed views. A subclass names its container and annotates one attribute per service.

    ``class MyRuntime(TrainingRuntime, container=MyContainer): retriever: Retriever``

    Attributes:
        settings: the validated settings; a subclass annotates its own settings class.
        container: the opened container, for ``@inject`` and for providers that are not services.
    """

    settings: RuntimeSettings

    _container_class: ClassVar[type[RuntimeContainer]] = RuntimeContainer
    _plan: ClassVar[Plan | None] = None

    if not TYPE_CHECKING:

        def __init__(self) -> None:
            name = type(self).__name__
            raise TypeError(f"{name} is not created by calling it; use {name}.open(settings)")

    def __init_subclass__(cls, container: type[RuntimeContainer] | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._plan = None
        if container is not None:
            cls._container_class = container
        for name in Plan(cls._container_class).services:
            if name not in cls.reserved_names():
                setattr(cls, name, _Service(name))

    @classmethod
    def reserved_names(cls) -> set[str]:
        """Names that a service must not have."""
        return {"settings", "container", *vars(Runtime), *_NAMES_OF_CONTAINERS}

    @classmethod
    def service_annotations(cls) -> dict[str, tuple[Any, str]]:
        """Service name to its annotation and the module in which it is written."""
        own = cls.reserved_names()
        return {
            name: found
            for name, found in type_hints.annotations_of(cls).items()
            if name not in own and not name.startswith("_") and not type_hints.is_class_variable(*found)
        }

    @classmethod
    def settings_annotation(cls) -> tuple[Any, str]:
        """The annotation of ``settings`` and the module in which it is written."""
        return type_hints.annotations_of(cls)["settings"]

    @classmethod
    def settings_class(cls) -> type[RuntimeSettings]:
        """The class that ``settings`` is annotated with."""
        annotation, module = cls.settings_annotation()
        resolved = type_hints.resolve(annotation, module)
        if not (isinstance(resolved, type) and issubclass(resolved, RuntimeSettings)):
            what = f"its annotation {annotation} is not a RuntimeSettings class known to module {module}"
            fix = f"annotate a class known to that module in {cls.__name__}"
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
        """Validate everything and return a runtime whose services are built on first use.

        Args:
            settings: validated again here; by default the settings class's defaults.
            overrides: service, by name or by container attribute, to the object that replaces it; stronger than
                those of an `overriding` scope.
            wire: modules whose ``@inject`` functions receive services of this runtime until it is closed.

        Raises:
            SettingsError: the settings are invalid, or of another class than this runtime's.
            PlanError: the container's declarations are wrong.
            OverrideError: an override names an unknown service, or does not fit its annotated type.
            CapabilityError: this machine lacks what the settings of an enabled service need.
            ServiceError: a wired module asks for a service that does not exist.
        """
        settings = cls._validated(settings)
        plan = cls._checked_plan()
        replacements = effective_overrides(plan, overrides or {})
        runtime = object.__new__(cls)
        warm = WarmReads(vars(runtime))
        lifecycle = Lifecycle(plan, settings, replacements, warm)
        try:
            if problems := list(unmet(lifecycle.enabled, settings)):
                raise CapabilityError(f"This machine lacks what {cls.__name__} needs with these settings.", problems)
            warm.bind(plan.overriding(replacements), settings, lifecycle.resolve)
            vars(runtime).update(settings=settings, container=warm.container, _lifecycle=lifecycle)
            wire_modules(wire, warm.container)
        except BaseException:
            lifecycle.close(None)
            raise
        return runtime

    @classmethod
    def overriding(cls, overrides: Mapping[Any, Any] | None = None, /, **by_name: Any) -> AbstractContextManager[None]:
        """Apply overrides to every opening within a ``with`` block; an open runtime keeps its services.

        The scope belongs to the thread or task that enters it and applies to subclasses too. An inner scope is
        stronger than an outer one.

        Args:
            overrides: as for `open`.
            **by_name: further overrides, by name.

        Raises:
            OverrideError: as for `open`, raised by this call.
        """
        return overriding(Scope(cls, validated_overrides(cls._checked_plan(), overrides or {}, by_name)))

    @classmethod
    def main(cls, body: Callable[[Self], object], argv: Sequence[str] | None = None) -> NoReturn:
        """Load settings, open, run ``body``, close, and exit.

        The exit status is 0 on success, 2 if the settings, the command line or the machine prevent the start, 1 after
        any other error, and 128 + signal after a signal. Errors that the user can fix are printed without a traceback.
        """
        run_main(lambda: cls.open(cls.settings_class().load(argv)), body)

    def start(self, through: Phase = Phase.WARMUP) -> Self:
        """Build every enabled service of the phases up to and including ``through``, in order."""
        self._lifecycle.start(through)
        return self

    def close(self) -> None:
        """Take down the built services in reverse order; a second call has no effect.

        Raises:
            CloseError: some teardowns failed; all of them have run.
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
        """Name to reason of every service that is switched off."""
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
                f"  fix: pass a {wanted.__name__}, from {wanted.__name__}.load() or {wanted.__name__}(...)"
            )
        return settings.revalidated()

    @classmethod
    def _checked_plan(cls) -> Plan:
        if cls._plan is None:
            plan = cls.plan()
            plan.check()
            cls._plan = plan
        return cls._plan
