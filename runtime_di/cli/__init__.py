"""The ``runtime-di`` command."""

from runtime_di.cli.commands import main

__all__ = ["main"]
