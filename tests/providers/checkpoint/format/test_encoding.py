"""Plain values as JSON."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.checkpoints.saved import open_for


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**80),
        0.1,
        float("inf"),
        "naïve \U0001f600 \ud800",
        b"\x00\xff",
        [],
        {},
        (1, (2.5, None), [()]),
        {1: "a", None: [True], (0, 1): {"$tuple": 3}},
        {"$dict": [[1, 2]]},
        random.Random(1).getstate(),
    ],
)
def test_plain_value_is_restored(tmp_path, value):
    """A loaded plain value is equal to the saved one and of the same type."""
    open_for(tmp_path).save({"state": value}, 1)
    state = {"state": "another"}

    open_for(tmp_path).load(state)

    assert (state["state"], repr(state["state"])) == (value, repr(value))


def test_generators_continue_from_their_saved_state(tmp_path):
    """The states of torch's, numpy's and Python's generators are restored as plain values."""
    generator = torch.Generator().manual_seed(1)
    numbers, python = np.random.default_rng(1), random.Random(1)
    states = {"torch": generator.get_state(), "numpy": numbers.bit_generator.state, "python": python.getstate()}
    open_for(tmp_path).save({"rng": states}, 1)
    expected = torch.rand(3, generator=generator).tolist(), numbers.random(3).tolist(), python.random()
    state: dict[str, Any] = {"rng": {"torch": torch.Generator().get_state(), "numpy": {}, "python": ()}}

    open_for(tmp_path).load(state)
    generator.set_state(state["rng"]["torch"])
    numbers.bit_generator.state = state["rng"]["numpy"]
    python.setstate(state["rng"]["python"])

    assert (torch.rand(3, generator=generator).tolist(), numbers.random(3).tolist(), python.random()) == expected
