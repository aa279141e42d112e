"""What a container declares, read without building anything: services, edges and their one order."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Self

from runtime_di.declarations import Reader
from runtime_di.errors import PlanError, Problem
from runtime_di.phases import Phase
from runtime_di.services import RuntimeContainer
from runtime_di.specs import ServiceSpec

if TYPE_CHECKING:
    from runtime_di.runtime import Runtime


class Plan:
    """The services of a container and the order in which every rank builds them.

    Attributes:
        container: the container class that was read.
        runtime: the Runtime class whose annotations the services must fit, if there is one.
        services: name to what is declared, in the order of declaration.
        order: names in build order: by phase, then dependencies, then declaration.
        unreadable: problems met while reading, told by `check`.
        overridden: names of the services that an opening was given; none in a plan that is not of an opening.
    """

    def __init__(self, container: type[RuntimeContainer], runtime: type[Runtime] | None = None) -> None:
        self.container = container
        self.runtime = runtime
        reader = Reader(container)
        self.services: Mapping[str, ServiceSpec] = reader.read()
        self.unreadable: tuple[Problem, ...] = tuple(reader.problems)
        self.order: tuple[str, ...] = tuple(_order(self.services))
        self.overridden: frozenset[str] = frozenset()

    def overriding(self, names: Iterable[str]) -> Self:
        """Give the plan of an opening that is given these services."""
        opened = copy(self)
        opened.overridden = frozenset(names)
        return opened

    @property
    def name(self) -> str:
        """The Runtime's name, or the container's where there is none."""
        return self.runtime.__name__ if self.runtime else self.container.__name__

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Name to place in `order`."""
        return {name: place for place, name in enumerate(self.order)}

    @cached_property
    def edges(self) -> tuple[tuple[str, str], ...]:
        """Pairs of a service and one it is built from."""
        return tuple((name, needed) for name in self.order for needed in self.services[name].dependencies)

    @cached_property
    def dependants(self) -> Mapping[str, tuple[str, ...]]:
        """Name to the services built from it."""
        found: dict[str, list[str]] = {name: [] for name in self.services}
        for name, needed in self.edges:
            if needed in found:
                found[needed].append(name)
        return {name: tuple(names) for name, names in found.items()}

    @property
    def phases(self) -> Mapping[Phase, tuple[str, ...]]:
        """Phase to its services in build order."""
        return {phase: tuple(name for name in self.order if self.services[name].phase == phase) for phase in Phase}

    def num_before(self, phase: int) -> int:
        """How many services of `order` belong to earlier phases."""
        return bisect_left(self.order, phase, key=lambda name: self.services[name].phase)

    def check(self) -> None:
        """Raise a `PlanError` that tells every fault of the declarations together, with drawn paths."""
        from runtime_di.check import problems

        found = list(problems(self))
        if found:
            count = "1 problem" if len(found) == 1 else f"{len(found)} problems"
            raise PlanError(f"{self.name} cannot be built as declared: {count}.", found)

    def text(self) -> str:
        """A table of the order: phase, service, what it is built from, and the settings it reads."""
        lines = []
        for phase, names in self.phases.items():
            lines += [phase.name] if names else []
            for name in names:
                spec = self.services[name]
                needs = ", ".join((*spec.dependencies, *(f"settings.{path}" for path in spec.settings)))
                lines.append(f"  {name}" + (f" <- {needs}" if needs else ""))
        return "\n".join(lines)

    def mermaid(self) -> str:
        """A Mermaid flow chart, one box a phase."""
        lines = ["flowchart TD"]
        for phase, names in self.phases.items():
            if names:
                lines += [f"  subgraph {phase.name}", *(f"    {name}" for name in names), "  end"]
        return "\n".join([*lines, *(f"  {needed} --> {name}" for name, needed in self.edges)])

    __str__ = text


def _order(services: Mapping[str, ServiceSpec]) -> Iterator[str]:
    """Sort by phase, then dependencies, then declaration; what lies on a cycle comes last in its phase."""
    declared_at = {name: place for place, name in enumerate(services)}
    for phase in Phase:
        members = {name: spec.dependencies for name, spec in services.items() if spec.phase == phase}
        waiting = {name: {other for other in needed if other in members} for name, needed in members.items()}
        needed_by: dict[str, list[str]] = {}
        for name, needed in waiting.items():
            for other in needed:
                needed_by.setdefault(other, []).append(name)
        ready = [(declared_at[name], name) for name, needed in waiting.items() if not needed]
        heapq.heapify(ready)
        while ready:
            _, name = heapq.heappop(ready)
            yield name
            del waiting[name]
            for other in needed_by.get(name, ()):
                waiting[other].discard(name)
                if not waiting[other]:
                    heapq.heappush(ready, (declared_at[other], other))
        yield from waiting
