"""Errors that check() finds in wrong declarations; whole messages are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal, Protocol

import pytest
from dependency_injector import providers
from pydantic import Field

from runtime_di import Phase, Plan, PlanError, Runtime, RuntimeContainer, RuntimeSettings, Section, service
from tests.support.small_runtimes import Log, container_of, declare, opener, runtime_of

settings = RuntimeContainer.settings


class ByteSettings(Section):
    kind: Literal["byte"] = "byte"


class FileSettings(Section):
    kind: Literal["file"] = "file"
    path: str = "x"


class JobSettings(RuntimeSettings):
    text: Annotated[ByteSettings | FileSettings, Field(discriminator="kind")] | None = ByteSettings()

    @property
    def sizes(self) -> FileSettings:
        return FileSettings()


class Encoder(Protocol):
    def encode(self, text: str) -> list[int]: ...


class Writer:
    def write(self) -> None: ...


def open_writer() -> Iterator[Writer]:
    yield Writer()


def problems(runtime: type[Runtime]) -> list[str]:
    """The problems that check() reports, as text."""
    with pytest.raises(PlanError) as caught:
        runtime.plan().check()
    return [str(problem) for problem in caught.value.problems]


def test_later_phase_is_reported_with_both_phases() -> None:
    """A dependency on a later phase is an error that draws the edge."""
    declared = declare([], {"rng": Phase.RNG, "vocabulary": Phase.VOCABULARY}, {"vocabulary": ["rng"]})

    found = problems(runtime_of(declared))

    assert found == [
        "vocabulary: depends on a service of a later phase\n"
        "  path: vocabulary (VOCABULARY) -> rng (RNG)\n"
        "  fix:  move 'vocabulary' to RNG or later, or 'rng' to VOCABULARY or earlier"
    ]


def test_every_cycle_is_reported_with_its_path() -> None:
    """Two cycles are two problems, each with its closed path and none of the services that only lead to it."""
    edges = {"a": ["b"], "b": ["c"], "c": ["a"], "d": ["e"], "e": ["d"], "leads": ["a"], "own": ["own"]}
    declared = declare([], dict.fromkeys(edges, Phase.RUNTIME), edges)

    found = problems(runtime_of(declared))

    assert sorted(text.splitlines()[1].strip() for text in found) == [
        "path: a -> b -> c -> a",
        "path: d -> e -> d",
        "path: own -> own",
    ]


def test_redeclaration_can_close_a_cycle() -> None:
    """A subclass whose redeclared service depends on its own dependant is refused."""
    base = container_of(
        declare([], dict.fromkeys(("tokenizer", "vocabulary"), Phase.TOKENIZER), {"vocabulary": ["tokenizer"]})
    )
    own = container_of({"tokenizer": service(Phase.TOKENIZER, opener([], "t"), base.providers["vocabulary"])}, base)

    found = problems(runtime_of(own))

    assert "path: tokenizer -> vocabulary -> tokenizer" in found[0]


def test_factory_that_does_not_take_what_is_injected_is_reported_with_both_sides() -> None:
    """Arguments are bound to the factory's signature."""

    def open_timers(level: int, *, clock: object) -> object:
        return level, clock

    found = problems(runtime_of({"timers": service(Phase.RUNTIME, open_timers, 1, klock=2)}))

    assert [problem.replace("required keyword-only", "required") for problem in found] == [  # since Python 3.12
        "timers: its factory does not take what is injected: missing a required argument: 'clock'\n"
        "  factory:  open_timers(level, clock)\n"
        "  injected: a value, klock=\n"
        "  fix:      pass service(...) the arguments that the factory takes"
    ]


def test_async_factory_is_refused() -> None:
    """A coroutine function or async generator function cannot create a service."""

    async def coroutine() -> object:
        return 1

    async def generator() -> Any:
        yield 1

    found = problems(runtime_of({f.__name__: service(Phase.RUNTIME, f) for f in (coroutine, generator)}))

    assert ["is async" in text for text in found] == [True, True]


