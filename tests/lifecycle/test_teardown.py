"""Services are taken down in reverse build order, all of them, whatever is raised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from runtime_di import CloseError, Phase, Runtime, ServiceError, service
from tests.support.small_runtimes import Log, declare, opener, runtime_of


def tearing(log: Log, name: str, raises: BaseException | None = None) -> Callable[[], Iterator[str]]:
    """A factory whose teardown logs the failure that it receives, then raises."""

    def open_service() -> Iterator[str]:
        failure = yield name
        log.append(f"-{name}: {failure!r}")
        if raises is not None:
            raise raises

    return open_service


def torn(log: Log, **raises: BaseException | None) -> type[Runtime]:
    """A runtime of such services, in this order."""
    return runtime_of({name: service(Phase.RUNTIME, tearing(log, name, error)) for name, error in raises.items()})


def test_failing_start_takes_down_what_was_built_and_passes_the_failure() -> None:
    """When a build raises, earlier services are taken down in reverse with the failure, which is raised (B22)."""
    log: Log = []
    failing = service(Phase.RNG, opener(log, "rng", fails=[ValueError("seed")]))
    groups = service(Phase.DISTRIBUTED, tearing(log, "groups"))

    with (
        pytest.raises(ServiceError, match="rng") as caught,
        runtime_of({"groups": groups, "rng": failing}).open() as runtime,
    ):
        runtime.start()

    assert log == [f"-groups: {caught.value!r}"]


def test_teardown_is_the_exact_reverse_of_the_actual_build_order() -> None:
    """Services read in another order than the plan's are taken down in reverse of that order."""
    log: Log = []

    with runtime_of(declare(log, dict.fromkeys("abc", Phase.RUNTIME))).open() as runtime:
        runtime.c, runtime.a, runtime.b

    assert log == ["+c", "+a", "+b", "-b", "-a", "-c"]


def test_generator_factory_receives_the_failure_of_the_body_and_cannot_swallow_it() -> None:
    """``failure = yield value`` is the body's exception, which is raised anyway."""
    log: Log = []
    failure = ValueError("body")

    with pytest.raises(ValueError, match="body") as caught, torn(log, a=None).open() as runtime:
        runtime.start()
        raise failure

    assert caught.value is failure
    assert log == ["-a: ValueError('body')"]


def test_generator_factory_receives_none_after_a_successful_body() -> None:
    """Without a failure the factory is resumed with ``None``, by the ``with`` block and by close()."""
    log: Log = []

    torn(log, a=None).open().start().close()
    with torn(log, b=None).open() as runtime:
        runtime.start()

    assert log == ["-a: None", "-b: None"]


def test_all_teardowns_run_and_their_errors_are_raised_as_one_close_error() -> None:
    """Errors of teardowns are collected, each noted with its service, in the order of the teardown."""
    log: Log = []

    with pytest.raises(CloseError, match="SmallRuntime did not close cleanly") as caught:
        torn(log, a=OSError("a"), b=None, c=RuntimeError("c")).open().start().close()

    assert log == ["-c: None", "-b: None", "-a: None"]
    assert [(repr(error), error.__notes__) for error in caught.value.exceptions] == [
        ("RuntimeError('c')", ["raised by the teardown of service 'c'"]),
        ("OSError('a')", ["raised by the teardown of service 'a'"]),
    ]


def test_exception_of_the_body_is_raised_with_teardown_errors_as_notes() -> None:
    """The body's exception is not replaced; errors of teardowns become its notes."""
    with (
        pytest.raises(ValueError, match="body") as caught,
        torn([], a=OSError("a"), b=RuntimeError("b")).open() as runtime,
    ):
        runtime.start()
        raise ValueError("body")

    assert caught.value.__notes__ == [
        "teardown error: RuntimeError: b (raised by the teardown of service 'b')",
        "teardown error: OSError: a (raised by the teardown of service 'a')",
    ]


def test_teardown_that_raises_the_failure_again_is_not_a_further_error() -> None:
    """A factory that re-raises the failure adds nothing."""

    def open_service() -> Iterator[str]:
        failure = yield "a"
        if failure:
            raise failure

    with pytest.raises(ValueError, match="body") as caught:  # noqa: SIM117
        with runtime_of({"a": service(Phase.RUNTIME, open_service)}).open() as runtime:
            runtime.start()
            raise ValueError("body")

    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("body_fails", [False, True])
def test_interrupt_in_a_teardown_is_raised_after_the_rest_has_run(stop: type[BaseException], body_fails: bool) -> None:
    """KeyboardInterrupt and SystemExit are raised after all teardowns, with the errors of others as notes."""
    log: Log = []

    with (
        pytest.raises(stop) as caught,
        torn(log, a=OSError("a"), b=stop(3), c=stop(4)).open() as runtime,
    ):
        runtime.start()
        if body_fails:
            raise ValueError("body")

    assert [line.split(":")[0] for line in log] == ["-c", "-b", "-a"]
    assert caught.value.args == (4,)
    assert caught.value.__notes__ == ["teardown error: OSError: a (raised by the teardown of service 'a')"]


def test_factory_that_yields_twice_or_never_is_an_error() -> None:
    """A second yield is a teardown error, no yield at all an error of the build."""

    def twice() -> Iterator[int]:
        yield 1
        yield 2

    def never() -> Iterator[int]:
        yield from ()

    with (
        pytest.raises(ServiceError, match="'never' ended without a yield"),
        runtime_of({"never": service(Phase.RUNTIME, never)}).open() as runtime,
    ):
        runtime.start()
    with pytest.raises(CloseError) as caught:
        runtime_of({"twice": service(Phase.RUNTIME, twice)}).open().start().close()

    assert "'twice' yielded twice" in str(caught.value.exceptions[0])


def test_close_twice_takes_down_once() -> None:
    """close() is idempotent, also within a ``with`` block."""
    log: Log = []

    with runtime_of(declare(log, {"a": Phase.RUNTIME})).open() as runtime:
        runtime.start()
        runtime.close()
        runtime.close()

    assert log == ["+a", "-a"]


def test_factory_kinds_that_have_a_teardown() -> None:
    """Partials, bound methods and callable objects are resumed like generator functions."""
    log: Log = []

    class Opener:
        def __call__(self, name: str) -> Iterator[str]:
            log.append(f"+{name}")
            yield name
            log.append(f"-{name}")

        method = __call__

    factories = {"partial": partial(Opener().method, "partial"), "method": Opener().method, "object": Opener()}
    declared = {
        name: service(Phase.RUNTIME, f, *([name] if name != "partial" else [])) for name, f in factories.items()
    }

    with runtime_of(declared).open() as runtime:
        runtime.start()
        assert (runtime.partial, runtime.method, runtime.object) == ("partial", "method", "object")

    assert log == ["+partial", "+method", "+object", "-object", "-method", "-partial"]
