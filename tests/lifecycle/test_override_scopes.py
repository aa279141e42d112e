"""Overrides of every runtime that is opened within a scope."""

from __future__ import annotations

import threading
import types
import weakref
from contextlib import ExitStack
from typing import Protocol

import pytest

from runtime_di import OverrideError, Phase, Runtime, service
from runtime_di.containers import TrainingRuntime, TrainingSettings
from runtime_di.testing import FakeTokenizer, FakeWriter, fake_process_groups
from tests.support.call_counts import num_calls
from tests.support.small_runtimes import Log, container_of, declare, opener, runtime_of

pytest_plugins = ["pytester"]


class Encoder(Protocol):
    def encode(self, text: str) -> list[int]: ...


class FakeEncoder:
    def encode(self, text: str) -> list[int]:
        return [len(text)]


def runtime_with(log: Log, *names: str) -> type[Runtime]:
    return runtime_of(declare(log, dict.fromkeys(names, Phase.RUNTIME)))


def test_scope_reaches_the_next_opening_and_no_open_runtime() -> None:
    """A runtime that is open keeps what it has; those opened within the scope have the fake; later ones do not."""
    runtime_class = runtime_with([], "writer")

    with runtime_class.open() as before:
        with runtime_class.overriding(writer="fake"):
            assert before.writer.name == "writer"
            with runtime_class.open() as within:
                assert within.writer == "fake"
        with runtime_class.open() as after:
            assert after.writer.name == "writer"


def test_opened_within_a_scope_keeps_the_fake_after_it() -> None:
    """A scope applies when a runtime is opened, not when a service is read (B77)."""
    runtime_class = runtime_with([], "writer")

    with runtime_class.overriding(writer="fake"):
        runtime = runtime_class.open()

    assert runtime.writer == "fake"
    runtime.close()


def test_inner_scopes_override_outer_ones_and_open_overrides_all() -> None:
    """Scopes nest: the inner over the outer, service by service, and the overrides of open() over both."""
    runtime_class = runtime_with([], "a", "b", "c", "d")

    with runtime_class.overriding(a=1, b=1, c=1):
        with runtime_class.overriding(b=2, c=2), runtime_class.open(overrides={"c": 3}) as runtime:
            assert (runtime.a, runtime.b, runtime.c, runtime.d.name) == (1, 2, 3, "d")
        with runtime_class.open() as outer:
            assert (outer.a, outer.b, outer.c) == (1, 1, 1)


def test_scope_by_container_attribute_applies_to_subclasses() -> None:
    """A base's scope reaches a subclass, whose redeclared service it replaces; no sibling is reached."""
    base = container_of(declare([], {"tokenizer": Phase.TOKENIZER}))
    own = container_of({"tokenizer": service(Phase.TOKENIZER, opener([], "own"))}, base)
    base_runtime, sibling = runtime_of(base), runtime_of(base)
    child = types.new_class("Child", (base_runtime,), {"container": own})

    with (
        base_runtime.overriding({base.providers["tokenizer"]: "fake"}),
        child.open() as runtime,
        sibling.open() as other,
    ):
        assert runtime.tokenizer == "fake"
        assert other.tokenizer.name == "tokenizer"


def test_wrong_scope_is_refused_at_once() -> None:
    """A fake that lacks a method, has another signature or names no service is refused where the scope is created."""
    runtime_class = runtime_of({"encoder": service(Phase.TOKENIZER, opener([], "encoder"))}, {"encoder": Encoder})

    with pytest.raises(OverrideError, match="lacks 'encode' of Encoder"):
        runtime_class.overriding(encoder=object())
    with pytest.raises(OverrideError, match=r"encode\(words\) does not take the calls of \(text\)"):
        runtime_class.overriding(encoder=types.SimpleNamespace(encode=lambda words: []))
    with pytest.raises(OverrideError, match="encoding: is not a service of SmallRuntime"):
        runtime_class.overriding(encoding=FakeEncoder())


def test_subclass_that_wants_more_than_the_fake_has_refuses_it() -> None:
    """A scope that fits the base is checked again by the subclass that is opened."""
    declared = container_of({"encoder": service(Phase.TOKENIZER, opener([], "encoder"))})
    base = runtime_of(declared)
    child = types.new_class(
        "Child", (base,), {}, lambda body: body.update(__annotations__={"encoder": Encoder}, __module__=__name__)
    )

    with base.overriding(encoder=object()), pytest.raises(OverrideError, match="Child cannot be opened"):
        child.open()


def test_scopes_of_threads_are_their_own() -> None:
    """A thread sees no scope of another, so that tests may run side by side."""
    runtime_class, seen = runtime_with([], "writer"), []

    def open_there() -> None:
        with runtime_class.open() as runtime:
            seen.append(runtime.writer.name)

    with runtime_class.overriding(writer="fake"):
        thread = threading.Thread(target=open_there)
        thread.start()
        thread.join()

    assert seen == ["writer"]


def test_nothing_outlives_the_scope() -> None:
    """Whatever ends it, in whatever order scopes end, the next opening is real and the fake is released (B77, B79)."""
    runtime_class, fake = runtime_with([], "writer"), FakeEncoder()
    gone = weakref.ref(fake)

    with ExitStack() as outer:
        inner = ExitStack()
        outer.enter_context(runtime_class.overriding(writer=fake))
        inner.enter_context(runtime_class.overriding(writer=2))
        outer.close()
        with runtime_class.open() as still:
            assert still.writer == 2
        inner.close()
    with pytest.raises(KeyError), runtime_class.overriding(writer=3):
        raise KeyError
    del fake
    with runtime_class.open() as runtime:
        assert runtime.writer.name == "writer"
    assert gone() is None


SESSION = """
import pytest
from runtime_di.containers import TrainingRuntime
from runtime_di.testing import FakeTokenizer

@pytest.fixture(scope="session", autouse=True)
def tokenizer():
    with TrainingRuntime.overriding(tokenizer=FakeTokenizer(size=60)):
        yield

def test_session(open_runtime):
    with open_runtime(TrainingRuntime) as runtime:
        assert runtime.tokenizer.size == 60

def test_one_test(open_runtime):
    with open_runtime(TrainingRuntime, {"tokenizer": FakeTokenizer(size=70)}) as runtime:
        assert runtime.vocabulary.size == 70
"""


@pytest.mark.processes
def test_scope_of_a_session_is_a_fixture(pytester: pytest.Pytester) -> None:
    """A session fixture overrides for all tests, and a single test over it."""
    pytester.makepyfile(SESSION)

    pytester.runpytest_subprocess("-p", "no:randomly").assert_outcomes(passed=2)


@pytest.mark.leak_watch(False)
def test_entrypoint_with_fakes_runs_in_milliseconds() -> None:
    """With the expensive services overridden, opening, running a body and closing is the work of milliseconds."""
    settings, writer = TrainingSettings(), FakeWriter()
    fakes = {"tokenizer": FakeTokenizer(), "writer": writer, "process_groups": fake_process_groups()}

    def body(runtime: TrainingRuntime) -> None:
        tokens = runtime.tokenizer.encode("some text")
        runtime.writer.scalar(
            "share", len(tokens) / runtime.vocabulary.padded_size, runtime.microbatches.at(0).global_size
        )

    def run() -> None:
        with TrainingRuntime.open(settings, overrides=fakes) as runtime:
            body(runtime)

    run()
    assert num_calls(run) < 50_000  # 10 million calls take about a second
    assert len(writer.scalars["share"]) == 2
