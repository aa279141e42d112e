"""A folder of checkpoints as its writer sees it: begun under another name, and complete by one rename.

Called on rank 0 alone. Readers take no notice of a folder that was begun and never committed.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from runtime_di.errors import Problem
from runtime_di.providers.snapshot import (
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
    """Make the partial folder for ``step``, in the place of those that earlier saves left behind.

    Raises:
        CheckpointError: ``root`` holds this step or a later one, which a resume would take for the newer state.
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
    """Turn a partial folder, whose other files are on stable storage, into the complete checkpoint of its step."""
    return publish(partial, partial.with_name(folder_name(snapshot.step)), snapshot)


def publish(partial: Path, complete: Path, snapshot: Snapshot) -> Path:
    """Give a folder its snapshot, and then the name under which it is read."""
    write_snapshot(partial, snapshot)
    sync(partial)
    partial.rename(complete)
    sync(complete.parent)
    return complete


@contextmanager
def made(folder: Path) -> Iterator[Path]:
    """Make a folder with its parents, of which none stays that was not there before if the block fails."""
    new = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    except BaseException:
        with suppress(OSError):  # it was not made, or somebody else uses it by now
            for place in new:
                place.rmdir()
        raise


def prune(root: Path, keep: int) -> None:
    """Delete all but the ``keep`` latest checkpoints; one that is being deleted is complete no more."""
    for checkpoint in checkpoints(root)[:-keep]:
        doomed = checkpoint.rename(_partial(root, step_of(checkpoint)))
        shutil.rmtree(doomed)


def sync(path: Path) -> None:
    """Bring a file, or a folder's list of names, to stable storage."""
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
        [Problem("checkpoint.folder", what, str(root), fix="resume from it with load(), or give another folder")],
    )
