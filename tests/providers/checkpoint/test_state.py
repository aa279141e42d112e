"""The leaves of a nested state."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runtime_di.providers.checkpoint.format.snapshot import (
    CheckpointError,
)
from tests.support.checkpoints.saved import open_for, weights


def test_tensors_and_values_may_be_nested(tmp_path):
    """Tensors among plain values, in dicts, lists and tuples, are filled in place; values are replaced."""
    open_for(tmp_path).save({"a": {0: [weights(), {"lr": 0.1}], "t": (torch.ones(2), 5)}, "n": 7}, 1)
    targets = [weights(fill=0), torch.zeros(2)]
    state: dict[str, Any] = {"a": {0: [targets[0], {}], "t": (targets[1], None)}, "n": 0}

    open_for(tmp_path).load(state)

    assert torch.equal(targets[0], weights())
    assert torch.equal(targets[1], torch.ones(2))
    assert (state["a"][0][1], state["a"]["t"][1], state["n"]) == ({"lr": 0.1}, 5, 7)


def test_paths_that_collide_are_refused(tmp_path):
    """Two entries with the same dotted path would overwrite each other and are refused."""
    with pytest.raises(CheckpointError, match=r"state a\.b: two entries share this path"):
        open_for(tmp_path).save({"a": {"b": torch.ones(1)}, "a.b": 1}, 1)
