"""The services of a container as a graph: edges, phases, and the order in which every rank builds them."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from functools import cached_property

from runtime_di.phases import Phase
from runtime_di.plan.specs import ServiceSpec


class ServiceGraph:
    """Services and their dependencies.

    Attributes:
        services: name to specification, in declaration order.
        order: names in build order: by phase, then by dependency, then by declaration.
    """

    def __init__(self, services: Mapping[str, ServiceSpec]) -> None:
        self.services = services
        self.order: tuple[str, ...] = tuple(_order(services))

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Name to position in `order`."""
        return {name: position for position, name in enumerate(self.order)}

    @cached_property
    def edges(self) -> tuple[tuple[str, str], ...]:
        """Pairs of a service and one of its dependencies."""
        return tuple((name, needed) for name in self.order for needed in self.services[name].dependencies)

    @cached_property
    def dependants(self) -> Mapping[str, tuple[str, ...]]:
        """Name to the services that depend on it."""
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
        """Number of services of `order` in phases before ``phase``."""
        return bisect_left(self.order, phase, key=lambda name: self.services[name].phase)


def _order(services: Mapping[str, ServiceSpec]) -> Iterator[str]:
    """Sort by phase, then by dependency, then by declaration; services on a cycle come last in their phase."""
    declared_at = {name: position for position, name in enumerate(services)}
    for phase in Phase:
        members = {name: spec.dependencies for name, spec in services.items() if spec.phase == phase}
        pending = {name: {other for other in needed if other in members} for name, needed in members.items()}
        needed_by: dict[str, list[str]] = {}
        for name, needed in pending.items():
            for other in needed:
                needed_by.setdefault(other, []).append(name)
        ready = [(declared_at[name], name) for name, needed in pending.items() if not needed]
        heapq.heapify(ready)
        while ready:
            _, name = heapq.heappop(ready)
            yield name
            del pending[name]
            for other in needed_by.get(name, ()):
                pending[other].discard(name)
                if not pending[other]:
                    heapq.heappush(ready, (declared_at[other], other))
        yield from pending
