"""Snapshots of checkpoints: found, read and checked without torch."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from runtime_di.providers.checkpoint.format.snapshot import (
    CheckpointError,
    ReadableCheckpoint,
    Snapshot,
    checkpoints,
    latest_complete,
    layout_of,
    read_snapshot,
    write_snapshot,
)
from runtime_di.providers.process_groups.rank_grid import RankGrid

SETTINGS = {"vocabulary": {"divisible_by": 128}, "rates": [0.1, 1e-300], "name": None}


def complete(root, name, step=0):
    folder = root / name
    folder.mkdir(parents=True)
    write_snapshot(folder, Snapshot(step=step, settings=SETTINGS))
    return folder


def test_snapshot_is_read_as_written(tmp_path):
    """The snapshot that is read equals the one written, whether the checkpoint or its folder is named."""
    folder = tmp_path / "step-00000020"
    folder.mkdir()
    written = Snapshot(
        step=20,
        settings=SETTINGS,
        vocabulary={"size": 50257},
        **layout_of(RankGrid(world_size=2, tp=2), {"trainer": RankGrid(world_size=1, offset=1)}),
        files={"tokenizer": {"path": "tokenizer.json"}},
        weights="trainer.model.",
    )
    write_snapshot(folder, written)

    read = [read_snapshot(folder), read_snapshot(tmp_path)]

    assert read == [written, written]


def test_latest_is_by_step_and_complete(tmp_path):
    """The latest checkpoint has the highest step; partial checkpoints and other folders do not count."""
    expected = [
        complete(tmp_path, "step-00000090"),
        complete(tmp_path, "step-99999999"),
        complete(tmp_path, "step-100000000"),
    ]
    complete(tmp_path, "step-200000000.tmp-0a1b2c3d")
    (tmp_path / "step-300000000").mkdir()
    complete(tmp_path, "notes-400000000")

    found = checkpoints(tmp_path)

    assert (found, latest_complete(tmp_path), latest_complete(tmp_path / "none")) == (expected, expected[-1], None)


def test_partial_checkpoint_is_refused_by_name(tmp_path):
    """A partial checkpoint is refused even if it is named."""
    partial = complete(tmp_path, "step-00000020.tmp-0a1b2c3d")

    with pytest.raises(CheckpointError) as caught:
        read_snapshot(partial)

    assert str(caught.value) == (
        f"No checkpoint was found.\n"
        f"  {partial}: contains no complete checkpoint\n"
        f"    fix: name a checkpoint, or a folder of checkpoints"
    )


def test_newer_format_is_refused(tmp_path):
    """A snapshot of a later format is refused as newer, whatever else it contains."""
    folder = complete(tmp_path, "any-name")
    (folder / "snapshot.json").write_text(json.dumps({"format": 3, "stride": 3}))

    with pytest.raises(CheckpointError) as caught:
        read_snapshot(folder)

    assert str(caught.value) == (
        f"A checkpoint is of a newer format.\n"
        f"  {folder}/snapshot.json: format 3, while this version reads formats up to 2\n"
        f"    fix: upgrade runtime-di"
    )


def test_format_1_is_read(tmp_path):
    """A snapshot of format 1, which lacks grids, is read with no grids and its other fields as written."""
    folder = complete(tmp_path, "any-name")
    written = {"step": 3, "settings": SETTINGS, "vocabulary": None, "world_size": 2, "parallel": {"tp": 2}, "format": 1}
    (folder / "snapshot.json").write_text(json.dumps(written))

    snapshot = read_snapshot(folder)

    assert snapshot == Snapshot(step=3, settings=SETTINGS, world_size=2, parallel={"tp": 2}, format=1)
    assert (snapshot.grids, snapshot.files, snapshot.weights) == ({}, {}, None)


def test_layout_includes_the_grids_that_divide_the_world():
    """Two layouts are equal only if all grids have the same ranks and sizes in both."""
    one, pair, split = RankGrid(world_size=1), RankGrid(world_size=2), RankGrid(world_size=2, tp=2)
    divisions = [
        {},
        {"trainer": pair, "rollout": pair},
        {"trainer": split, "rollout": pair},
        {"trainer": one, "rollout": replace(one, offset=1)},
        {"trainer": replace(one, offset=1), "rollout": one},
        {"teacher": one, "rollout": replace(one, offset=1)},
    ]

    layouts = [json.dumps(layout_of(pair, grids)) for grids in divisions]

    assert len({*layouts}) == len(divisions)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"null",
        b'{"step": 20',
        b'{"step": 20}',
        b'{"step": -1, "settings": {}}',
        b'{"step": "20", "settings": {}}',
        b'{"step": 20, "settings": []}',
        b'{"step": 20, "settings": {}, "format": "1"}',
        b'{"step": 20, "settings": {}, "grids": {"trainer": 1}}',
        b'{"step": 20, "settings": {}, "weights": 1}',
        b'{"step": 20, "settings": {}, "files": {"tokenizer": "tokenizer.json"}}',
        b'{"step": 20, "settings": {}, "files": {"tokenizer": {"path": ".."}}}',
        b'{"step": 20, "settings": {}, "files": {"tokenizer": {"path": "../tokenizer.json"}}}',
        b'{"step": 20, "settings": {}, "files": {"tokenizer": {"path": "/etc/passwd"}}}',
        b'{"step": 20, "settings": {}, "files": {"tokenizer": {"path": "a/tokenizer.json"}}}',
        b'{"step": 20, "settings": {}, "files": {"tokenizer": {"path": ""}}}',
        b"[" * 100_000,
        b'{"step": ' + b"9" * 5000 + b', "settings": {}}',
    ],
)
def test_malformed_snapshot_is_refused(tmp_path, content):
    """A snapshot file with any content is read, or refused with one error that names the file."""
    folder = complete(tmp_path, "step-00000020")
    (folder / "snapshot.json").write_bytes(content)

    with pytest.raises(CheckpointError, match=r"A checkpoint cannot be read\.\n  .*snapshot\.json: malformed: "):
        read_snapshot(folder)


class Hostile:
    """Touches a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickle_in_place_of_a_snapshot_is_not_executed(tmp_path):
    """A pickle in place of the snapshot is refused and not executed."""
    folder = complete(tmp_path, "step-00000020")
    (folder / "snapshot.json").write_bytes(pickle.dumps(Hostile(tmp_path / "touched")))

    with pytest.raises(CheckpointError, match="malformed"):
        read_snapshot(folder)

    assert not (tmp_path / "touched").exists()


def test_requirement_is_met_by_either_folder(tmp_path):
    """A checkpoint to start from is required only if the run's own folder contains none."""
    complete(tmp_path, "run/step-00000020")

    lacking = [
        ReadableCheckpoint("load", tmp_path / "gone").lacking(),
        ReadableCheckpoint("load", tmp_path / "gone", unless=tmp_path / "run").lacking(),
        ReadableCheckpoint("load", tmp_path / "run", unless=tmp_path / "none").lacking(),
    ]

    problem = (f"no complete checkpoint in {tmp_path}/gone", "name a checkpoint, or a folder of checkpoints")
    assert lacking == [problem, None, None]


@pytest.mark.processes
def test_reading_needs_no_torch(tmp_path):
    """Reading a snapshot and creating checkpoint settings does not import torch."""
    complete(tmp_path, "step-00000020")
    program = (
        "import sys; from pathlib import Path\n"
        "from runtime_di.providers.checkpoint.service import CheckpointSettings\n"
        "from runtime_di.providers.checkpoint.format.snapshot import read_snapshot\n"
        "print(read_snapshot(Path(sys.argv[1])).step, CheckpointSettings().every, 'torch' in sys.modules)"
    )

    ran = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True)

    assert ran.stdout == "0 1000 False\n"
