"""Builds the services of one opening in the plan's order, at most once, and takes them down in reverse."""

from __future__ import annotations

import inspect
import os
import threading
import weakref
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from runtime_di import conformance
from runtime_di.errors import ClosedError, Problem, RuntimeDIError, ServiceDisabledError, ServiceError
from runtime_di.phases import Phase
from runtime_di.plan import Injection, PlainProvider, Plan, ServiceEdge, ServiceSpec, SettingsPath

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    from runtime_di.settings import RuntimeSettings

_alive: weakref.WeakSet[Lifecycle] = weakref.WeakSet()
"""The registry of this process's open runtimes: one of them may hold collective services, and a fork visits all."""


class Lifecycle:
    """The cold path of a runtime; warm reads never come here.

    Attributes:
        built: names in build order.
        disabled: name to reason of every service that the settings switch off.
    """

    def __init__(
        self,
        plan: Plan,
        settings: RuntimeSettings,
        overrides: Mapping[str, Any],
        published: MutableMapping[str, Any],
        call_plain: Callable[[PlainProvider], Any],
    ) -> None:
        self.plan = plan
        self.built: list[str] = []
        self.disabled: dict[str, Problem] = {}
        self._settings = settings
        self._overrides = dict(overrides)
        self._published = published
        self._call_plain = call_plain
        self._values: dict[str, Any] = {}
        self._teardowns: list[tuple[str, Generator[Any, Any, Any]]] = []
        self._building: str | None = None
        self._closed = False
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._active = frozenset(_active(plan, overrides))
        for name in plan.order:
            self._disable(name)
        _alive.add(self)

    @property
    def enabled(self) -> list[ServiceSpec]:
        """Services that will be built by their own factories, unless asked for by name only."""
        return [
            self.plan.services[name]
            for name in self.plan.order
            if name in self._active and name not in self.disabled and name not in self._overrides
        ]

    def resolve(self, name: str) -> Any:
        """The service, built with everything that comes before it.

        Raises:
            ServiceDisabledError: the settings switch it off.
            ServiceError: it, or a service before it, could not be built; it can be asked again.
            ClosedError: the runtime is closed, or was opened by the parent of this forked process.
        """
        self._refuse_if_closed(name)
        with self._lock:
            self._refuse_if_closed(name)
            if name not in self._values and name not in self.disabled:
                self._build_up_to(name)
            if name in self.disabled:
                raise ServiceDisabledError(f"Service '{name}' is disabled.", [self.disabled[name]])
            self._published[name] = self._values[name]
            return self._values[name]

    def start(self, through: Phase) -> None:
        """Build every active service of the phases up to ``through``."""
        for name in self.plan.order:
            if self.plan.services[name].phase > through:
                return
            if name in self._active and name not in self.disabled:
                self._refuse_if_closed(name)
                with self._lock:
                    self._refuse_if_closed(name)
                    self._build(name)

    def close(self, failure: BaseException | None) -> tuple[list[Exception], BaseException | None]:
        """Take down what was built, in reverse; a second call does nothing.

        Args:
            failure: the exception that ended the body, which every generator factory is handed.

        Returns:
            The errors of teardowns, and the first KeyboardInterrupt or SystemExit of one.
        """
        if self._pid != os.getpid():
            return [], None
        with self._lock:
            self._closed = True
            teardowns, self._teardowns = self._teardowns, []
            for name in self._values:
                self._published.pop(name, None)
            self._values.clear()
            self._overrides.clear()
        _alive.discard(self)
        return _take_down(teardowns, failure)

    def _refuse_if_closed(self, name: str) -> None:
        if self._closed:
            raise ClosedError(
                f"Service '{name}' was asked of a closed {self.plan.name}.\n  fix: ask it inside the 'with' block"
            )
        if self._pid != os.getpid() and (name not in self._values or self.plan.services[name].phase.is_collective):
            raise ClosedError(
                f"Service '{name}' of {self.plan.name} belongs to process {self._pid}, which forked this one.\n"
                "  fix: open a runtime in this process, or ask rank-local services before the fork"
            )

    def _build_up_to(self, name: str) -> None:
        if self._building is not None:
            raise ServiceError(
                f"Service '{name}' was asked for while '{self._building}' was being built.\n"
                f"  fix: declare '{name}' as an argument of '{self._building}'"
            )
        for step in self._steps(name):
            self._build(step)

    def _steps(self, name: str) -> list[str]:
        plan = self.plan
        phase, needed = plan.services[name].phase, plan.closure(name)
        if phase.is_collective:
            before = set(plan.order[: plan.index[name]])
        else:
            before = {other for other in plan.order if plan.services[other].phase < phase}
        wanted = (before & self._active) | needed
        return [step for step in plan.order if step in wanted]

    def _build(self, name: str) -> None:
        if name in self._values or self._disable(name):
            return
        spec = self.plan.services[name]
        if spec.phase.is_collective and name not in self._overrides:
            _refuse_second_world(self)
        self._building = name
        try:
            self._values[name] = self._overrides[name] if name in self._overrides else self._make(spec)
        except ServiceDisabledError as error:
            self.disabled[name] = error.problems[0] if error.problems else Problem(name, error.heading)
            return
        finally:
            self._building = None
        self.built.append(name)

    def _make(self, spec: ServiceSpec) -> Any:
        args = [self._argument(injection) for injection in spec.args]
        kwargs = {key: self._argument(injection) for key, injection in spec.kwargs.items()}
        try:
            made = spec.factory(*args, **kwargs)
            if not inspect.isgeneratorfunction(inspect.unwrap(getattr(spec.factory, "func", spec.factory))):
                return made
            value = next(made)
        except RuntimeDIError:
            raise
        except StopIteration:
            raise ServiceError(
                f"The factory of '{spec.name}' ended without a yield.\n  fix: yield the service once"
            ) from None
        except Exception as error:
            raise ServiceError(f"Service '{spec.name}' could not be built: {type(error).__name__}: {error}") from error
        self._teardowns.append((spec.name, made))
        return value

    def _argument(self, injection: Injection) -> Any:
        if isinstance(injection, SettingsPath):
            return injection.read(self._settings)
        if isinstance(injection, PlainProvider):
            return self._call_plain(injection)
        if not isinstance(injection, ServiceEdge):
            return injection.value
        value = self._values.get(injection.name)
        for attribute in injection.attributes if injection.name in self._values else ():
            value = getattr(value, attribute)
        return value

    def _disable(self, name: str) -> bool:
        if name not in self.disabled and name not in self._overrides:
            problem = _why_disabled(self.plan.services[name], self._settings, self.disabled)
            if problem is not None:
                self.disabled[name] = problem
        return name in self.disabled

    def _after_fork(self) -> None:
        self._lock = threading.RLock()
        for name in self._values:
            self._published.pop(name, None)


