"""The error tree: every error that runtime-di raises says what is wrong, where, and how to fix it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        where: dotted path of a setting, or name of a service.
        what: the rule that is broken, as a sentence without a full stop.
        value: the rejected value as text, masked if it is secret; ``None`` if there is nothing to print.
        source: where the value came from, such as ``command line``.
        fix: what to do about it.
        details: further ``(label, text)`` lines, such as the path of a cycle.
        involves: other settings that the rule reads; the problem is left out if one of them is itself invalid.
    """

    where: str
    what: str
    value: str | None = None
    source: str | None = None
    fix: str | None = None
    details: tuple[tuple[str, str], ...] = ()
    involves: tuple[str, ...] = ()

    def __str__(self) -> str:
        subject = self.where if self.value is None else f"{self.where} = {self.value}"
        subject += f" (from {self.source})" if self.source else ""
        lines = list(self.details) + ([("fix", self.fix)] if self.fix else [])
        width = max((len(label) for label, _ in lines), default=0) + 1
        return "\n".join(
            [f"{subject}: {self.what}" if subject else self.what]
            + [f"  {label + ':':<{width}} {text}" for label, text in lines]
        )


class RuntimeDIError(Exception):
    """Base of every error that runtime-di raises on purpose."""


class ProblemsError(RuntimeDIError):
    """Base of the errors that report several problems at once."""

    def __init__(self, heading: str, problems: Iterable[Problem] = ()) -> None:
        self.heading = heading
        self.problems: Sequence[Problem] = tuple(problems)
        super().__init__(heading, self.problems)

    def __str__(self) -> str:
        text = "\n".join(str(problem) for problem in self.problems)
        return "\n".join([self.heading, *("  " + line for line in text.splitlines())])


class SettingsError(ProblemsError, ValueError):
    """The settings are invalid on every machine."""


class PlanError(ProblemsError):
    """A container declares services that cannot be built as declared."""


class CapabilityError(ProblemsError):
    """The settings are valid, but this machine lacks something that they need."""


class OverrideError(ProblemsError, TypeError):
    """An override names an unknown service, or does not fit the service's annotated type."""


class AgreementError(ProblemsError):
    """The ranks of one job differ in settings, plan or versions."""


class VocabularyError(ProblemsError, ValueError):
    """Sizes of the vocabulary contradict each other."""


class ServiceError(ProblemsError):
    """A service could not be built; the cause, if any, is chained."""


class ServiceDisabledError(ProblemsError, LookupError):
    """The requested service is switched off by the settings, or was not provided by the caller."""

    @classmethod
    def until_overridden(cls, name: str, instead: str) -> Self:
        """Create the error of a service that only the caller provides; ``instead`` says what happens without it."""
        fix = f"pass one to open(): overrides={{'{name}': ...}}"
        return cls(f"No '{name}' was provided.", [Problem(name, f"none was provided, so {instead}", fix=fix)])


class ClosedError(ProblemsError):
    """A service was requested from a runtime that is closed, or that a parent process opened before a fork."""


class CloseError(ExceptionGroup[Exception], RuntimeDIError):
    """The errors of failed teardowns; every other teardown has run as well."""

    def derive(self, excs: Sequence[Exception], /) -> CloseError:  # type: ignore[override]
        return CloseError(self.message, excs)