@pytest.mark.parametrize("through_a_factory", [False, True])
def test_settings_path_that_the_settings_class_lacks_is_reported(through_a_factory: bool) -> None:
    """A misspelt settings.provided path is found, also within a plain provider."""
    argument: Any = settings.provided.text.knid
    argument = providers.Factory(dict, a=argument) if through_a_factory else argument

    found = problems(runtime_of({"tokenizer": service(Phase.RUNTIME, opener([], "t"), argument)}, settings=JobSettings))

    assert found == [
        "tokenizer: reads settings.text.knid, which JobSettings lacks\n"
        "  fix: add 'knid' to ByteSettings and FileSettings, or correct the path"
    ]


def test_settings_path_that_one_kind_lacks_is_reported() -> None:
    """A path through a union must exist in every kind, or reading it would fail on some settings."""
    declared = service(Phase.RUNTIME, opener([], "t"), settings.provided.text.path)

    found = problems(runtime_of({"tokenizer": declared}, settings=JobSettings))

    assert found[0].endswith("fix: add 'path' to ByteSettings, or correct the path")


def test_settings_paths_through_fields_and_properties_pass() -> None:
    """Fields, properties and what annotated properties return are known."""
    paths = (settings, settings.provided.text.kind, settings.provided.sizes.path, settings.provided.portable)
    runtime = runtime_of({"tokenizer": service(Phase.RUNTIME, opener([], "t"), *paths)}, settings=JobSettings)

    runtime.plan().check()


def test_property_that_returns_another_section_is_followed() -> None:
    """A path through a property is checked against the class that the property returns."""
    declared = service(Phase.RUNTIME, opener([], "t"), settings.provided.sizes.width)

    found = problems(runtime_of({"tokenizer": declared}, settings=JobSettings))

    assert "add 'width' to FileSettings" in found[0]


def test_settings_annotation_that_is_not_a_settings_class_is_a_plan_error() -> None:
    """A Runtime whose settings annotation cannot be used is reported before anything else."""
    runtime = runtime_of({}, {"settings": "Unknown"})

    with pytest.raises(
        PlanError,
        match=r"annotation Unknown is not a RuntimeSettings class known to module tests\.support",
    ):
        runtime.open()


def _returning(result: Any) -> Callable[[], Any]:
    def factory() -> Any:
        raise AssertionError

    factory.__annotations__["return"] = result
    return factory


@pytest.mark.parametrize(
    ("factory", "annotation", "mismatch"),
    [
        (open_writer, int, "is not an instance of int"),
        (Writer, int, "is not an instance of int"),
        (_returning(Writer), Encoder, "lacks 'encode' of Encoder"),
        (_returning("Writer"), "Encoder", "lacks 'encode' of Encoder"),
        (open_writer, Writer, None),
        (open_writer, "Writer | None", None),
        (_returning(Any), int, None),
        (_returning("torch.device"), int, None),
        (_returning(int | str), float, None),
        (_returning(None), Writer, "is not an instance of Writer"),
    ],
)
def test_factory_result_must_fit_the_annotation(factory: Any, annotation: Any, mismatch: str | None) -> None:
    """Classes and protocols are decided; what cannot be decided is not an error."""
    runtime = runtime_of({"writer": service(Phase.RUNTIME, factory)}, {"writer": annotation})
    runtime.__module__ = __name__

    found = problems(runtime) if mismatch else runtime.plan().check() or []

    assert [text.splitlines()[0] for text in found] == (
        [f"writer: its factory's result {mismatch}"] if mismatch else []
    )


