"""Values that must be equal on all ranks of a job, and the report of those that differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from runtime_di.errors import AgreementError, Problem
from runtime_di.providers.distributed.errors import format_ranks

if TYPE_CHECKING:
    from runtime_di.plan.model import Plan
    from runtime_di.settings.explanation import Explanation

ValueAndSource: TypeAlias = tuple[str, str | None]
"""A value as text, and its source if that is known."""
Differences: TypeAlias = Mapping[str, ValueAndSource]
"""The values of one rank that differ from rank 0, by field."""

_MISSING = "nothing"


@dataclass(frozen=True)
class Agreement:
    """The values of one rank that are compared with the other ranks before the world is created.

    Attributes:
        values: field to JSON-able value.
        source: returns the source of a field's value, if that is known; called only where ranks differ.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    source: Callable[[str], str | None] = lambda _: None

    def extended_with(self, more: Mapping[str, Any]) -> Self:
        """Add fields without a source; a field that exists keeps its value."""
        return replace(self, values={**more, **self.values})

    @cached_property
    def rendered(self) -> str:
        """All fields as text, which is equal on ranks that agree."""
        return json.dumps({name: _format_value(value) for name, value in self.values.items()}, sort_keys=True)

    @property
    def digest(self) -> str:
        """Hash of `rendered`, of constant size."""
        return hashlib.sha256(self.rendered.encode()).hexdigest()

    def differences(self, rendered: str) -> dict[str, ValueAndSource]:
        """List the values of this rank that differ from those of a rank whose fields are ``rendered``."""
        own, other = json.loads(self.rendered), json.loads(rendered)
        differing = sorted(name for name in {*own, *other} if own.get(name) != other.get(name))
        return {name: self.value_and_source(name) for name in differing}

    def value_and_source(self, name: str) -> ValueAndSource:
        """Return a field's value as text, and its source."""
        if name not in self.values:
            return _MISSING, None
        return _format_value(self.values[name]), self.source(name)

    def problems(self, differences: Mapping[int, Differences], ranks: Iterable[int]) -> Iterator[Problem]:
        """Report each field that differs: every value with its ranks, and the source of all but the most frequent.

        Args:
            differences: rank to its values that differ from this rank.
            ranks: all that were compared, including those that agree with this one.
        """
        ranks = sorted({*ranks, *differences})
        for name in sorted({name for of_rank in differences.values() for name in of_rank}):
            ranks_by_value: dict[str, list[int]] = {}
            sources: dict[str, str | None] = {}
            for rank in ranks:
                value, source = differences.get(rank, {}).get(name) or self.value_and_source(name)
                ranks_by_value.setdefault(value, []).append(rank)
                sources.setdefault(value, source)
            yield Problem(name, _format_values(ranks_by_value, sources))


def agreement_error(problems: Iterable[Problem]) -> AgreementError:
    """Create the error that every rank raises when ranks disagree."""
    return AgreementError("The ranks of a job must start with equal values, and these differ:", problems)


def agreement_of(
    agreed: Callable[[], Mapping[str, Any]], explain: Callable[[str], Explanation], plan: Plan
) -> Agreement:
    """Collect what must be equal on all ranks of a runtime: settings, collective services and our version.

    The names of some overrides are included: those of collective services, and those of services that collective ones
    depend on. Their replacement can create other groups or none, or give a model other sizes.

    Args:
        agreed: returns the settings that must be equal on all ranks.
        explain: returns the source of a setting.
        plan: of the runtime that opens.
    """
    settings = agreed()
    services = [name for name in plan.order if plan.services[name].phase.is_collective]
    used = {*services}
    for name in reversed(plan.order):  # a service comes after all that it depends on
        used |= {*plan.services[name].dependencies} if name in used else set()
    return Agreement(settings, lambda name: explain(name).source if name in settings else None).extended_with(
        {
            "collective services": services,
            "overridden services": sorted(plan.overridden & used),
            "version of runtime-di": version("runtime-di"),
        }
    )


def _format_values(ranks_by_value: Mapping[str, list[int]], sources: Mapping[str, str | None]) -> str:
    most = max(map(len, ranks_by_value.values()))
    has_majority = sum(len(ranks) == most for ranks in ranks_by_value.values()) == 1
    parts = []
    for value, ranks in sorted(ranks_by_value.items(), key=lambda item: (-len(item[1]), item[1])):
        source = "" if (has_majority and len(ranks) == most) or not sources[value] else f" (from {sources[value]})"
        parts.append(f"{value} on {format_ranks(ranks)}{source}")
    return "; ".join(parts)


def _format_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
