"""Failures of one rank, raised on every rank."""

from __future__ import annotations

import pytest


@pytest.mark.processes
def test_full_disk_of_one_rank_fails_the_save_on_all(on_two_ranks, root):
    """If one rank cannot write, the save fails on every rank, earlier checkpoints stay, and a later save succeeds."""
    outcomes = [result["disk full"] for result in on_two_ranks]

    for failure, left in outcomes:
        assert failure.startswith("The checkpoint was not saved; earlier ones are unchanged.\n  rank 1: OSError: ")
        assert "File too large" in failure
        assert left == ("step-00000010", 2)
    assert sorted(path.name for path in (root / "full").iterdir()) == ["step-00000010", "step-00000030"]


@pytest.mark.processes
def test_failure_of_one_rank_is_raised_on_all(on_two_ranks):
    """A failure of one rank to save or load raises the same error on every rank."""
    failures = [result["failed"] for result in on_two_ranks]

    assert failures == [["state x", "state y"]] * 2
