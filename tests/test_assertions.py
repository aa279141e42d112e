"""Assertions about what a runtime has built."""

from __future__ import annotations

import pytest

from declaring import declare, runtime_of
from runtime_di import Phase, Runtime, ServiceError
from runtime_di.testing import assert_not_built, assert_order

PHASES = {
    "tokenizer": Phase.TOKENIZER,
    "vocabulary": Phase.VOCABULARY,
    "writer": Phase.RUNTIME,
    "timers": Phase.RUNTIME,
    "mesh": Phase.DISTRIBUTED,
}


def small() -> Runtime:
    return runtime_of(declare([], PHASES, {"vocabulary": ["tokenizer"]})).open()


def test_order_that_is_so_passes() -> None:
    """Services between the named ones, and those built later, do not matter."""
    with small() as runtime:
        runtime.start()

        assert_order(runtime, "tokenizer", "writer", "mesh")
        assert_order(runtime, "mesh")
        assert_order(runtime)


def test_order_that_is_not_so_is_told_with_the_build_log() -> None:
    """The message says which services are out of order or missing, and shows what was built from what."""
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


def test_what_was_built_is_told_with_the_build_log() -> None:
    """assert_not_built names those that were built, also after the close."""
    with small() as runtime:
        assert_not_built(runtime, "tokenizer", "mesh")
        runtime.tokenizer

    with pytest.raises(AssertionError) as caught:
        assert_not_built(runtime, "tokenizer", "mesh")

    assert str(caught.value) == ("'tokenizer' was built.\n  SmallRuntime has built:\n    1. tokenizer (TOKENIZER)")


def test_nothing_built_is_said() -> None:
    """An empty build log is told as such."""
    with small() as runtime, pytest.raises(AssertionError, match="SmallRuntime has built nothing"):
        assert_order(runtime, "tokenizer")


@pytest.mark.parametrize("assertion", [assert_order, assert_not_built])
def test_misspelt_service_is_no_assertion_error(assertion) -> None:
    """A name that no service has would make assert_not_built pass for ever."""
    with small() as runtime, pytest.raises(ServiceError, match="tokeniser: no service of SmallRuntime"):
        assertion(runtime, "tokeniser")
