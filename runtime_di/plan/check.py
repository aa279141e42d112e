"""Checks of a plan, without building anything."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

from runtime_di.errors import Problem
from runtime_di.plan import conformance, type_hints
from runtime_di.plan.annotations import AnnotatedView
from runtime_di.plan.graph import ServiceGraph
from runtime_di.plan.specs import ServiceSpec
from runtime_di.plan.type_hints import UNDECIDED

_CONTEXT_MANAGER_CODE = contextmanager(lambda: iter(())).__code__


def problems(graph: ServiceGraph, container: str, view: type[AnnotatedView] | None) -> Iterator[Problem]:
    """Find every error in the declarations.

    Args:
        graph: the declared services.
        container: name of the container that declares them.
        view: the Runtime class whose annotations the services must fit, if there is one.
    """
    yield from _later_phases(graph)
    yield from _cycles(graph)
    for spec in graph.services.values():
        yield from _signature(spec)
    if view is not None:
        yield from _settings(graph, view)
        yield from _annotations(graph, container, view)
        yield from _results(graph, view)


def _later_phases(graph: ServiceGraph) -> Iterator[Problem]:
    for name, needed in graph.edges:
        own, other = graph.services[name].phase, graph.services[needed].phase
        if other > own:
            yield Problem(
                name,
                "depends on a service of a later phase",
                fix=f"move '{name}' to {other.name} or later, or '{needed}' to {own.name} or earlier",
                details=(("path", f"{name} ({own.name}) -> {needed} ({other.name})"),),
            )


def _cycles(graph: ServiceGraph) -> Iterator[Problem]:
    pending = {name: set(spec.dependencies) for name, spec in graph.services.items()}
    needed_by = graph.dependants
    free = [name for name, needed in pending.items() if not needed]
    while pending:
        while free:
            done = free.pop()
            pending.pop(done, None)
            for name in needed_by[done]:
                if name in pending:
                    pending[name].discard(done)
                    free += [] if pending[name] else [name]
        if pending:
            cycle = _find_cycle(pending)
            path = " -> ".join([*cycle, cycle[0]])
            yield Problem(cycle[0], "depends on itself", fix="remove one of these edges", details=(("path", path),))
            pending[cycle[0]] = set()
            free = [cycle[0]]


def _find_cycle(pending: dict[str, set[str]]) -> list[str]:
    name = next(iter(pending))
    path: dict[str, None] = {}
    while name not in path:
        path[name] = None
        name = min(pending[name])
    names = list(path)
    return names[names.index(name) :]


def _signature(spec: ServiceSpec) -> Iterator[Problem]:
    function = getattr(spec.factory, "__name__", repr(spec.factory))
    if inspect.iscoroutinefunction(spec.factory) or inspect.isasyncgenfunction(spec.factory):
        yield Problem(spec.name, f"its factory {function} is async", fix="declare a plain or a generator function")
        return
    if getattr(spec.factory, "__code__", None) is _CONTEXT_MANAGER_CODE:
        yield Problem(
            spec.name,
            f"its factory {function} is a context manager",
            fix="remove the decorator: a plain generator function is enough",
        )
        return
    try:
        signature = inspect.signature(spec.factory)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*spec.args, **spec.kwargs)
    except TypeError as error:
        injected = [*("a value" for _ in spec.args), *(f"{name}=" for name in spec.kwargs)]
        yield Problem(
            spec.name,
            f"its factory does not take what is injected: {error}",
            fix="pass service(...) the arguments that the factory takes",
            details=(
                ("factory", f"{function}({', '.join(signature.parameters)})"),
                ("injected", ", ".join(injected) or "nothing"),
            ),
        )


def _settings(graph: ServiceGraph, view: type[AnnotatedView]) -> Iterator[Problem]:
    root = type_hints.resolve(*view.settings_annotation())
    for spec in graph.services.values():
        for path in spec.settings:
            owners = [root]
            for name in path.names:
                owners, without = type_hints.attribute_types(owners, name)
                if without:
                    yield Problem(
                        spec.name,
                        f"reads settings.{path}, which {getattr(root, '__name__', root)} lacks",
                        fix=f"add '{name}' to {' and '.join(owner.__name__ for owner in without)}, or correct the path",
                    )
                    break


def _annotations(graph: ServiceGraph, container: str, view: type[AnnotatedView]) -> Iterator[Problem]:
    annotated = view.service_annotations()
    for name in graph.services:
        if name in view.reserved_names() or name.startswith("_"):
            yield Problem(name, "is a reserved name", fix="rename the service")
        elif name not in annotated:
            yield Problem(name, f"has no annotation in {view.__name__}", fix=f"add '{name}: TypeOfTheService' to it")
    for name in annotated:
        if name not in graph.services:
            yield Problem(
                name,
                f"is annotated in {view.__name__}, but is not a service of {container}",
                fix=f"declare {name} = service(...), or remove the annotation",
            )


def _results(graph: ServiceGraph, view: type[AnnotatedView]) -> Iterator[Problem]:
    annotated = view.service_annotations()
    for name, spec in graph.services.items():
        if name not in annotated:
            continue
        wanted = type_hints.resolve(*annotated[name])
        result = type_hints.result_of(spec.factory)
        if wanted is UNDECIDED or result is UNDECIDED:
            continue
        for mismatch in conformance.class_mismatches(result, wanted):
            yield Problem(
                name,
                f"its factory's result {mismatch}",
                fix=f"change the annotation in {view.__name__}, or the factory",
                details=(("factory", f"returns {result.__name__}"), ("annotation", str(annotated[name][0]))),
            )
