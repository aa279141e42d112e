"""The pydantic model below all settings: frozen, without unknown fields, validated when copied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict


class FrozenModel(BaseModel):
    """Base of the settings sections. Validation has no side effects."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        revalidate_instances="always",
        use_attribute_docstrings=True,
        ser_json_inf_nan="constants",
    )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a validated copy; pydantic's ``model_copy`` does not validate ``update``."""
        return type(self).model_validate({**dict(self), **(update or {})})
