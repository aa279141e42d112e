"""What is wrong with a plan, found without building anything."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from runtime_di import conformance, hints
from runtime_di.errors import Problem
from runtime_di.hints import UNDECIDED

if TYPE_CHECKING:
    from runtime_di.plan import Plan
    from runtime_di.specs import ServiceSpec

_OF_CONTEXT_MANAGERS = contextmanager(lambda: iter(())).__code__


def problems(plan: Plan) -> Iterator[Problem]:
    """Every fault of the declarations."""
    yield from plan.unreadable
    yield from _later_phases(plan)
    yield from _cycles(plan)
    for spec in plan.services.values():
        yield from _signature(spec)
    if plan.runtime is not None:
        yield from _settings(plan)
        yield from _annotations(plan)
        yield from _results(plan)


def _later_phases(plan: Plan) -> Iterator[Problem]:
    for name, needed in plan.edges:
        own, other = plan.services[name].phase, plan.services[needed].phase
        if other > own:
            yield Problem(
                name,
                "depends on a service of a later phase",
                fix=f"move '{name}' to {other.name} or later, or '{needed}' to {own.name} or earlier",
                details=(("path", f"{name} ({own.name}) -> {needed} ({other.name})"),),
            )


def _cycles(plan: Plan) -> Iterator[Problem]:
    waiting = {name: set(spec.dependencies) for name, spec in plan.services.items()}
    needed_by = plan.dependants
    free = [name for name, needed in waiting.items() if not needed]
    while waiting:
        while free:
            done = free.pop()
            waiting.pop(done, None)
            for name in needed_by[done]:
                if name in waiting:
                    waiting[name].discard(done)
                    free += [] if waiting[name] else [name]
        if waiting:
            cycle = _walk_cycle(waiting)
            path = " -> ".join([*cycle, cycle[0]])
            yield Problem(cycle[0], "depends on itself", fix="cut one of these edges", details=(("path", path),))
            waiting[cycle[0]] = set()
            free = [cycle[0]]


def _walk_cycle(waiting: dict[str, set[str]]) -> list[str]:
    name = next(iter(waiting))
    path: dict[str, None] = {}
    while name not in path:
        path[name] = None
        name = min(waiting[name])
    names = list(path)
    return names[names.index(name) :]


def _signature(spec: ServiceSpec) -> Iterator[Problem]:
    function = getattr(spec.factory, "__name__", repr(spec.factory))
    if inspect.iscoroutinefunction(spec.factory) or inspect.isasyncgenfunction(spec.factory):
        yield Problem(spec.name, f"its factory {function} is async", fix="declare a plain or a generator function")
        return
    if getattr(spec.factory, "__code__", None) is _OF_CONTEXT_MANAGERS:
        yield Problem(
            spec.name, f"its factory {function} is a context manager", fix="drop the decorator: a yield is enough"
        )
        return
    try:
        signature = inspect.signature(spec.factory)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*spec.args, **spec.kwargs)
    except TypeError as error:
        given = [*("a value" for _ in spec.args), *(f"{name}=" for name in spec.kwargs)]
        yield Problem(
            spec.name,
            f"its factory does not take what is injected: {error}",
            fix="give service(...) the arguments that the factory names",
            details=(
                ("factory", f"{function}({', '.join(signature.parameters)})"),
                ("injected", ", ".join(given) or "nothing"),
            ),
        )


def _settings(plan: Plan) -> Iterator[Problem]:
    annotation, module = hints.annotations_of(plan.runtime or object)["settings"]
    root = hints.resolve(annotation, module)
    for spec in plan.services.values():
        for path in spec.settings:
            owners = [root]
            for name in path.names:
                owners, lacking = hints.attribute_types(owners, name)
                if lacking:
                    yield Problem(
                        spec.name,
                        f"reads settings.{path}, which {getattr(root, '__name__', root)} lacks",
                        fix=f"add '{name}' to {' and '.join(owner.__name__ for owner in lacking)}, or mend the path",
                    )
                    break


def _annotations(plan: Plan) -> Iterator[Problem]:
    runtime = plan.runtime
    if runtime is None:
        return
    annotated = runtime.service_annotations()
    for name in plan.services:
        if name in runtime.own_names() or name.startswith("_"):
            yield Problem(name, "is a name that no service may have", fix="give the service another name")
        elif name not in annotated:
            yield Problem(name, f"has no annotation in {plan.name}", fix=f"add '{name}: TypeOfTheService' to it")
    for name in annotated:
        if name not in plan.services:
            yield Problem(
                name,
                f"is annotated in {plan.name}, but no service of {plan.container.__name__}",
                fix=f"declare {name} = service(...), or drop the annotation",
            )


def _results(plan: Plan) -> Iterator[Problem]:
    annotated = plan.runtime.service_annotations() if plan.runtime else {}
    for name, spec in plan.services.items():
        if name not in annotated:
            continue
        wanted = hints.resolve(*annotated[name])
        result = hints.result_of(spec.factory)
        if wanted is UNDECIDED or result is UNDECIDED:
            continue
        for misfit in conformance.class_misfits(result, wanted):
            yield Problem(
                name,
                f"its factory's result {misfit}",
                fix=f"change the annotation in {plan.name}, or the factory",
                details=(("factory", f"returns {result.__name__}"), ("annotation", str(annotated[name][0]))),
            )
