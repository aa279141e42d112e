"""Checkpoints that two ranks saved and loaded."""

from __future__ import annotations

import pytest

from runtime_di.testing.ranks import run_ranks
from tests.support.checkpoints.saved import one_rank_state, open_for
from tests.support.checkpoints.two_ranks import (
    two_rank_scenarios,
)


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    """A folder with what the scenarios write, and under ``one`` a checkpoint of one rank."""
    root = tmp_path_factory.mktemp("root")
    open_for(root / "one").save(one_rank_state(), 20)
    return root


@pytest.fixture(scope="session")
def on_two_ranks(root):
    """The results of the scenarios on each rank."""
    return run_ranks(two_rank_scenarios, 2, root)
