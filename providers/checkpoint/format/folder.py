"""Folders of checkpoints: a checkpoint is written as a partial folder and becomes complete by one rename.

All functions are called on rank 0 alone. Readers ignore partial folders.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from runtime_di.errors import Problem
from runtime_di.providers.checkpoint.format.snapshot import (
    CheckpointError,
    Snapshot,
    checkpoints,
    folder_name,
    latest_complete,
    partial_checkpoints,
    step_of,
    write_snapshot,
)


def begin(root: Path, step: int) -> Path:
    """Create the partial folder for ``step``, and delete partial folders of earlier saves.

    Raises:
        CheckpointError: ``root`` contains this step or a later one, from which a resume would start instead.
    """
    latest = latest_complete(root)
    if step <= (step_of(latest) if latest else -1):
        raise _not_later(root, step, latest)
    root.mkdir(parents=True, exist_ok=True)
    for stale in partial_checkpoints(root):
        shutil.rmtree(stale)
    partial = _partial(root, step)
    partial.mkdir()
    return partial


def commit(partial: Path, snapshot: Snapshot) -> Path:
    """Make a partial folder, whose other files are on stable storage, the complete checkpoint of its step."""
    return publish(partial, partial.with_name(folder_name(snapshot.step)), snapshot)


def publish(partial: Path, complete: Path, snapshot: Snapshot) -> Path:
    """Write the snapshot into a partial folder, then rename the folder to ``complete``."""
    write_snapshot(partial, snapshot)
    sync(partial)
    partial.rename(complete)
    sync(complete.parent)
    return complete


@contextmanager
def created_folder(folder: Path) -> Iterator[Path]:
    """Create a folder and its parents; if the block fails, remove those that did not exist before."""
    new = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    except BaseException:
        with suppress(OSError):  # it was not created, or is no longer empty
            for place in new:
                place.rmdir()
        raise


def prune(root: Path, keep: int) -> None:
    """Delete all but the ``keep`` latest checkpoints; each is renamed to a partial folder first."""
    for checkpoint in checkpoints(root)[:-keep]:
        doomed = checkpoint.rename(_partial(root, step_of(checkpoint)))
        shutil.rmtree(doomed)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to stable storage."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _partial(root: Path, step: int) -> Path:
    return root / f"{folder_name(step)}.tmp-{uuid.uuid4().hex[:8]}"


def _not_later(root: Path, step: int, latest: Path | None) -> CheckpointError:
    what = f"step {step} is not after the latest checkpoint there, {latest.name}" if latest else "a step is at least 0"
    return CheckpointError(
        f"The checkpoint of step {step} was not saved.",
        [Problem("checkpoint.folder", what, str(root), fix="resume from it with load(), or set another folder")],
    )
