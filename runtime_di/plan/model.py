"""The plan of a container: its services and their build order, read without building anything."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import Self

from runtime_di.errors import PlanError, Problem
from runtime_di.plan.annotations import AnnotatedView
from runtime_di.plan.check import problems
from runtime_di.plan.declarations import RuntimeContainer
from runtime_di.plan.graph import ServiceGraph
from runtime_di.plan.reading import Reader
from runtime_di.plan.rendering import as_mermaid, as_text


class Plan(ServiceGraph):
    """The services of a container and the order in which every rank builds them; see `ServiceGraph`.

    Attributes:
        container: the container class that was read.
        runtime: the Runtime class whose annotations the services must fit, if there is one.
        unreadable: problems found while reading the declarations, reported by `check`.
        overridden: names of the services that the open runtime overrides; empty in the plan of a class.
    """

    def __init__(self, container: type[RuntimeContainer], runtime: type[AnnotatedView] | None = None) -> None:
        reader = Reader(container)
        super().__init__(reader.read())
        self.container = container
        self.runtime = runtime
        self.unreadable: tuple[Problem, ...] = tuple(reader.problems)
        self.overridden: frozenset[str] = frozenset()

    def overriding(self, names: Iterable[str]) -> Self:
        """Return a copy for an open runtime that overrides these services."""
        opened = copy(self)
        opened.overridden = frozenset(names)
        return opened

    @property
    def name(self) -> str:
        """Name of the Runtime class, or of the container if there is no Runtime class."""
        return self.runtime.__name__ if self.runtime else self.container.__name__

    def check(self) -> None:
        """Raise one `PlanError` for all errors in the declarations, with the paths of cycles."""
        found = [*self.unreadable, *problems(self, self.container.__name__, self.runtime)]
        if found:
            count = "1 problem" if len(found) == 1 else f"{len(found)} problems"
            raise PlanError(f"{self.name} cannot be built as declared: {count}.", found)

    def text(self) -> str:
        """Render the order as a table: phase, service, its dependencies, and the settings it reads."""
        return as_text(self)

    def mermaid(self) -> str:
        """Render the plan as a Mermaid flow chart, one box per phase."""
        return as_mermaid(self)

    __str__ = text
