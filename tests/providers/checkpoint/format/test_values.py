"""The files of plain values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runtime_di.providers.checkpoint.format.snapshot import (
    CheckpointError,
    latest_complete,
)
from tests.support.checkpoints.saved import open_for


def test_all_values_that_cannot_be_saved_are_reported_together(tmp_path):
    """The error names every value that cannot be stored, with a fix, and no complete checkpoint is left."""
    state = {"numpy": np.zeros(2), "deep": {"x": [{1, 2}]}, "fine": 1, "shape": torch.Size([2])}

    with pytest.raises(CheckpointError) as caught:
        open_for(tmp_path).save(state, 1)

    fix = "    fix: convert it to numbers, strings, bytes, lists, tuples, dicts or tensors, as numpy's tolist() does"
    assert str(caught.value) == (
        "The state cannot be saved.\n"
        f"  state deep: contains a builtins.set, which a checkpoint cannot store\n{fix}\n"
        f"  state numpy: contains a numpy.ndarray, which a checkpoint cannot store\n{fix}\n"
        f"  state shape: contains a torch.Size, which a checkpoint cannot store\n{fix}"
    )
    assert latest_complete(tmp_path) is None
