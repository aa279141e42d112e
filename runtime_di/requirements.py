"""Which requirements of the enabled services this machine does not meet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from runtime_di.errors import Problem
from runtime_di.section import Section

if TYPE_CHECKING:
    from runtime_di.settings import RuntimeSettings
    from runtime_di.specs import ServiceSpec


def unmet(specs: Iterable[ServiceSpec], settings: RuntimeSettings) -> Iterator[Problem]:
    """Ask the sections that these services read, each once, what they lack here."""
    asked: dict[str, Section] = {}
    for spec in specs:
        for path in spec.settings:
            asked.update(_sections(settings, path.names))
    for prefix, section in asked.items():
        for requirement in section.requires(settings.launch):
            lacking = requirement.lacking()
            if lacking is not None:
                what, fix = lacking
                where = ".".join(filter(None, (prefix, requirement.field)))
                told = settings.explain(where)
                yield Problem(where, what, told.value, told.source, fix)


def _sections(settings: RuntimeSettings, names: tuple[str, ...]) -> Iterator[tuple[str, Section]]:
    """The section that a path ends in or reads a field of, with the sections inside the former."""
    value: object = settings
    last: tuple[str, Section] | None = None
    for place, name in enumerate(names):
        value = getattr(value, name) if name in getattr(type(value), "model_fields", {}) else None
        if isinstance(value, Section):
            last = ".".join(names[: place + 1]), value
    if isinstance(value, Section) and last is not None:
        yield from _nested(*last)
    elif not names:
        for name in type(settings).model_fields:
            yield from _sections(settings, (name,))
    elif last is not None:
        yield last


def _nested(path: str, section: Section) -> Iterator[tuple[str, Section]]:
    yield path, section
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _nested(f"{path}.{name}", value)
