"""Requirements of the enabled services that this machine does not meet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from runtime_di.errors import Problem
from runtime_di.plan.specs import ServiceSpec
from runtime_di.settings.model import RuntimeSettings
from runtime_di.settings.section import Section


def unmet(specs: Iterable[ServiceSpec], settings: RuntimeSettings) -> Iterator[Problem]:
    """Check the requirements of every section that these services read, each section once."""
    sections: dict[str, Section] = {}
    for spec in specs:
        for path in spec.settings:
            sections.update(_sections(settings, path.names))
    for prefix, section in sections.items():
        for requirement in section.requires(settings.launch):
            lacking = requirement.lacking()
            if lacking is not None:
                what, fix = lacking
                where = ".".join(filter(None, (prefix, requirement.field)))
                explanation = settings.explain(where)
                yield Problem(where, what, explanation.value, explanation.source, fix)


def _sections(settings: RuntimeSettings, names: tuple[str, ...]) -> Iterator[tuple[str, Section]]:
    """The section at the end of a path and the sections inside it, or the section whose field the path names."""
    value: object = settings
    last: tuple[str, Section] | None = None
    for position, name in enumerate(names):
        value = getattr(value, name) if name in getattr(type(value), "model_fields", {}) else None
        if isinstance(value, Section):
            last = ".".join(names[: position + 1]), value
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
