"""The leak watch: compares the process state before and after a block, and attributes changes to services."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from runtime_di.errors import Problem, SettingsError
from runtime_di.lifecycle.build import Lifecycle
from runtime_di.testing.leaks.resources import RESOURCES, files
from runtime_di.testing.leaks.state import VALUES, Key, Observation, Probe, random_states

_GRACE_S = 3.0
"""How long threads, processes and descriptors may take to end."""
_MAX_OBSERVED = 100
"""Number of service builds that one watch observes; a recurring leak shows in the first ones."""

_RANDOM = "random state"
_FILE = "file"

_Random = Mapping[str, Hashable]


class Watch:
    """Finds the state that a block of code leaves behind, and the services built in it.

    Attributes:
        built: pairs of Runtime name and service name, in build order.
    """

    def __init__(self, ignore: Collection[str] = (), *folders: Path) -> None:
        """Watch every kind of state except those in ``ignore``, and the files in ``folders``.

        Raises:
            SettingsError: ``ignore`` names an unknown kind.
        """
        own: dict[str, Probe] = {_FILE: lambda: files(*folders)} if folders else {}
        _check_kinds(ignore, [*VALUES, *own, *RESOURCES, _RANDOM])
        self._values = {kind: probe for kind, probe in {**VALUES, **own}.items() if kind not in ignore}
        self._resources = {kind: probe for kind, probe in RESOURCES.items() if kind not in ignore}
        self._watches_random = _RANDOM not in ignore
        self.built: list[tuple[str, str]] = []
        self._by: dict[Key, str] = {}
        self._random: dict[weakref.ref[Lifecycle], dict[str, tuple[str, Hashable]]] = {}
        self._random_left: list[str] = []
        self._before: dict[Key, Observation] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch the body; `leaks` compares with the state at its start."""
        with self._observing():
            self._before = self._take()
            yield

    def leaks(self, release: Callable[[], object] = lambda: None) -> list[str]:
        """Every change of state, with the service whose build caused it, if one did.

        Args:
            release: drops the last references to resources; called before a resource is reported.
        """
        deadline = time.monotonic() + _GRACE_S
        found = self._changes(self._before)
        if any(kind in self._resources for kind, _ in found):
            release()
            gc.collect()
            while time.monotonic() < deadline and any(kind in self._resources for kind, _ in found):
                found = self._changes(self._before)
                time.sleep(0.01)
        changes = [f"{kind}: {text}{self._by.get((kind, what), '')}" for (kind, what), text in found.items()]
        return changes + self._random_left

    def log(self) -> str:
        """The services built by their own factories in the watched block, each once."""
        names: dict[str, dict[str, None]] = {}
        for runtime, name in self.built:
            names.setdefault(runtime, {})[name] = None
        parts = [f"{runtime}: {', '.join(built)}" for runtime, built in names.items()]
        return f"built meanwhile: {'; '.join(parts) or 'nothing'}"

    def _take(self, skip: str = "") -> dict[Key, Observation]:
        probes = {kind: probe for kind, probe in {**self._values, **self._resources}.items() if kind != skip}
        return {(kind, what): observation for kind, probe in probes.items() for what, observation in probe()}

    def _changes(self, before: Mapping[Key, Observation], skip: str = "") -> dict[Key, str]:
        after = self._take(skip)
        found: dict[Key, str] = {}
        for key in {**before, **after}:
            kind, what = key
            old, new = before.get(key), after.get(key)
            if kind in self._resources:
                if old is None and new is not None and new.text:
                    found[key] = new.text
            elif kind == "torch" and old is None:
                continue  # torch was not imported before
            elif (old and old.value) != (new and new.value):
                found[key] = f"{what} {_describe_change(old, new)}"
        return found

    @contextmanager
    def _observing(self) -> Iterator[None]:
        create, close = Lifecycle._create, Lifecycle.close

        def observed_create(lifecycle: Lifecycle, spec: Any) -> Any:
            self.built.append((lifecycle.plan.name, spec.name))
            if len(self.built) > _MAX_OBSERVED:
                return create(lifecycle, spec)
            with self._attributing(lifecycle, spec.name):
                return create(lifecycle, spec)

        def observed_close(lifecycle: Lifecycle, failure: BaseException | None) -> Any:
            outcome = close(lifecycle, failure)
            self._compare_random(lifecycle)
            return outcome

        with mock.patch.multiple(Lifecycle, _create=observed_create, close=observed_close):
            yield

    @contextmanager
    def _attributing(self, lifecycle: Lifecycle, service: str) -> Iterator[None]:
        """Attribute changes in the body to a service, except changes of files, which may be too many."""
        by = f" (changed by the service '{service}' of {lifecycle.plan.name})"
        before, random_before = self._take(skip=_FILE), random_states()
        try:
            yield
        finally:
            for key in self._changes(before, skip=_FILE):
                self._by.setdefault(key, by)
            changed = _differing(random_before, random_states()) if self._watches_random else []
            for name in changed:
                self._random.setdefault(weakref.ref(lifecycle), {}).setdefault(name, (by, random_before[name]))

    def _compare_random(self, lifecycle: Lifecycle) -> None:
        changed = self._random.pop(weakref.ref(lifecycle), {})
        now = random_states() if changed else {}
        for name in _differing({name: before for name, (_, before) in changed.items()}, now):
            self._random_left.append(f"{_RANDOM}: that of {name} was not restored on close{changed[name][0]}")


def _check_kinds(ignore: Collection[str], known: Collection[str]) -> None:
    fix = f"ignore one of {', '.join(known)}"
    if problems := [Problem(kind, "is not a kind of state", fix=fix) for kind in ignore if kind not in known]:
        raise SettingsError("The leak watch cannot ignore this.", problems)


def _differing(before: _Random, after: _Random) -> list[str]:
    return [name for name, state in before.items() if after.get(name) != state]


def _describe_change(old: Observation | None, new: Observation | None) -> str:
    if old and new:
        return f"is {new.text} instead of {old.text}" if old.text != new.text else "has another value"
    return f"is {new.text}, and was not there" if new else "is gone"


@contextmanager
def assert_no_effects(*folders: Path | str) -> Iterator[None]:
    """Assert that the body leaves no new file, variable, handler, thread, socket or process.

    Args:
        folders: where no file may be created, changed or deleted, except in hidden folders; by default the working
            directory.
    """
    __tracebackhide__ = True
    watch = Watch(["runtime"], *map(Path, folders or [Path.cwd()]))
    with watch.running():
        yield
        leaks = watch.leaks()
    if leaks:
        raise AssertionError("\n  ".join(["There were side effects.", *leaks, watch.log()]))