def test_annotation_without_service_and_service_without_annotation_are_reported() -> None:
    """Runtime and container must name the same services."""
    runtime = runtime_of(declare([], {"timers": Phase.RUNTIME}), {"writer": Writer})
    del runtime.__annotations__["timers"]

    found = problems(runtime)

    assert found == [
        "timers: has no annotation in SmallRuntime\n  fix: add 'timers: TypeOfTheService' to it",
        "writer: is annotated in SmallRuntime, but is not a service of SmallContainer\n"
        "  fix: declare writer = service(...), or remove the annotation",
    ]


def test_class_variable_of_a_runtime_is_not_a_service() -> None:
    """A ClassVar annotation of a Runtime does not need a service."""
    runtime = runtime_of({}, {"limit": ClassVar[int], "other": "ClassVar[int]"})
    runtime.__module__ = __name__

    runtime.plan().check()


@pytest.mark.parametrize("name", ["start", "built", "container", "_hidden", "override", "providers", "wire"])
def test_names_of_the_runtime_and_of_containers_are_refused(name: str) -> None:
    """No service may hide what a Runtime or a container has by itself."""
    runtime = runtime_of({name: service(Phase.RUNTIME, opener([], "x"))})

    found = problems(runtime)

    assert f"{name}: is a reserved name\n  fix: rename the service" in found


def test_service_of_another_container_is_reported_with_that_container() -> None:
    """A dependency that another container declares is missing here; the message names that container."""
    training = container_of(declare([], {"tokenizer": Phase.TOKENIZER}), name="HomeContainer")
    own = {"vocabulary": service(Phase.VOCABULARY, opener([], "v"), training.providers["tokenizer"])}

    found = problems(runtime_of(own))

    assert found == [
        "tokenizer: is not declared by SmallContainer\n"
        "  requested by: vocabulary -> tokenizer\n"
        "  declared in:  HomeContainer\n"
        "  fix:          declare it in SmallContainer, or remove 'vocabulary' there"
    ]


def test_one_declaration_under_two_names_is_refused() -> None:
    """A declaration bound to two names would be built twice."""
    declared = service(Phase.RUNTIME, opener([], "x"))

    found = problems(runtime_of({"timers": declared, "clock": declared}))

    assert found == ["clock: is 'timers' by another name\n  fix: remove it, and use 'timers'"]


def test_all_problems_are_reported_together_and_nothing_is_built() -> None:
    """open() reports all errors in the plan together, and no factory has run."""
    log: Log = []
    declared = declare(
        log, {"a": Phase.TOKENIZER, "b": Phase.RNG, "c": Phase.RNG}, {"a": ["b"], "b": ["c"], "c": ["b"]}
    )
    runtime = runtime_of(declared, {"d": int})

    with pytest.raises(PlanError) as caught:
        runtime.open()

    assert str(caught.value).startswith("SmallRuntime cannot be built as declared: 3 problems.\n  a: depends on")
    assert log == []


def test_plan_of_a_container_without_a_runtime_is_checked_too() -> None:
    """Edges and signatures need no Runtime."""
    plan = Plan(container_of({"timers": service(Phase.RUNTIME, open_writer, 1)}))

    with pytest.raises(
        PlanError, match=r"SmallContainer cannot be built as declared: 1 problem.*\n.*too many positional"
    ):
        plan.check()


@contextmanager
def managed() -> Iterator[int]:
    yield 1


def test_context_manager_and_hidden_providers_are_reported() -> None:
    """A factory decorated as a context manager, and a provider in a plain list, are reported with a replacement."""

    class Container(RuntimeContainer):
        first = service(Phase.RUNTIME, managed)
        second = service(Phase.RUNTIME, list, [first])

    with pytest.raises(PlanError) as caught:
        Plan(Container).check()

    assert str(caught.value) == (
        "Container cannot be built as declared: 2 problems.\n"
        "  second: has a plain list argument with a provider in it, which is never resolved\n"
        "    fix: use providers.List or providers.Dict of dependency-injector\n"
        "  first: its factory managed is a context manager\n"
        "    fix: remove the decorator: a plain generator function is enough"
    )
