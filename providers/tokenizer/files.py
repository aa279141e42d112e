"""Reads the files of a tokenizer, with errors that name the setting and the file."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from runtime_di.errors import Problem, SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def tokenizer_file_error(field: str, what: str, fix: str = "correct the file, or name another one") -> SettingsError:
    """Return the error for a file or value in ``tokenizer.<field>`` from which no tokenizer can be opened."""
    return SettingsError("The tokenizer cannot be opened.", [Problem(f"tokenizer.{field}", what, fix=fix)])


@contextmanager
def reading(field: str, path: Path) -> Iterator[None]:
    """Re-raise any exception of a library about a file as a `SettingsError`."""
    try:
        yield
    except Exception as error:
        raise tokenizer_file_error(field, f"{path} cannot be read: {error}") from error


def read_object(field: str, path: Path) -> dict[str, Any]:
    """Read a file that contains one JSON object."""
    with reading(field, path):
        value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise tokenizer_file_error(field, f"{path} contains a JSON {type(value).__name__}, not an object")
    return value
