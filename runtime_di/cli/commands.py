"""The ``runtime-di`` command: inspects an entrypoint without starting it."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from runtime_di import containers
from runtime_di.errors import Problem, RuntimeDIError, SettingsError
from runtime_di.main import STATUS_REFUSED
from runtime_di.runtime import Runtime


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command; print a message and exit with 2 if the entrypoint could not start."""
    parser = argparse.ArgumentParser(prog="runtime-di", description="Inspect an entrypoint without starting it.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in {
        "plan": "print its services in build order",
        "check": "check the plan, the settings and this machine without building anything",
        "explain": "print where a setting's value comes from",
    }.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("runtime", help=f"{', '.join(sorted(shipped()))}, or your own as module:Runtime")
        if name == "plan":
            command.add_argument("--mermaid", action="store_true", help="print a Mermaid flow chart")
        if name == "explain":
            command.add_argument("path", help="dotted path of a setting")
    options, flags = parser.parse_known_args(argv)
    if flags and options.command == "plan":
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    try:
        print(_answer(options, flags))  # noqa: T201 - the command's output
    except RuntimeDIError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(STATUS_REFUSED) from None


def shipped() -> dict[str, type[Runtime]]:
    """Short name to Runtime class of the entrypoints in `runtime_di.containers`."""
    runtimes = [value for value in vars(containers).values() if isinstance(value, type) and issubclass(value, Runtime)]
    return {runtime.__name__.removesuffix("Runtime").lower(): runtime for runtime in runtimes}


def _answer(options: argparse.Namespace, flags: Sequence[str]) -> str:
    runtime = _find(options.runtime)
    if options.command == "plan":
        plan = runtime.plan()
        plan.check()
        return plan.mermaid() if options.mermaid else plan.text()
    settings = runtime.settings_class().load(flags)
    if options.command == "explain":
        return str(settings.explain(options.path))
    runtime.open(settings).close()
    return f"{runtime.__name__} can start here."


def _find(name: str) -> type[Runtime]:
    if name in shipped():
        return shipped()[name]
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute) if attribute else None
    except (ImportError, AttributeError) as error:
        raise SettingsError("No such entrypoint.", [Problem(name, str(error))]) from error
    if not (isinstance(found, type) and issubclass(found, Runtime)):
        fix = f"name one of {', '.join(sorted(shipped()))}, or module:Runtime"
        raise SettingsError("No such entrypoint.", [Problem(name, "is not a Runtime", fix=fix)])
    return found
