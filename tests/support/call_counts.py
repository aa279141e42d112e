"""The work of a function as a number of calls, which is the same on every machine, however busy it is."""

from __future__ import annotations

from collections.abc import Callable
from cProfile import Profile


def num_calls(function: Callable[[], object]) -> int:
    """Run a function and count the calls that it makes, directly and indirectly."""
    profile = Profile()
    profile.runcall(function)
    return sum(entry.callcount for entry in profile.getstats())
