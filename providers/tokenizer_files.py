"""Reading a tokenizer's files, so that every fault names the setting and the file."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from runtime_di.errors import Problem, SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def unusable(field: str, what: str, fix: str = "mend the file, or name another") -> SettingsError:
    """The error that says why the files or values in ``tokenizer.<field>`` make no tokenizer."""
    return SettingsError("The tokenizer cannot be opened.", [Problem(f"tokenizer.{field}", what, fix=fix)])


@contextmanager
def reading(field: str, path: Path) -> Iterator[None]:
    """Turn what a library raises about a file, of whatever type, into a `SettingsError`."""
    try:
        yield
    except Exception as error:
        raise unusable(field, f"{path} cannot be read: {error}") from error


def read_object(field: str, path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object."""
    with reading(field, path):
        value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise unusable(field, f"{path} holds a JSON {type(value).__name__}, not an object")
    return value
