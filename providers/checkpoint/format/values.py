"""The plain values of a state, one JSON file a rank."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime_di.errors import Problem
from runtime_di.providers.checkpoint.format.encoding import decode, encode
from runtime_di.providers.checkpoint.format.folder import sync
from runtime_di.providers.checkpoint.format.snapshot import CheckpointError, malformed


@dataclass(frozen=True, slots=True)
class Values:
    """Plain values loaded for a rank.

    Attributes:
        known: path to value.
        differing: paths whose values differ between the ranks that saved them.
    """

    known: Mapping[str, Any]
    differing: frozenset[str] = frozenset()


def write_values(folder: Path, rank: int, values: Mapping[str, Any]) -> None:
    """Write the values of one rank to stable storage.

    Raises:
        CheckpointError: some are of types that cannot be saved without loss; it names all of them.
    """
    file = _file(folder, rank)
    file.write_text(json.dumps(_encoded(values)))
    sync(file)


def read_values(folder: Path, rank: int) -> Values:
    """Read the values of one rank.

    Raises:
        CheckpointError: its file cannot be read, or is malformed.
    """
    return Values(_decoded(_file(folder, rank), _read(_file(folder, rank))))


def read_common_values(folder: Path, num_ranks: int) -> Values:
    """Read the values that are equal on all of ``num_ranks`` ranks that have them, for a rank of another layout.

    Raises:
        CheckpointError: a file cannot be read, or is malformed.
    """
    merged: dict[str, Any] = {}
    texts: dict[str, set[str]] = defaultdict(set)
    for rank in range(num_ranks):
        values = _read(_file(folder, rank))
        merged |= values
        for path, value in values.items():
            texts[path].add(json.dumps(value, sort_keys=True))
    common = {path: value for path, value in merged.items() if len(texts[path]) == 1}
    return Values(_decoded(folder, common), frozenset(merged.keys() - common.keys()))


def _file(folder: Path, rank: int) -> Path:
    return folder / f"values-{rank:05d}.json"


def _encoded(values: Mapping[str, Any]) -> dict[str, Any]:
    encoded, problems = {}, []
    for path, value in values.items():
        try:
            encoded[path] = encode(value)
        except TypeError as error:
            fix = "convert it to numbers, strings, bytes, lists, tuples, dicts or tensors, as numpy's tolist() does"
            problems.append(Problem(f"state {path}", f"contains a {error}, which a checkpoint cannot store", fix=fix))
    if problems:
        raise CheckpointError("The state cannot be saved.", problems)
    return encoded


def _read(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_bytes())
        if not isinstance(values, dict):
            raise TypeError(f"a JSON object is expected, not {type(values).__name__}")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise malformed(file, error) from error
    return values


def _decoded(source: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {path: decode(value) for path, value in values.items()}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise malformed(source, error) from error
