"""Builds the services of one open runtime in plan order, each at most once, and takes them down in reverse."""

from __future__ import annotations

import inspect
import os
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from runtime_di.errors import ClosedError, Problem, RuntimeDIError, ServiceDisabledError, ServiceError
from runtime_di.lifecycle.disabling import why_disabled
from runtime_di.lifecycle.teardown import SuspendedFactory, keep_suspended, run_teardowns
from runtime_di.lifecycle.warm_reads import WarmReads
from runtime_di.phases import Phase
from runtime_di.plan.model import Plan
from runtime_di.plan.specs import Injection, PlainProvider, ServiceEdge, ServiceSpec, SettingsPath
from runtime_di.plan.type_hints import function_of
from runtime_di.settings.model import RuntimeSettings

_open_lifecycles: weakref.WeakSet[Lifecycle] = weakref.WeakSet()
"""The open runtimes of this process: at most one has collective services, and a fork resets all of them."""


class Lifecycle:
    """The slow path of a runtime: builds services that `WarmReads` does not have yet.

    Attributes:
        built: names in build order.
        disabled: name to reason of every service that is switched off.
    """

    def __init__(self, plan: Plan, settings: RuntimeSettings, overrides: Mapping[str, Any], warm: WarmReads) -> None:
        self.plan = plan
        self.built: list[str] = []
        self.disabled: dict[str, Problem] = {}
        self._settings = settings
        self._overrides = dict(overrides)
        self._warm = warm
        self._values: dict[str, Any] = {}
        self._factories: list[SuspendedFactory] = []
        self._active = frozenset(_active(plan, overrides))
        self._num_complete = 0
        self._building: str | None = None
        self._closed = False
        self._pid = os.getpid()
        self._lock = threading.RLock()
        for name in plan.order:
            self._disable(name)
        _open_lifecycles.add(self)

    @property
    def enabled(self) -> list[ServiceSpec]:
        """Services that ``start()`` builds with their own factories."""
        return [
            self.plan.services[name]
            for name in self.plan.order
            if name in self._active and name not in self.disabled and name not in self._overrides
        ]

    def resolve(self, name: str) -> Any:
        """Return a service, after building everything that precedes it.

        Raises:
            ServiceDisabledError: the settings switch it off.
            ServiceError: it, or a service before it, could not be built; a later call tries again.
            ClosedError: the runtime is closed, or was opened by the parent of this forked process.
        """
        self._check_usable(name)
        with self._lock:
            self._check_usable(name)
            if name not in self._values and name not in self.disabled:
                self._build_up_to(name)
            if name in self.disabled:
                raise ServiceDisabledError(f"Service '{name}' is disabled.", [self.disabled[name]])
            self._warm.publish(name, self._values[name])
            return self._values[name]

    def start(self, through: Phase) -> None:
        """Build every active service of the phases up to and including ``through``."""
        self._check_usable(None)
        with self._lock:
            self._check_usable(None)
            self._complete(self.plan.num_before(through + 1))

    def close(self, failure: BaseException | None) -> tuple[list[Exception], BaseException | None]:
        """Take down the built services in reverse; a second call, or a call in a forked child, has no effect.

        Args:
            failure: the exception that ended the body; sent to every generator factory.

        Returns:
            The errors raised by teardowns, and the first KeyboardInterrupt or SystemExit that one of them raised.
        """
        if self._pid != os.getpid():
            return [], None
        with self._lock:
            if self._building is not None:
                raise ServiceError(f"{self.plan.name} was closed while '{self._building}' was being built.")
            self._closed = True
            factories, self._factories = self._factories, []
            self._warm.forget()
            self._values.clear()
            self._overrides.clear()
        _open_lifecycles.discard(self)
        outcome = run_teardowns(factories, failure)
        self._warm.release()
        return outcome

    def _check_usable(self, name: str | None) -> None:
        request = f"Service '{name}' was requested from" if name else "A start was requested from"
        if self._closed:
            raise ClosedError(f"{request} a closed {self.plan.name}.\n  fix: use it inside the 'with' block")
        inherited = name in self._values and not self.plan.services[name].phase.is_collective
        if self._pid != os.getpid() and not inherited:
            raise ClosedError(
                f"{request} a {self.plan.name} opened by process {self._pid}, which forked this one.\n"
                "  fix: open a runtime in this process, or build rank-local services before the fork"
            )

    def _build_up_to(self, name: str) -> None:
        phase = self.plan.services[name].phase
        self._complete(self.plan.index[name] if phase.is_collective else self.plan.num_before(phase))
        for step in self._unbuilt(name):
            self._build(step)

    def _complete(self, num_services: int) -> None:
        """Build the active services among the first ``num_services`` of the plan order."""
        while self._num_complete < num_services:
            name = self.plan.order[self._num_complete]
            if name in self._active:
                self._build(name)
            self._num_complete += 1

    def _unbuilt(self, name: str) -> list[str]:
        """A service and its dependencies that are not built yet, in build order."""
        found, pending = {name}, [name]
        while pending:
            step = pending.pop()
            needed = () if step in self._overrides else self.plan.services[step].dependencies
            new = {other for other in needed if other not in found and other not in self._values}
            found |= new
            pending += new
        return sorted(found, key=self.plan.index.__getitem__)

    def _build(self, name: str) -> None:
        if self._building is not None:
            raise ServiceError(
                f"Service '{name}' was requested while '{self._building}' was being built.\n"
                f"  fix: declare '{name}' as an argument of '{self._building}'"
            )
        if name in self._values or self._disable(name):
            return
        spec = self.plan.services[name]
        if spec.phase.is_collective and name not in self._overrides:
            self._check_single_world()
        self._building = name
        try:
            self._values[name] = self._overrides[name] if name in self._overrides else self._create(spec)
        except ServiceDisabledError as error:
            self.disabled[name] = error.problems[0] if error.problems else Problem(name, error.heading)
            return
        finally:
            self._building = None
        self.built.append(name)

    def _create(self, spec: ServiceSpec) -> Any:
        try:
            args = [self._argument(injection) for injection in spec.args]
            kwargs = {key: self._argument(injection) for key, injection in spec.kwargs.items()}
            created = spec.factory(*args, **kwargs)
            if not (inspect.isgeneratorfunction(function_of(spec.factory)) and inspect.isgenerator(created)):
                return created
            value = next(created)
        except RuntimeDIError:
            raise
        except StopIteration:
            raise ServiceError(
                f"The factory of '{spec.name}' ended without a yield.\n  fix: yield the service once"
            ) from None
        except Exception as error:
            raise ServiceError(f"Service '{spec.name}' could not be built: {type(error).__name__}: {error}") from error
        self._factories.append((spec.name, created))
        return value

    def _argument(self, injection: Injection) -> Any:
        if isinstance(injection, SettingsPath):
            return injection.read(self._settings)
        if isinstance(injection, PlainProvider):
            return self._warm.call(injection)
        if not isinstance(injection, ServiceEdge):
            return injection.value
        value = self._values.get(injection.name)
        for attribute in injection.attributes if injection.name in self._values else ():
            value = getattr(value, attribute)
        return value

    def _disable(self, name: str) -> bool:
        if name not in self.disabled and name not in self._overrides:
            problem = why_disabled(self.plan.services[name], self._settings, self.disabled)
            if problem is not None:
                self.disabled[name] = problem
        return name in self.disabled

    def _check_single_world(self) -> None:
        for other in list(_open_lifecycles):
            if other is not self and other._has_collective_services():
                raise ServiceError(
                    f"{self.plan.name} needs collective services, but an open {other.plan.name} has them already.\n"
                    "  fix: close that runtime first; one process has one world at a time"
                )

    def _has_collective_services(self) -> bool:
        own = [self.plan.services[name] for name in self.built if name not in self._overrides]
        return self._pid == os.getpid() and any(spec.phase.is_collective for spec in own)

    def _after_fork(self) -> None:
        self._lock = threading.RLock()
        self._warm.forget()
        keep_suspended(self._factories)


def _active(plan: Plan, overrides: Mapping[str, Any]) -> set[str]:
    """All services except those that only overridden services depend on."""
    active: set[str] = set()
    for name in reversed(plan.order):
        dependants = plan.dependants[name]
        if name in overrides or not dependants or any(d in active and d not in overrides for d in dependants):
            active.add(name)
    return active


def _after_fork() -> None:
    for lifecycle in list(_open_lifecycles):
        lifecycle._after_fork()


os.register_at_fork(after_in_child=_after_fork)
