"""The lifecycle of one open runtime: requirements, overrides, build, reads and teardown."""

from runtime_di.lifecycle.build import Lifecycle
from runtime_di.lifecycle.teardown import as_generator, run_on_exit

__all__ = ["Lifecycle", "as_generator", "run_on_exit"]
