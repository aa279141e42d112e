"""Settings of random numbers."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from runtime_di.providers.rng.settings import RngSettings


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"seed": 0}, "greater than 0"),
        ({"seed": 1 << 31}, "less than 2147483648"),
        ({"streams": [{"name": "data"}]}, r"stream names must differ .*; rename \['data'\]"),
        ({"streams": [{"name": "a"}, {"name": "a"}]}, r"rename \['a'\]"),
        ({"streams": [{"name": "a", "axes": ["xp"]}]}, "axes"),
    ],
)
def test_seeds_and_streams_are_checked(values: dict[str, Any], rule: str) -> None:
    """A seed out of range, a duplicate stream name and an unknown axis are refused when the settings are created."""
    with pytest.raises(ValidationError, match=rule):
        RngSettings.model_validate(values)
