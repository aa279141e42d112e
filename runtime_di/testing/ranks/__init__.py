"""Real ranks: runs a function in several processes, as torchrun starts them on one node."""

from runtime_di.testing.ranks.run import RanksError, run_ranks

__all__ = ["RanksError", "run_ranks"]
