"""The leak watch: compares the process state before and after a block of code."""

from runtime_di.testing.leaks.watch import Watch, assert_no_effects

__all__ = ["Watch", "assert_no_effects"]
