"""What a checkpoint says about itself in plain JSON: readable without torch, on any machine."""

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
    from runtime_di.providers.rank_grid import RankGrid

FORMAT = 2
"""Version of a checkpoint's files; one that is read by other code than before gets the next number.

Snapshots of format 1 lack ``grids``, ``files`` and ``weights``, which older code would pass over.
"""
SNAPSHOT_FILE = "snapshot.json"
_COMPLETE = re.compile(r"step-(\d{8,})")
_PARTIAL = re.compile(r"step-\d{8,}\.tmp-\w+")
_AXES = ("tp", "pp", "cp", "ep", "etp", "order")
Layout = Mapping[str, Any]
"""Ranks of a world, how they are laid out by axis, and the grids that divide them: fields of a `Snapshot`."""


def _stays_in_its_folder(name: str) -> str:
    if name in ("", ".", "..") or not {*"/\\\0"}.isdisjoint(name):
        raise ValueError(f"{name!r} is no name of a file in the checkpoint's own folder")
    return name


FileName = Annotated[str, AfterValidator(_stays_in_its_folder)]


class CheckpointError(ProblemsError):
    """A checkpoint cannot be written or read; the cause, if any, is chained."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Settings and vocabulary of the run that wrote a checkpoint, detached from any live object.

    Attributes:
        step: the training step that the checkpoint holds.
        settings: the portable settings, nested by section.
        vocabulary: sizes and origin of the vocabulary, or ``None`` where the run had none.
        world_size: ranks that wrote it.
        parallel: how they were laid out, by axis.
        grids: name to ranks and layout of each grid that divided them.
        files: section to field to file of this checkpoint's folder, for settings that name a file which lies there.
        weights: how the paths of the weights begin which are all that the checkpoint holds; ``None`` for a whole state.
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
        """What is equal for two runs in which a rank of one has the part of the same rank of the other."""
        return {"world_size": self.world_size, "parallel": self.parallel, "grids": self.grids}


_SNAPSHOT = TypeAdapter(Snapshot)


@dataclass(frozen=True, slots=True)
class ReadableCheckpoint:
    """A complete checkpoint at ``path``, or in the folder ``unless``, which comes before it."""

    field: str
    path: Path
    unless: Path | None = None

    def lacking(self) -> tuple[str, str] | None:
        if find_checkpoint(self.path) or (self.unless and latest_complete(self.unless)):
            return None
        return f"no complete checkpoint in {self.path}", "name a checkpoint, or a folder of checkpoints"


def layout_of(world: RankGrid, grids: Mapping[str, RankGrid]) -> Layout:
    """How the ranks of a world, and of each grid that divides it, are laid out."""
    divided = {
        name: {"offset": grid.offset, "world_size": grid.world_size, **_by_axis(grid)} for name, grid in grids.items()
    }
    return {"world_size": world.world_size, "parallel": _by_axis(world), "grids": divided}


def _by_axis(grid: RankGrid) -> dict[str, Any]:
    return {axis: getattr(grid, axis) for axis in _AXES}


def folder_name(step: int) -> str:
    """The name of the folder that holds the complete checkpoint of ``step``."""
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
    """What saves that did not come to their end have left in ``root``."""
    return sorted(path for path in root.iterdir() if _PARTIAL.fullmatch(path.name))


def latest_complete(root: Path) -> Path | None:
    """The complete checkpoint of the latest step in ``root``, or ``None`` if it holds none."""
    return next(reversed(checkpoints(root)), None)


def find_checkpoint(path: Path) -> Path | None:
    """``path`` itself if it is a complete checkpoint, or the latest one that it holds."""
    return path if _is_complete(path) else latest_complete(path)


def _is_complete(path: Path) -> bool:
    return (path / SNAPSHOT_FILE).is_file() and not _PARTIAL.fullmatch(path.name)


def read_snapshot(path: Path) -> Snapshot:
    """Read the snapshot of a checkpoint, or of the latest complete one in a folder of several.

    Raises:
        CheckpointError: ``path`` holds no complete checkpoint, its snapshot is malformed, or of a newer format.
    """
    checkpoint = find_checkpoint(path)
    if checkpoint is None:
        fix = "name a checkpoint, or a folder of checkpoints"
        raise CheckpointError("No checkpoint was found.", [Problem(str(path), "holds no complete checkpoint", fix=fix)])
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
    """Write a checkpoint's snapshot to stable storage; it is what makes the checkpoint complete, so it comes last."""
    with (folder / SNAPSHOT_FILE).open("x") as file:
        json.dump(asdict(snapshot), file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def malformed(file: Path, error: Exception) -> CheckpointError:
    """The error for a file of a checkpoint that does not hold what it should."""
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
        [Problem(str(file), f"format {found}, while this version reads up to {FORMAT}", fix="upgrade runtime-di")],
    )
