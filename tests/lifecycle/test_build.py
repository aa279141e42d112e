"""Services are built once, in plan order, from their declared arguments."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from dependency_injector import providers

from runtime_di import (
    ClosedError,
    Phase,
    Runtime,
    RuntimeContainer,
    RuntimeSettings,
    ServiceDisabledError,
    ServiceError,
    service,
)
from tests.support.call_counts import num_calls
from tests.support.small_runtimes import Log, Service, container_of, declare, opener, runtime_of

EVERY_PHASE = {phase.name.lower(): phase for phase in Phase}


def test_read_completes_earlier_phases_then_dependencies() -> None:
    """A rank-local service is preceded by whole earlier phases and by its own dependencies only."""
    log: Log = []
    phases = {"t1": Phase.TOKENIZER, "t2": Phase.TOKENIZER, "spare": Phase.RUNTIME, "needed": Phase.RUNTIME}
    runtime_class = runtime_of(declare(log, {**phases, "asked": Phase.RUNTIME}, {"asked": ["needed"]}))

    with runtime_class.open() as runtime:
        assert runtime.asked.args == (runtime.needed,)

        assert runtime.built == ("t1", "t2", "needed", "asked")


def test_collective_services_are_built_as_a_prefix_whatever_is_read() -> None:
    """From DISTRIBUTED on, a read first builds the whole plan before the service, related or not."""
    log: Log = []
    phases = {**EVERY_PHASE, "unrelated": Phase.DISTRIBUTED, "mesh": Phase.DISTRIBUTED, "after": Phase.DISTRIBUTED}

    with runtime_of(declare(log, phases)).open() as runtime:
        runtime.mesh

        assert runtime.built == ("tokenizer", "vocabulary", "runtime", "distributed", "unrelated", "mesh")


@pytest.mark.parametrize("through", list(Phase))
def test_start_builds_every_service_through_a_phase(through: Phase) -> None:
    """start() builds the plan up to the end of the phase, and a second start adds nothing."""
    log: Log = []

    with runtime_of(declare(log, EVERY_PHASE)).open() as runtime:
        assert runtime.start(through=through) is runtime
        runtime.start(through=through)

        assert runtime.built == tuple(name for name, phase in EVERY_PHASE.items() if phase <= through)


def test_sixteen_racing_threads_get_one_object_and_one_build() -> None:
    """Concurrent reads, through the attribute or the container, wait for one build."""
    builds: Log = []
    asking = threading.Semaphore(0)

    def open_slowly() -> object:
        builds.append("+")
        for _ in range(16):
            asking.acquire(timeout=1)
        return object()

    runtime = runtime_of({"timers": service(Phase.RUNTIME, open_slowly)}).open()
    found: list[object] = []

    def ask(place: int) -> None:
        asking.release()
        found.append(runtime.timers if place % 2 else runtime.container.timers())

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert (builds, len(found), len(set(map(id, found)))) == (["+"], 16, 1)
    runtime.close()


def test_service_is_published_only_when_it_is_complete() -> None:
    """While its factory runs, another thread's read waits, and warm reads find nothing."""
    entered, released = threading.Event(), threading.Event()
    seen: list[Any] = []

    def open_slowly() -> str:
        entered.set()
        assert released.wait(10)
        return "complete"

    with runtime_of({"timers": service(Phase.RUNTIME, open_slowly)}).open() as runtime:
        threads = [threading.Thread(target=lambda: seen.append(runtime.timers)) for _ in range(2)]
        for thread in threads:
            thread.start()
        assert entered.wait(10)
        half_built = ("timers" in vars(runtime), runtime.built)
        released.set()
        for thread in threads:
            thread.join()

    assert half_built == (False, ())
    assert seen == ["complete", "complete"]


def test_service_whose_factory_raised_is_not_built_and_can_be_read_again() -> None:
    """A failed build leaves "not built" and the earlier services; the next read builds once (B43, B82)."""
    log: Log = []
    first = service(Phase.TOKENIZER, opener(log, "first"))
    second = service(Phase.RUNTIME, opener(log, "second", fails=[OSError("no room")]), first)
    runtime = runtime_of({"first": first, "second": second}).open()

    with pytest.raises(ServiceError, match=r"^Service 'second' could not be built: OSError: no room$") as caught:
        runtime.second
    built = runtime.built
    found = runtime.second
    runtime.close()

    assert isinstance(caught.value.__cause__, OSError)
    assert built == ("first",)
    assert found is not None
    assert log == ["+first", "+second", "-second", "-first"]


