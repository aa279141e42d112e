"""What tests of distributed programs need: fakes of services, and real ranks."""

from __future__ import annotations

from runtime_di.testing.ranks import RanksError, run_ranks

__all__ = ["RanksError", "run_ranks"]