def _active(plan: Plan, overrides: Mapping[str, Any]) -> set[str]:
    """All but the services that only overridden ones are built from."""
    active: set[str] = set()
    for name in reversed(plan.order):
        dependants = plan.dependants[name]
        if name in overrides or not dependants or any(d in active and d not in overrides for d in dependants):
            active.add(name)
    return active


def _why_disabled(spec: ServiceSpec, settings: RuntimeSettings, disabled: Mapping[str, Problem]) -> Problem | None:
    for injection, parameter in _bound(spec):
        if parameter is not None and conformance.accepts_none(parameter, spec.factory):
            continue
        if isinstance(injection, SettingsPath) and injection.names and injection.read(settings) is None:
            told = settings.explain(str(injection))
            return Problem(str(injection), f"is null, so '{spec.name}' is off", source=told.source, fix=f"set '{injection}'")
        needed = [injection.name] if isinstance(injection, ServiceEdge) else getattr(injection, "services", ())
        for name in needed:
            if name in disabled:
                cause = disabled[name]
                return Problem(spec.name, f"needs '{name}', which is off: {cause.what}", cause.value, cause.source, cause.fix)
    return None


def _bound(spec: ServiceSpec) -> list[tuple[Injection, inspect.Parameter | None]]:
    try:
        signature = inspect.signature(spec.factory)
        bound = signature.bind(*spec.args, **spec.kwargs)
    except (TypeError, ValueError):
        return [(injection, None) for injection in spec.injections]
    pairs: list[tuple[Injection, inspect.Parameter | None]] = []
    for name, value in bound.arguments.items():
        parameter = signature.parameters[name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            pairs += [(injection, parameter) for injection in value]
        elif parameter.kind is parameter.VAR_KEYWORD:
            pairs += [(injection, parameter) for injection in value.values()]
        else:
            pairs.append((value, parameter))
    return pairs


def _take_down(
    teardowns: Sequence[tuple[str, Generator[Any, Any, Any]]], failure: BaseException | None
) -> tuple[list[Exception], BaseException | None]:
    errors: list[Exception] = []
    interrupt: BaseException | None = None
    for name, generator in reversed(teardowns):
        try:
            generator.send(failure)
            generator.close()
            raise ServiceError(f"The factory of '{name}' yielded twice.\n  fix: yield the service once")
        except StopIteration:
            continue
        except Exception as error:  # noqa: BLE001 - collected and raised once all are down
            error.add_note(f"raised by the teardown of service '{name}'")
            errors.append(error)
        except BaseException as stop:  # noqa: BLE001 - raised once all are down
            interrupt = interrupt or stop
    return errors, interrupt


def _refuse_second_world(lifecycle: Lifecycle) -> None:
    for other in list(_alive):
        if other is not lifecycle and any(other.plan.services[name].phase.is_collective and name not in other._overrides
                                          for name in other.built):
            raise ServiceError(
                f"{lifecycle.plan.name} needs collective services while an open {other.plan.name} holds them.\n"
                "  fix: close that runtime first; one process has one world at a time"
            )


def _forget_parent() -> None:
    for lifecycle in list(_alive):
        lifecycle._after_fork()


os.register_at_fork(after_in_child=_forget_parent)