def test_failed_start_goes_on_where_it_failed() -> None:
    """A start after a failed one builds the rest; nothing is built twice."""
    log: Log = []
    declared = {name: service(Phase.RUNTIME, opener(log, name)) for name in ("a", "b", "c")}
    declared["b"] = service(Phase.RUNTIME, opener(log, "b", fails=[KeyboardInterrupt()]))

    with runtime_of(declared).open() as runtime:
        with pytest.raises(KeyboardInterrupt):
            runtime.start()
        runtime.start()

    assert log == ["+a", "+b", "+c", "-c", "-b", "-a"]


def test_closed_runtime_serves_nothing_from_attribute_container_or_start() -> None:
    """After close every access to a service raises ClosedError, even if it was built before."""
    runtime = runtime_of(declare([], {"a": Phase.RUNTIME, "b": Phase.RUNTIME})).open()
    warm = (runtime.a, runtime.container.a())
    runtime.close()

    asks: list[Callable[[], object]] = [lambda: runtime.a, lambda: runtime.b, runtime.container.a, runtime.start]
    for ask in asks:
        with pytest.raises(
            ClosedError, match=r"was requested from a closed SmallRuntime.\n  fix: use it inside the 'with' block"
        ):
            ask()
    assert warm[0] is warm[1]


def test_close_waits_for_a_build_of_another_thread() -> None:
    """A service that another thread is building when close() comes is taken down too."""
    log: Log = []
    entered, released = threading.Event(), threading.Event()

    def open_slowly() -> Iterator[int]:
        entered.set()
        assert released.wait(10)
        yield 1
        log.append("-")

    runtime = runtime_of({"a": service(Phase.RUNTIME, open_slowly)}).open()
    building = threading.Thread(target=lambda: runtime.a)
    closing = threading.Thread(target=runtime.close)
    building.start()
    assert entered.wait(10)
    closing.start()
    released.set()
    building.join(10)
    closing.join(10)

    assert log == ["-"]


def test_factory_must_not_read_start_or_close_its_runtime() -> None:
    """Services declare their dependencies as arguments; a read during a build would break the order."""
    holder: list[Runtime] = []

    def ask(how: Callable[[Runtime], object]) -> object:
        return how(holder[0])

    for how, message in {
        (
            lambda runtime: runtime.b
        ): "'b' was requested while 'a' was being built.\n  fix: declare 'b' as an argument of 'a'",
        Runtime.start: "'a' was requested while 'a' was being built",
        Runtime.close: "SmallRuntime was closed while 'a' was being built",
    }.items():
        a, b = service(Phase.RUNTIME, ask, how), service(Phase.RUNTIME, opener([], "b"))
        with runtime_of({"a": a, "b": b}).open() as runtime:
            holder[:] = [runtime]
            with pytest.raises(ServiceError) as caught:
                runtime.a

        assert message in str(caught.value)


def test_service_that_is_a_generator_or_a_context_manager_is_not_entered() -> None:
    """Only a generator *function* has teardown; values with ``__enter__`` or ``__next__`` are plain services."""
    stream, lock = (number for number in range(3)), threading.Lock()

    with runtime_of(
        {"a": service(Phase.RUNTIME, lambda: stream), "b": service(Phase.RUNTIME, lambda: lock)}
    ).open() as r:
        assert (next(r.a), r.b.locked()) == (0, False)

    assert list(stream) == [1, 2]


def test_service_that_is_none_is_built_once() -> None:
    """A factory that returns None is a built service like any other."""
    builds: Log = []

    with runtime_of({"a": service(Phase.RUNTIME, lambda: builds.append("+"))}).open() as runtime:
        found = [runtime.a, runtime.a, runtime.container.a(), runtime.container.a()]

    assert (found, builds) == ([None] * 4, ["+"])


def test_arguments_are_passed_unchanged() -> None:
    """Plain values keep their identity; services, attributes of services, settings and factories are resolved."""
    lock = threading.Lock()
    first = service(Phase.RUNTIME, opener([], "first"))
    item = providers.Factory(dict, lock=lock, first=first)
    settings = RuntimeContainer.settings
    args = (lock, first, first.provided.name, settings, settings.provided.launch.rank, item)
    runtime_class = runtime_of({"first": first, "last": service(Phase.RUNTIME, opener([], "last"), *args, key=lock)})

    with runtime_class.open() as runtime:
        last: Service = runtime.last

        assert last.args == (lock, runtime.first, "first", runtime.settings, 0, {"lock": lock, "first": runtime.first})
        assert last.kwargs["key"] is lock


