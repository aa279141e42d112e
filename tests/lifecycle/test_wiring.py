"""Injection by dependency-injector's wiring."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from dependency_injector import providers
from dependency_injector.wiring import Closing, Provide, Provider, inject

from runtime_di import Phase, RuntimeContainer, ServiceError
from tests.support.small_runtimes import (
    Log,
    Service,
    container_of,
    declare,
    module_with,
    runtime_of,
)

settings = RuntimeContainer.settings


def test_inject_receives_services_until_the_runtime_closes() -> None:
    """Named and referenced markers get this runtime's services; the next opening's come after, none in between."""

    def open_two():
        @inject
        def ask(tokenizer: Any = Provide["tokenizer"], name: Any = Provide["tokenizer.provided.name"]) -> Any:
            return tokenizer, name

        return ask

    ask = open_two()
    runtime_class, module = runtime_of(declare([], {"tokenizer": Phase.TOKENIZER})), module_with(ask=ask)

    with runtime_class.open(wire=[module]) as first:
        assert ask() == (first.tokenizer, "tokenizer")
        held = first.tokenizer
    after = ask()
    with runtime_class.open(wire=[module]) as second:
        assert ask()[0] is second.tokenizer is not held

    assert not isinstance(after[0], Service)


def test_inject_by_container_attribute_works() -> None:
    """``Provide[Container.tokenizer]`` means the opened runtime's service too."""
    container = container_of(declare([], {"tokenizer": Phase.TOKENIZER}))

    @inject
    def ask(tokenizer: Any = Provide[container.providers["tokenizer"]]) -> Any:
        return tokenizer

    with runtime_of(container).open(wire=[module_with(ask=ask)]) as runtime:
        assert ask() is runtime.tokenizer


def test_closing_marker_takes_down_no_service() -> None:
    """A service has one owner: a Closing marker of an inner user leaves it open (B81)."""
    log: Log = []

    @inject
    def ask(timers: Any = Closing[Provide["timers"]]) -> Any:
        return timers

    with runtime_of(declare(log, {"timers": Phase.RUNTIME})).open(wire=[module_with(ask=ask)]) as runtime:
        assert ask() is ask() is runtime.timers
        assert log == ["+timers"]


def test_misspelt_markers_are_refused_everywhere() -> None:
    """Functions, methods of any kind, annotations, attributes, nested and foreign markers are all found."""
    foreign = providers.Object(1)

    class Handler:
        attribute = Provide["in_class"]

        @inject
        def method(self, a: Any = Provide["in_method"]) -> Any:
            return a

        @staticmethod
        @inject
        def static(a: Any = Closing[Provide["in_static"]]) -> Any:
            return a

    @inject
    def annotated(a: "Annotated[Any, Provide['timers']]" = None, b: Any = Provider["in_default"]) -> Any:  # noqa: UP037
        return a, b

    def plain(a: Any = Provide[foreign], b: Any = Provide["wire"], c: Any = Provide["timers"]) -> Any:
        return a, b, c

    plain.__annotations__["c"] = Annotated[Any, Provide["in_annotation"]]
    log: Log = []
    module = module_with(Handler=Handler, annotated=annotated, plain=plain, attribute=Provide["in_module"])

    with pytest.raises(ServiceError) as caught:
        runtime_of(declare(log, {"timers": Phase.RUNTIME})).open(wire=[module])

    reported = [(problem.where.partition(".")[2], problem.what.split("'")) for problem in caught.value.problems]
    assert sorted(f"{where} {what[1] if len(what) > 1 else what[0][:40]}" for where, what in reported) == [
        "Handler.attribute in_class",
        "Handler.method in_method",
        "Handler.static in_static",
        "annotated in_default",
        "attribute in_module",
        "plain asks for a provider of another container",
        "plain in_annotation",
        "plain wire",
    ]
    assert caught.value.problems[0].fix == "name one of settings, plan, timers"
    assert log == []
