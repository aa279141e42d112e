"""The part of a Runtime class that a plan reads: the annotations that its services must fit."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, Protocol, TypeAlias

Annotation: TypeAlias = tuple[Any, str]
"""An annotation, as a type or as text, and the module in which it is written."""


class AnnotatedView(Protocol):
    """The class methods of a Runtime class that the plan uses."""

    @classmethod
    def reserved_names(cls) -> Set[str]:
        """Names that a service must not have."""
        ...

    @classmethod
    def service_annotations(cls) -> Mapping[str, Annotation]:
        """Service name to its annotation."""
        ...

    @classmethod
    def settings_annotation(cls) -> Annotation:
        """The annotation of ``settings``."""
        ...
