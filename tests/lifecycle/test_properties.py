"""Properties that every container and every sequence of requests must have."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_di import Phase, Plan, PlanError, Runtime, service
from runtime_di.plan.check import problems
from tests.support.small_runtimes import Log, opener, runtime_of

Graph = list[tuple[Phase, list[int]]]
"""For each service its phase and the services that it is built from, by place."""

graphs = st.integers(1, 12).flatmap(
    lambda size: st.lists(
        st.tuples(st.sampled_from(Phase), st.lists(st.integers(0, size - 1), max_size=3, unique=True)),
        min_size=size,
        max_size=size,
    )
)
requests = st.lists(st.one_of(st.integers(0, 11), st.sampled_from(Phase)), max_size=6)


def sound(graph: Graph) -> Graph:
    """The same services with the edges that keep to the phases, and lead to earlier places within one."""
    return [
        (phase, [n for n in needed if (graph[n][0], n) < (phase, place)]) for place, (phase, needed) in enumerate(graph)
    ]


def declared(graph: Graph, log: Log) -> type[Runtime]:
    """A runtime of these services, declared in order of their places."""
    services = {f"s{place}": service(phase, opener(log, f"s{place}")) for place, (phase, _) in enumerate(graph)}
    for place, (_, needed) in enumerate(graph):
        services[f"s{place}"].set_args(*(services[f"s{other}"] for other in needed))
    return runtime_of(services)


def ask(runtime: Runtime, graph: Graph, asked: Sequence[int | Phase]) -> None:
    """Carry out requests: a phase is a start through it, a place a read of that service."""
    for request in asked:
        if isinstance(request, Phase):
            runtime.start(through=request)
        else:
            getattr(runtime, f"s{request % len(graph)}")


@settings(deadline=None)
@given(graphs.map(sound), requests)
def test_whatever_is_asked_the_order_holds(graph: Graph, asked: list[int | Phase]) -> None:
    """Phases in order, collective services a prefix, dependencies first, each once, torn down in reverse."""
    log: Log = []

    with declared(graph, log).open() as runtime:
        ask(runtime, graph, asked)
        built = list(runtime.built)
        order = runtime.plan().order

    phase_of = {f"s{place}": phase for place, (phase, _) in enumerate(graph)}
    collective = [name for name in built if phase_of[name].is_collective]
    assert [phase_of[name] for name in built] == sorted(phase_of[name] for name in built)
    assert collective == [name for name in order if phase_of[name].is_collective][: len(collective)]
    assert all(
        f"s{needed}" in built[: built.index(f"s{place}")]
        for place, (_, edges) in enumerate(graph)
        if f"s{place}" in built
        for needed in edges
    )
    assert len(set(built)) == len(built)
    assert log == [*(f"+{name}" for name in built), *(f"-{name}" for name in reversed(built))]


@settings(deadline=None)
@given(graphs.map(sound), requests)
def test_earlier_phases_are_complete_before_a_later_one_begins(graph: Graph, asked: list[int | Phase]) -> None:
    """No service is built while an earlier phase lacks one."""
    with declared(graph, []).open() as runtime:
        ask(runtime, graph, asked)
        built = runtime.built
        phases = runtime.plan().phases

    last = max((phase for phase, names in phases.items() if set(names) & set(built)), default=Phase.TOKENIZER)
    assert all(set(names) <= set(built) for phase, names in phases.items() if phase < last)


@settings(deadline=None)
@given(graphs.map(sound), requests, requests)
def test_two_ranks_that_ask_differently_build_collective_services_in_one_order(
    graph: Graph, one: list[int | Phase], other: list[int | Phase]
) -> None:
    """Of two ranks' collective services one's list begins the other's."""
    logs: list[list[str]] = []
    for asked in (one, other):
        with declared(graph, []).open() as runtime:
            ask(runtime, graph, asked)
            logs.append([name for name in runtime.built if runtime.plan().services[name].phase.is_collective])

    shorter, longer = sorted(logs, key=len)
    assert longer[: len(shorter)] == shorter


@settings(deadline=None)
@given(graphs.map(sound), st.integers(0, 11), st.integers(1, 3))
def test_failed_builds_leave_what_was_built_and_may_be_repeated(graph: Graph, failing: int, times: int) -> None:
    """However often a factory fails, a later start builds the rest, each once, and takes all down in reverse."""
    log: Log = []
    runtime_class = declared(graph, log)
    name = f"s{failing % len(graph)}"
    errors: list[BaseException] = [OSError() for _ in range(times)]
    provider: Any = runtime_class.plan().container.providers[name]
    provider.set_provides(type(provider.provides)(provider.provides.phase, opener(log, name, fails=errors)))

    with runtime_class.open() as runtime:
        for _ in range(times):
            with pytest.raises(Exception, match=f"'{name}' could not be built"):
                runtime.start()
        built = list(runtime.start().built)

    assert sorted(built) == sorted(f"s{place}" for place in range(len(graph)))
    assert log == [*(f"+{one}" for one in built), *(f"-{one}" for one in reversed(built))]


@settings(deadline=None)
@given(graphs)
def test_containers_of_any_edges_open_if_and_only_if_they_are_sound(graph: Graph) -> None:
    """Wrong edges are all reported before anything is built; right ones are not."""
    log: Log = []
    runtime_class = declared(graph, log)
    later = sum(graph[needed][0] > phase for phase, edges in graph for needed in edges)

    try:
        runtime_class.open().start().close()
    except PlanError as error:
        found = [problem.what for problem in error.problems]
        assert log == []
        assert found.count("depends on a service of a later phase") == later
        assert len(found) == later + (found.count("depends on itself"))
    else:
        assert later == 0
        assert not _has_cycle(graph)
        assert len(log) == 2 * len(graph)
        return
    assert later or _has_cycle(graph)


@settings(deadline=None)
@given(graphs)
def test_reported_cycles_are_cycles(graph: Graph) -> None:
    """Every reported path follows real edges and returns to its start."""
    plan = Plan(declared(graph, []).plan().container)

    for problem in problems(plan, plan.name, plan.runtime):
        if problem.what == "depends on itself":
            path = dict(problem.details)["path"].split(" -> ")
            assert path[0] == path[-1]
            assert all(pair in plan.edges for pair in pairwise(path))


def _has_cycle(graph: Graph) -> bool:
    left = dict(enumerate(edges for _, edges in graph))
    while free := [place for place, edges in left.items() if not set(edges) & set(left)]:
        for place in free:
            del left[place]
    return bool(left)