def test_argument_that_cannot_be_read_is_an_error_of_the_build() -> None:
    """If a service lacks the attribute that a dependant needs, the error names the dependant."""
    first = service(Phase.RUNTIME, opener([], "first"))
    runtime_class = runtime_of({"first": first, "last": service(Phase.RUNTIME, opener([], "l"), first.provided.size)})

    with (
        runtime_class.open() as runtime,
        pytest.raises(ServiceError, match="'last' could not be built: AttributeError"),
    ):
        runtime.last


def test_second_open_runtime_may_not_build_collective_services() -> None:
    """A process has one world: a second runtime is refused while the first is open, and works after it (B61)."""
    runtime_class = runtime_of(declare([], {"log": Phase.RUNTIME, "groups": Phase.DISTRIBUTED}))

    with runtime_class.open() as first, runtime_class.open() as second:
        assert first.groups
        assert second.log is not first.log
        with pytest.raises(ServiceError, match="close that runtime first; one process has one world at a time"):
            second.groups
        first.close()
        assert second.groups


def test_closed_runtime_releases_its_services_at_once() -> None:
    """close() drops every reference to services, without the garbage collector (B11, B27)."""
    alive: list[Any] = []

    class Marked:
        def __del__(self) -> None:
            alive.remove("service")

    def open_marked() -> Iterator[Marked]:
        alive.append("service")
        yield Marked()

    holder = service(Phase.RUNTIME, opener([], "h"), service(Phase.RUNTIME, open_marked))
    runtime = runtime_of({"a": holder.args[0], "h": holder}).open().start()
    runtime.container.a()
    gc.disable()
    try:
        runtime.close()
        assert alive == []
    finally:
        gc.enable()


def use_chain(num_services: int) -> None:
    """Build a chain by one read and by one read per service, and close it."""
    names = [f"s{place}" for place in range(num_services)]
    log: Log = []
    declared = declare(
        log, dict.fromkeys(names, Phase.RUNTIME), {name: [n] for name, n in zip(names[1:], names, strict=False)}
    )
    runtime_class = runtime_of(container_of(declared))
    with runtime_class.open() as runtime:
        assert getattr(runtime, names[-1])
    with runtime_class.open() as runtime:
        for name in names:
            getattr(runtime, name)
    once = [*(f"+{name}" for name in names), *(f"-{name}" for name in reversed(names))]
    assert log == once * 2


def test_chain_of_five_thousand_services_is_built_and_closed_without_recursion() -> None:
    """A long chain is built by one read, or by one read per service, and closed, in linear work."""
    few, many = (num_calls(partial(use_chain, num_services)) for num_services in (500, 5000))

    assert many < 12 * few


def test_disabled_error_of_a_factory_disables_the_service_and_its_dependants() -> None:
    """A factory that raises ServiceDisabledError switches its service off with that reason; the rest is built."""
    log: Log = []

    def refuse() -> object:
        raise ServiceDisabledError("The vocabulary has no size.")

    vocabulary = service(Phase.VOCABULARY, refuse)

    def optional(value: object | None) -> object:
        return ["built", value]

    def needing(value: Service) -> object:
        raise AssertionError

    runtime_class = runtime_of(
        {
            "vocabulary": vocabulary,
            "optional": service(Phase.RUNTIME, optional, vocabulary),
            "needing": service(Phase.RUNTIME, needing, vocabulary),
            "last": service(Phase.RUNTIME, opener(log, "last")),
        }
    )

    with runtime_class.open() as runtime:
        before = dict(runtime.disabled)
        runtime.start()
        assert runtime.optional == ["built", None]
        with pytest.raises(ServiceDisabledError, match=r"'needing' is disabled.\n.*needs 'vocabulary', which is off"):
            runtime.needing

        assert (before, runtime.built) == ({}, ("optional", "last"))
        assert runtime.disabled["vocabulary"] == "vocabulary: The vocabulary has no size."


def test_settings_of_a_runtime_are_those_it_was_opened_with() -> None:
    """The runtime and its container return the same settings object."""
    settings = RuntimeSettings()

    with runtime_of({}).open(settings) as runtime:
        assert (runtime.settings, runtime.container.settings()) == (settings, settings)
