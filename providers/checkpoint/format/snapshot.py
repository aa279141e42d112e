"""The snapshot of a checkpoint: its description as plain JSON, readable without torch on any machine."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from runtime_di.errors import Problem, ProblemsError

if TYPE_CHECKING:
    from runtime_di.providers.process_groups.rank_grid import RankGrid

FORMAT = 2
"""Version of a checkpoint's files; raised when older code could not read them correctly.

Snapshots of format 1 lack ``grids``, ``files`` and ``weights``, which older code would ignore.
"""
SNAPSHOT_FILE = "snapshot.json"
_COMPLETE = re.compile(r"step-(\d{8,})")
_PARTIAL = re.compile(r"step-\d{8,}\.tmp-\w+")
_AXES = ("tp", "pp", "cp", "ep", "etp", "order")
Layout = Mapping[str, Any]
"""World size, size of each parallel axis, and the grids that divide the world: fields of a `Snapshot`."""


def _stays_in_its_folder(name: str) -> str:
    if name in ("", ".", "..") or not {*"/\\\0"}.isdisjoint(name):
        raise ValueError(f"{name!r} is not the name of a file in the checkpoint's own folder")
    return name


FileName = Annotated[str, AfterValidator(_stays_in_its_folder)]


class CheckpointError(ProblemsError):
    """A checkpoint cannot be written or read; the cause, if any, is chained."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Settings and vocabulary of the run that wrote a checkpoint, detached from any live object.

    Attributes:
        step: the training step after which the checkpoint was saved.
        settings: the portable settings, nested by section.
        vocabulary: sizes and origin of the vocabulary, or ``None`` if the run had no vocabulary.
        world_size: number of ranks that wrote it.
        parallel: size of each parallel axis, and their order.
        grids: name to ranks and layout of each grid that divided the world.
        files: section to field to file name, for settings that name a file in the checkpoint's folder.
        weights: prefix of the weights' paths if the checkpoint contains the weights alone; ``None`` for a whole state.
        format: version of the checkpoint's files.
    """

    step: NonNegativeInt
    settings: Mapping[str, Any]
    vocabulary: Mapping[str, Any] | None = None
    world_size: PositiveInt = 1
    parallel: Mapping[str, Any] = field(default_factory=dict)
    grids: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    files: Mapping[str, Mapping[str, FileName]] = field(default_factory=dict)
    weights: str | None = None
    format: PositiveInt = FORMAT

    @property
    def layout(self) -> Layout:
        """The parallel layout; two runs with equal layouts place every rank at the same position."""
        return {"world_size": self.world_size, "parallel": self.parallel, "grids": self.grids}


_SNAPSHOT = TypeAdapter(Snapshot)


@dataclass(frozen=True, slots=True)
class ReadableCheckpoint:
    """Requires a complete checkpoint at ``path``, or in the folder ``unless``, which takes precedence."""

    field: str
    path: Path
    unless: Path | None = None

    def lacking(self) -> tuple[str, str] | None:
        if find_checkpoint(self.path) or (self.unless and latest_complete(self.unless)):
            return None
        return f"no complete checkpoint in {self.path}", "name a checkpoint, or a folder of checkpoints"


def layout_of(world: RankGrid, grids: Mapping[str, RankGrid]) -> Layout:
    """Return the parallel layout of a world and of each grid that divides it."""
    divided = {
        name: {"offset": grid.offset, "world_size": grid.world_size, **_by_axis(grid)} for name, grid in grids.items()
    }
    return {"world_size": world.world_size, "parallel": _by_axis(world), "grids": divided}


def _by_axis(grid: RankGrid) -> dict[str, Any]:
    return {axis: getattr(grid, axis) for axis in _AXES}


def folder_name(step: int) -> str:
    """The name of the folder of the complete checkpoint of ``step``."""
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The step in the name of a folder that `checkpoints` lists."""
    return int(checkpoint.name.removeprefix("step-"))


def checkpoints(root: Path) -> list[Path]:
    """The complete checkpoints in ``root``, the latest step last; none if there is no such folder."""
    if not root.is_dir():
        return []
    return sorted(
        (path for path in root.iterdir() if _COMPLETE.fullmatch(path.name) and _is_complete(path)), key=step_of
    )


def partial_checkpoints(root: Path) -> list[Path]:
    """The partial folders in ``root`` that unfinished saves left behind."""
    return sorted(path for path in root.iterdir() if _PARTIAL.fullmatch(path.name))


def latest_complete(root: Path) -> Path | None:
    """The complete checkpoint of the latest step in ``root``, or ``None`` if there is none."""
    return next(reversed(checkpoints(root)), None)


def find_checkpoint(path: Path) -> Path | None:
    """Return ``path`` itself if it is a complete checkpoint, or else the latest complete one in it."""
    return path if _is_complete(path) else latest_complete(path)


def _is_complete(path: Path) -> bool:
    return (path / SNAPSHOT_FILE).is_file() and not _PARTIAL.fullmatch(path.name)


def read_snapshot(path: Path) -> Snapshot:
    """Read the snapshot of a checkpoint, or of the latest complete one in a folder of several.

    Raises:
        CheckpointError: ``path`` contains no complete checkpoint, or its snapshot is malformed or of a newer format.
    """
    checkpoint = find_checkpoint(path)
    if checkpoint is None:
        fix = "name a checkpoint, or a folder of checkpoints"
        raise CheckpointError(
            "No checkpoint was found.", [Problem(str(path), "contains no complete checkpoint", fix=fix)]
        )
    file = checkpoint / SNAPSHOT_FILE
    try:
        content = file.read_bytes()
        values = json.loads(content)
        if isinstance(values, dict) and isinstance(values.get("format"), int) and values["format"] > FORMAT:
            raise _newer(file, values["format"])
        return _SNAPSHOT.validate_json(content, strict=True)
    except (OSError, ValueError, RecursionError) as error:
        raise malformed(file, error) from error


def write_snapshot(folder: Path, snapshot: Snapshot) -> None:
    """Write a checkpoint's snapshot to stable storage; written last, because it makes the checkpoint complete."""
    with (folder / SNAPSHOT_FILE).open("x") as file:
        json.dump(asdict(snapshot), file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def malformed(file: Path, error: Exception) -> CheckpointError:
    """Return the error for a malformed or unreadable file of a checkpoint."""
    what = f"malformed: {error}"
    if isinstance(error, ValidationError):
        what = "malformed: " + "; ".join(
            f"{'.'.join(map(str, detail['loc'])) or 'content'}: {detail['msg'].lower()}"
            for detail in error.errors()[:3]
        )
    if isinstance(error, OSError):
        what = f"cannot be read: {error.strerror or error}"
    return CheckpointError("A checkpoint cannot be read.", [Problem(str(file), what, fix="use another checkpoint")])


def _newer(file: Path, found: int) -> CheckpointError:
    return CheckpointError(
        "A checkpoint is of a newer format.",
        [
            Problem(
                str(file), f"format {found}, while this version reads formats up to {FORMAT}", fix="upgrade runtime-di"
            )
        ],
    )
