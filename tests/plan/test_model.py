"""The plan: the services that a container declares, in the order in which every rank builds them."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
from dependency_injector import providers

from runtime_di import Phase, Plan, RuntimeContainer, ServiceError, service
from tests.support.call_counts import num_calls
from tests.support.paths import ROOT
from tests.support.small_runtimes import container_of, declare, opener, runtime_of


def test_order_is_by_phase_then_dependency_then_declaration() -> None:
    """Services are sorted by phase; within it a dependency comes first, and the rest stands as declared."""
    phases = {"rng": Phase.RNG, "late": Phase.RUNTIME, "early": Phase.RUNTIME, "other": Phase.RUNTIME}
    declared = declare([], {**phases, "tokenizer": Phase.TOKENIZER}, {"late": ["other"]})

    plan = Plan(container_of(declared))

    assert plan.order == ("tokenizer", "early", "other", "late", "rng")


@pytest.mark.processes
def test_order_does_not_depend_on_hashes() -> None:
    """Processes that hash strings differently, as ranks do, find the same order."""
    script = (
        "import random; from tests.support.small_runtimes import container_of, declare\n"
        "from runtime_di import Phase, Plan\n"
        "names = [f's{place}' for place in range(40)]\n"
        "edges = {name: random.Random(name).sample(names[:at], min(at, 3)) for at, name in enumerate(names)}\n"
        "backwards = dict.fromkeys(reversed(names), Phase.RUNTIME)\n"
        "print(Plan(container_of(declare([], backwards, edges))).order)"
    )

    orders = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }

    assert len(orders) == 1


def test_redeclared_service_keeps_its_place_and_takes_over_the_edges() -> None:
    """A subclass's redeclaration stands where the base's stood, and its dependants are bound to it by name."""
    base = container_of(declare([], dict.fromkeys(("tokenizer", "other"), Phase.TOKENIZER), {"other": ["tokenizer"]}))
    own_factory = opener([], "own")

    plan = Plan(container_of({"tokenizer": service(Phase.TOKENIZER, own_factory)}, base))

    assert plan.order == ("tokenizer", "other")
    assert plan.services["tokenizer"].factory is own_factory
    assert plan.edges == (("other", "tokenizer"),)


def test_edges_are_read_through_plain_providers() -> None:
    """A Factory of dependency-injector between two services makes the one depend on the other."""
    first = service(Phase.RUNTIME, opener([], "first"))
    last = service(Phase.RUNTIME, opener([], "last"), providers.Factory(list, providers.Factory(tuple, first)))

    plan = Plan(container_of({"last": last, "first": first}))

    assert plan.order == ("first", "last")


def test_settings_of_a_service_are_its_paths_without_the_plain_values() -> None:
    """The plan lists the settings that a service reads, directly and through a plain provider."""
    settings = RuntimeContainer.settings
    through = providers.Factory(dict, depth=settings.provided.sizes.depth)
    declared = service(Phase.RUNTIME, opener([], "a"), settings.provided.sizes, 3, through, whole=settings)

    spec = Plan(container_of({"a": declared})).services["a"]

    assert [str(path) for path in spec.settings] == ["sizes", "sizes.depth", ""]


def test_text_and_mermaid_contain_phases_edges_and_settings() -> None:
    """Both renderers draw every phase with services and every edge; the text also lists the settings."""
    tokenizer = service(Phase.TOKENIZER, opener([], "t"), RuntimeContainer.settings.provided.sizes)
    rng = service(Phase.RNG, opener([], "r"), tokenizer)

    plan = Plan(container_of({"tokenizer": tokenizer, "rng": rng}))

    assert str(plan) == "TOKENIZER\n  tokenizer <- settings.sizes\nRNG\n  rng <- tokenizer"
    assert plan.mermaid().splitlines() == [
        "flowchart TD",
        "  subgraph TOKENIZER",
        "    tokenizer",
        "  end",
        "  subgraph RNG",
        "    rng",
        "  end",
        "  tokenizer --> rng",
    ]


def test_declaration_refuses_to_be_called() -> None:
    """A declared provider builds nothing before a runtime is opened (B34)."""
    container = container_of({"tokenizer": service(Phase.TOKENIZER, opener([], "t"))})

    with pytest.raises(ServiceError, match=r"was requested from its declaration.*\n.*open a Runtime"):
        container.tokenizer()


def test_override_on_a_container_class_leaks_into_no_runtime() -> None:
    """Overriding a declaration on its class, as stock containers allow, changes no opened runtime (B77)."""
    log: list[str] = []
    runtime_class = runtime_of(declare(log, {"tokenizer": Phase.TOKENIZER}))
    declaration: Any = runtime_class.plan().container.tokenizer

    with declaration.override(providers.Object("fake")), runtime_class.open() as runtime:
        found = runtime.tokenizer

    assert found.name == "tokenizer"


@pytest.mark.parametrize("shape", ["chain", "cycle", "star"])
def test_plan_of_five_thousand_services_is_read_and_checked_in_linear_work(shape: str) -> None:
    """Reading, ordering and checking neither recurse nor take quadratic work."""

    def read_and_check(num_services: int) -> None:
        names = [f"s{place}" for place in range(num_services)]
        edges = {"chain": zip(names[1:], names, strict=False), "star": ((name, names[0]) for name in names[1:])}
        last = [("s0", names[-1])] if shape == "cycle" else []
        pairs = [*edges.get(shape, zip(names[1:], names, strict=False)), *last]
        declared = declare([], dict.fromkeys(names, Phase.RUNTIME), {name: [needed] for name, needed in pairs})
        plan = Plan(container_of(declared))
        assert len(plan.order) == num_services
        assert len(_problems(plan)) == (1 if shape == "cycle" else 0)

    few, many = (num_calls(partial(read_and_check, num_services)) for num_services in (500, 5000))

    assert many < 12 * few


def _problems(plan: Plan) -> list[str]:
    from runtime_di.plan.check import problems

    return [str(problem) for problem in problems(plan, plan.name, plan.runtime)]
