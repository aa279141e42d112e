"""Tools for tests of distributed programs: fakes of services, assertions about runtimes, and real ranks."""

from __future__ import annotations

from runtime_di.testing.assertions import assert_not_built, assert_order
from runtime_di.testing.fakes import (
    FakeCheckpointer,
    FakeClock,
    FakeTimers,
    FakeTokenizer,
    FakeWriter,
    fake_process_groups,
    fake_vocabulary,
)
from runtime_di.testing.leaks import assert_no_effects
from runtime_di.testing.ranks import RanksError, run_ranks

__all__ = [
    "FakeCheckpointer",
    "FakeClock",
    "FakeTimers",
    "FakeTokenizer",
    "FakeWriter",
    "RanksError",
    "assert_no_effects",
    "assert_not_built",
    "assert_order",
    "fake_process_groups",
    "fake_vocabulary",
    "run_ranks",
]
