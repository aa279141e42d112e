"""The error tree: every fault that the runtime tells its user, with what, where and how to mend it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        where: dotted path of a setting, or name of a service.
        what: the rule that is broken, as a sentence without a full stop.
        value: the value given, already rendered and masked where secret; ``None`` if there is none to show.
        source: where the value came from, such as ``command line``.
        fix: what to do about it.
        details: further ``(label, text)`` lines, such as the path of a cycle.
        involves: other settings that the rule reads; it is not told when one of them is invalid by itself.
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
    """Base of the errors that tell several problems at once."""

    def __init__(self, heading: str, problems: Iterable[Problem] = ()) -> None:
        self.heading = heading
        self.problems: Sequence[Problem] = tuple(problems)
        super().__init__(heading, self.problems)

    def __str__(self) -> str:
        told = "\n".join(str(problem) for problem in self.problems)
        return "\n".join([self.heading, *("  " + line for line in told.splitlines())])


class SettingsError(ProblemsError, ValueError):
    """Settings are invalid, on any machine."""


class PlanError(ProblemsError):
    """A container declares services that cannot be built as declared."""


class CapabilityError(ProblemsError):
    """Valid settings need something that this machine lacks."""


class OverrideError(ProblemsError, TypeError):
    """An override names no service, or does not fit the service's annotated type."""


class AgreementError(ProblemsError):
    """Ranks of one job were started with different settings, plans or versions."""


class VocabularyError(ProblemsError, ValueError):
    """Sizes of the vocabulary contradict each other."""


class ServiceError(ProblemsError):
    """A service could not be built; the cause, if any, is chained."""


class ServiceDisabledError(ProblemsError, LookupError):
    """A service was asked for that the settings switch off."""


class ClosedError(ProblemsError):
    """A service was asked of a runtime that is closed, or that belongs to the parent of a forked process."""


class CloseError(ExceptionGroup[Exception], RuntimeDIError):
    """Teardowns that failed while the rest went on."""

    def derive(self, excs: Sequence[Exception], /) -> CloseError:  # type: ignore[override]
        return CloseError(self.message, excs)
