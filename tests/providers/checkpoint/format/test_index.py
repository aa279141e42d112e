"""The index of a checkpoint's tensors."""

from __future__ import annotations

import json

import pytest

from runtime_di.providers.checkpoint.format.snapshot import (
    CheckpointError,
)
from tests.support.checkpoints.saved import open_for, weights


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "load"}, "unknown dtype 'load'"),
        ({"dtype": "os"}, "unknown dtype 'os'"),
        ({"size": [6, 5]}, r"pieces do not make up a tensor of size \[6, 5\]"),
        ({"pieces": []}, r"pieces do not make up a tensor of size \[6, 4\]"),
        ({"file": "../secret.safetensors"}, "w.pieces.0.file: string should match pattern"),
        ({"file": "/etc/passwd"}, "w.pieces.0.file: string should match pattern"),
        ({"file": "gone.safetensors"}, "gone.safetensors cannot be read"),
        ({"name": "gone"}, "does not contain tensor gone"),
        ({"offsets": [1, 0]}, "pieces do not make up"),
        ({"offsets": [-1, 0]}, "greater than or equal to 0"),
    ],
)
def test_invalid_index_is_refused(tmp_path, change, message):
    """An index with an unknown dtype, a path outside the folder or pieces that do not fit is refused."""
    checkpoint = open_for(tmp_path).save({"w": weights()}, 1)
    index = json.loads((checkpoint / "tensors.json").read_text())
    entry = index["w"] if change.keys() <= index["w"].keys() else index["w"]["pieces"][0]
    entry.update(change)
    (checkpoint / "tensors.json").write_text(json.dumps(index))

    with pytest.raises(CheckpointError, match=message):
        open_for(tmp_path).load({"w": weights(fill=0)})
