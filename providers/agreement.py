"""What all ranks of a job must have alike, and how a difference is told."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from runtime_di.errors import Problem

if TYPE_CHECKING:
    from runtime_di.plan import Plan
    from runtime_di.settings import Explanation

Said: TypeAlias = tuple[str, str | None]
"""A value, rendered, and where it came from."""
Deviation: TypeAlias = Mapping[str, Said]
"""What one rank has otherwise than rank 0, by field."""

_ABSENT = "nothing"
_MOST_RANGES = 8


@dataclass(frozen=True)
class Agreement:
    """What one rank has, to be compared with the others before the world is made.

    Attributes:
        values: field to JSON-able value.
        source: tells where a field's value came from, if that is known; asked only where ranks differ.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    source: Callable[[str], str | None] = lambda _: None

    def having(self, more: Mapping[str, Any]) -> Self:
        """Add fields, unless they are there; they have no source."""
        return replace(self, values={**more, **self.values})

    @cached_property
    def rendered(self) -> str:
        """All fields as text that is equal on ranks that agree."""
        return json.dumps({name: _shown(value) for name, value in self.values.items()}, sort_keys=True)

    @property
    def digest(self) -> str:
        """Equal on ranks that agree."""
        return hashlib.sha256(self.rendered.encode()).hexdigest()

    def deviation(self, rendered: str) -> dict[str, Said]:
        """List what this rank has otherwise than the one that rendered its fields so."""
        own, other = json.loads(self.rendered), json.loads(rendered)
        differing = sorted(name for name in {*own, *other} if own.get(name) != other.get(name))
        return {name: self.said(name) for name in differing}

    def said(self, name: str) -> Said:
        """Tell a field's value and where it came from."""
        if name not in self.values:
            return _ABSENT, None
        return _shown(self.values[name]), self.source(name)

    def problems(self, deviations: Mapping[int, Deviation], ranks: Iterable[int]) -> Iterator[Problem]:
        """Tell each field that ranks have differently: who has which value, and where all but the most have it from.

        Args:
            deviations: rank to what it has otherwise than this rank, the first of all.
            ranks: all that have been compared, those that agree with this one too.
        """
        ranks = sorted({*ranks, *deviations})
        for name in sorted({name for deviation in deviations.values() for name in deviation}):
            held: dict[str, list[int]] = {}
            sources: dict[str, str | None] = {}
            for rank in ranks:
                value, source = deviations.get(rank, {}).get(name) or self.said(name)
                held.setdefault(value, []).append(rank)
                sources.setdefault(value, source)
            yield Problem(name, _division(held, sources))


def agreement_of(
    agreed: Callable[[], Mapping[str, Any]], explain: Callable[[str], Explanation], plan: Plan
) -> Agreement:
    """Gather what ranks of a runtime must have alike: settings, collective services, and the version that runs them.

    Of the overrides, those of collective services and of what these are built from are named: what takes their place
    makes other groups, or none, or sizes models otherwise.

    Args:
        agreed: gives the settings that all ranks must have alike.
        explain: tells where one of them came from.
        plan: that is being opened.
    """
    settings = agreed()
    services = [name for name in plan.order if plan.services[name].phase.is_collective]
    used = {*services}
    for name in reversed(plan.order):  # whatever a service is built from comes before it
        used |= {*plan.services[name].dependencies} if name in used else set()
    return Agreement(settings, lambda name: explain(name).source if name in settings else None).having(
        {
            "collective services": services,
            "overridden services": sorted(plan.overridden & used),
            "version of runtime-di": version("runtime-di"),
        }
    )


def told(ranks: Sequence[int]) -> str:
    """Write ascending ranks with what they are: ``rank 3``, ``ranks 0-5,7``."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)}"


def ranges(ranks: Iterable[int]) -> str:
    """Write ascending ranks with runs drawn together: ``0-5,7``; of very many runs the first ones."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    written = [f"{first}-{last}" if last > first else f"{first}" for first, last in runs[:_MOST_RANGES]]
    rest = sum(last - first + 1 for first, last in runs[_MOST_RANGES:])
    return ",".join(written) + (f" and {rest} more" if rest else "")


def _division(held: Mapping[str, list[int]], sources: Mapping[str, str | None]) -> str:
    most = max(map(len, held.values()))
    alone = sum(len(ranks) == most for ranks in held.values()) == 1
    parts = []
    for value, ranks in sorted(held.items(), key=lambda item: (-len(item[1]), item[1])):
        source = "" if (alone and len(ranks) == most) or not sources[value] else f" (from {sources[value]})"
        parts.append(f"{value} on {told(ranks)}{source}")
    return "; ".join(parts)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
