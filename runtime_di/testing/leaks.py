"""Compares the state of the process around a block of code, and knows which service changed what."""

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
from runtime_di.lifecycle import Lifecycle
from runtime_di.testing.process_resources import RESOURCES, files
from runtime_di.testing.process_state import VALUES, Key, Probe, Seen, random_states

_GRACE_S = 3.0
"""For threads, processes and files that are about to end."""
_MOST_OBSERVED = 100
"""Builds of services that one watch looks at; a leak that recurs shows in the first ones."""

_RANDOM = "random state"
_FILE = "file"

_Random = Mapping[str, Hashable]


class Watch:
    """What a block of code leaves behind, and which services were built meanwhile.

    Attributes:
        built: Runtime and service, in build order.
    """

    def __init__(self, ignore: Collection[str] = (), *folders: Path) -> None:
        """Look at every kind of state but those to ``ignore``, and at files in ``folders``.

        Raises:
            SettingsError: there is no such kind to ignore.
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
        self._before: dict[Key, Seen] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Compare with the state at the start of the body."""
        with self._observing():
            self._before = self._take()
            yield

    def leaks(self, let_go: Callable[[], object] = lambda: None) -> list[str]:
        """What is not as it was, each with the service whose build changed it, where one did.

        Args:
            let_go: called before anything is said to be still there, to drop the last references to it.
        """
        deadline = time.monotonic() + _GRACE_S
        found = self._changes(self._before)
        if any(kind in self._resources for kind, _ in found):
            let_go()
            gc.collect()
            while time.monotonic() < deadline and any(kind in self._resources for kind, _ in found):
                found = self._changes(self._before)
                time.sleep(0.01)
        told = [f"{kind}: {text}{self._by.get((kind, what), '')}" for (kind, what), text in found.items()]
        return told + self._random_left

    def log(self) -> str:
        """The services that were built meanwhile by their own factories, each once."""
        names: dict[str, dict[str, None]] = {}
        for runtime, name in self.built:
            names.setdefault(runtime, {})[name] = None
        told = [f"{runtime}: {', '.join(built)}" for runtime, built in names.items()]
        return f"built meanwhile: {'; '.join(told) or 'nothing'}"

    def _take(self, but: str = "") -> dict[Key, Seen]:
        probes = {kind: probe for kind, probe in {**self._values, **self._resources}.items() if kind != but}
        return {(kind, what): seen for kind, probe in probes.items() for what, seen in probe()}

    def _changes(self, before: Mapping[Key, Seen], but: str = "") -> dict[Key, str]:
        after = self._take(but)
        found: dict[Key, str] = {}
        for key in {**before, **after}:
            kind, what = key
            old, new = before.get(key), after.get(key)
            if kind in self._resources:
                if old is None and new is not None and new.shown:
                    found[key] = new.shown
            elif kind == "torch" and old is None:
                continue  # torch was not imported before
            elif (old and old.value) != (new and new.value):
                found[key] = f"{what} {_told(old, new)}"
        return found

    @contextmanager
    def _observing(self) -> Iterator[None]:
        make, close = Lifecycle._make, Lifecycle.close

        def observed_make(lifecycle: Lifecycle, spec: Any) -> Any:
            self.built.append((lifecycle.plan.name, spec.name))
            if len(self.built) > _MOST_OBSERVED:
                return make(lifecycle, spec)
            with self._attributing(lifecycle, spec.name):
                return make(lifecycle, spec)

        def observed_close(lifecycle: Lifecycle, failure: BaseException | None) -> Any:
            ended = close(lifecycle, failure)
            self._compare_random(lifecycle)
            return ended

        with mock.patch.multiple(Lifecycle, _make=observed_make, close=observed_close):
            yield

    @contextmanager
    def _attributing(self, lifecycle: Lifecycle, service: str) -> Iterator[None]:
        """Tell the service of what changes in the body, but for files: there may be too many to look at so often."""
        by = f" (changed by the service '{service}' of {lifecycle.plan.name})"
        before, random_before = self._take(but=_FILE), random_states()
        try:
            yield
        finally:
            for key in self._changes(before, but=_FILE):
                self._by.setdefault(key, by)
            changed = _differing(random_before, random_states()) if self._watches_random else []
            for name in changed:
                self._random.setdefault(weakref.ref(lifecycle), {}).setdefault(name, (by, random_before[name]))

    def _compare_random(self, lifecycle: Lifecycle) -> None:
        changed = self._random.pop(weakref.ref(lifecycle), {})
        for name in _differing({name: before for name, (_, before) in changed.items()}, random_states()):
            self._random_left.append(f"{_RANDOM}: that of {name} was not put back on close{changed[name][0]}")


def _check_kinds(ignore: Collection[str], known: Collection[str]) -> None:
    fix = f"ignore one of {', '.join(known)}"
    if problems := [Problem(kind, "is no kind of state", fix=fix) for kind in ignore if kind not in known]:
        raise SettingsError("The watch over leaks cannot ignore this.", problems)


def _differing(before: _Random, after: _Random) -> list[str]:
    return [name for name, state in before.items() if after.get(name) != state]


def _told(old: Seen | None, new: Seen | None) -> str:
    if old and new:
        return f"is {new.shown} instead of {old.shown}" if old.shown != new.shown else "has another value"
    return f"is {new.shown}, and was not there" if new else "is gone"


@contextmanager
def assert_no_effects(*folders: Path | str) -> Iterator[None]:
    """Assert that the body leaves no file, variable, handler, thread, socket or process that was not there.

    Args:
        folders: where no file may be made, changed or deleted, hidden ones aside; the working directory if not given.
    """
    __tracebackhide__ = True
    watch = Watch(["runtime"], *map(Path, folders or [Path.cwd()]))
    with watch.running():
        yield
        told = watch.leaks()
    if told:
        raise AssertionError("\n  ".join(["There were effects.", *told, watch.log()]))
