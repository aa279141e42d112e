"""Assertions about the services that a runtime has built; their messages contain the build log."""

from __future__ import annotations

from itertools import pairwise

from runtime_di.errors import Problem, ServiceError
from runtime_di.runtime import Runtime


def assert_order(runtime: Runtime, *names: str) -> None:
    """Assert that these services were built in this order; others may have been built between them."""
    __tracebackhide__ = True
    _known(runtime, names)
    index = {name: number for number, name in enumerate(runtime.built)}
    wrong = [f"'{name}' was not built" for name in names if name not in index]
    wrong += [
        f"'{b}' was built before '{a}'" for a, b in pairwise(names) if index.get(a, -1) > index.get(b, len(index))
    ]
    if wrong:
        raise AssertionError(f"{'; '.join(wrong)}.\n  expected order: {', '.join(names)}\n{build_log(runtime)}")


def assert_not_built(runtime: Runtime, *names: str) -> None:
    """Assert that none of these services was built."""
    __tracebackhide__ = True
    _known(runtime, names)
    built = [f"'{name}'" for name in names if name in runtime.built]
    if built:
        were = "were" if len(built) > 1 else "was"
        raise AssertionError(f"{', '.join(built)} {were} built.\n{build_log(runtime)}")


def build_log(runtime: Runtime) -> str:
    """The built services in build order, each with its dependencies."""
    services = type(runtime).plan().services
    if not runtime.built:
        return f"  {type(runtime).__name__} has built nothing"
    lines = [f"  {type(runtime).__name__} has built:"]
    for number, name in enumerate(runtime.built, 1):
        needs = ", ".join(services[name].dependencies)
        lines.append(f"    {number}. {name} ({services[name].phase.name}){' <- ' + needs if needs else ''}")
    return "\n".join(lines)


def _known(runtime: Runtime, names: tuple[str, ...]) -> None:
    known = type(runtime).plan().services
    problems = [
        Problem(name, f"is not a service of {type(runtime).__name__}", fix=f"name one of {', '.join(known)}")
        for name in names
        if name not in known
    ]
    if problems:
        raise ServiceError("The assertion names an unknown service.", problems)
