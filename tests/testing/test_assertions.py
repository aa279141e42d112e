"""Assertions about the services that a runtime has built."""

from __future__ import annotations

import pytest

from runtime_di import Phase, Runtime, ServiceError
from runtime_di.testing import assert_not_built, assert_order
from tests.support.small_runtimes import declare, runtime_of

PHASES = {
    "tokenizer": Phase.TOKENIZER,
    "vocabulary": Phase.VOCABULARY,
    "writer": Phase.RUNTIME,
    "timers": Phase.RUNTIME,
    "mesh": Phase.DISTRIBUTED,
}


def small() -> Runtime:
    return runtime_of(declare([], PHASES, {"vocabulary": ["tokenizer"]})).open()


def test_right_order_passes() -> None:
    """Services between the named ones, and those built later, do not matter."""
    with small() as runtime:
        runtime.start()

        assert_order(runtime, "tokenizer", "writer", "mesh")
        assert_order(runtime, "mesh")
        assert_order(runtime)


def test_wrong_order_fails_with_the_build_log() -> None:
    """The message names the services that are out of order or missing, and lists dependencies."""
    with small() as runtime:
        runtime.writer

        with pytest.raises(AssertionError) as caught:
            assert_order(runtime, "writer", "vocabulary", "mesh")

    assert str(caught.value) == (
        "'mesh' was not built; 'vocabulary' was built before 'writer'.\n"
        "  expected order: writer, vocabulary, mesh\n"
        "  SmallRuntime has built:\n"
        "    1. tokenizer (TOKENIZER)\n"
        "    2. vocabulary (VOCABULARY) <- tokenizer\n"
        "    3. writer (RUNTIME)"
    )


def test_built_service_fails_with_the_build_log() -> None:
    """assert_not_built names those that were built, also after the close."""
    with small() as runtime:
        assert_not_built(runtime, "tokenizer", "mesh")
        runtime.tokenizer

    with pytest.raises(AssertionError) as caught:
        assert_not_built(runtime, "tokenizer", "mesh")

    assert str(caught.value) == ("'tokenizer' was built.\n  SmallRuntime has built:\n    1. tokenizer (TOKENIZER)")


def test_empty_build_log_is_printed() -> None:
    """The message says that nothing was built."""
    with small() as runtime, pytest.raises(AssertionError, match="SmallRuntime has built nothing"):
        assert_order(runtime, "tokenizer")


@pytest.mark.parametrize("assertion", [assert_order, assert_not_built])
def test_misspelt_service_is_not_an_assertion_error(assertion) -> None:
    """A name that no service has would make assert_not_built pass for ever."""
    with small() as runtime, pytest.raises(ServiceError, match="tokeniser: is not a service of SmallRuntime"):
        assertion(runtime, "tokeniser")
