"""A section of the settings: frozen values that one service reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from runtime_di.capabilities import Requirement
    from runtime_di.launch import LaunchSettings


class Mark(Enum):
    """What is particular about a field or a whole section: ``rank: Annotated[int, Mark.PER_RANK]``."""

    PER_RANK = "per-rank"
    """Differs between ranks by nature; ranks need not agree on it, and a checkpoint does not carry it."""
    NOT_PORTABLE = "not portable"
    """Belongs to this run; settings taken from a checkpoint never bring it."""


class Section(BaseModel):
    """Base of a settings section; validation is pure, and what a machine must offer is asked by ``requires``."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        revalidate_instances="always",
        use_attribute_docstrings=True,
        ser_json_inf_nan="constants",
    )

    def requires(self, launch: LaunchSettings) -> Iterable[Requirement]:
        """Name what these values need of the machine of the rank in ``launch``, without importing or opening it."""
        return ()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a validated copy; pydantic's own skips validation of ``update``."""
        return type(self).model_validate({**dict(self), **(update or {})})
