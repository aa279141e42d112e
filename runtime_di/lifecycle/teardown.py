"""Teardown: every step runs, in reverse order, and receives the exception that ended the body, or ``None``."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from runtime_di.errors import ServiceError

T = TypeVar("T")

SuspendedFactory = tuple[str, Generator[Any, Any, Any]]
"""A service name and its generator factory, suspended at the ``yield``."""


def run_teardowns(
    factories: Sequence[SuspendedFactory], failure: BaseException | None
) -> tuple[list[Exception], BaseException | None]:
    """Resume every factory in reverse order, whatever the others raise.

    Args:
        factories: in build order.
        failure: the exception that ended the body; sent to every factory.

    Returns:
        The errors raised by teardowns, and the first KeyboardInterrupt or SystemExit that one of them raised.
    """
    errors: list[Exception] = []
    interrupt: BaseException | None = None
    for name, generator in reversed(factories):
        try:
            generator.send(failure)
            generator.close()
            raise ServiceError(f"The factory of '{name}' yielded twice.\n  fix: yield the service once")
        except StopIteration:
            continue
        except Exception as error:  # noqa: BLE001 - collected, and raised after the last teardown
            if error is not failure:
                error.add_note(f"raised by the teardown of service '{name}'")
                errors.append(error)
        except BaseException as stop:  # noqa: BLE001 - raised after the last teardown
            interrupt = interrupt or (None if stop is failure else stop)
    return errors, interrupt


def keep_suspended(factories: Sequence[SuspendedFactory]) -> None:
    """Prevent the parent's factories from being resumed in a forked child, even by the garbage collector."""
    import ctypes

    for _, generator in factories:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(generator))


@contextmanager
def run_on_exit(step: Callable[[BaseException | None], None]) -> Iterator[None]:
    """Call ``step`` after the body with the body's exception or ``None``.

    The body's exception is re-raised; an error of ``step`` becomes a note on it. After a successful body an error of
    ``step`` is raised itself.
    """
    try:
        yield
    except BaseException as failure:
        try:
            step(failure)
        except Exception as error:  # noqa: BLE001 - the body's exception is raised instead
            failure.add_note(f"and during teardown: {error!r}")
        raise
    step(None)


def as_generator(context: AbstractContextManager[T]) -> Generator[T, BaseException | None, None]:
    """Convert a context manager to a factory's generator: yield its value, then exit it with the failure sent back.

    Errors of the exit become notes on that failure; after a successful body they are raised themselves. The context
    manager exits with a stand-in, so that the traceback of the failure stays unchanged; see `original_failure`.
    """
    failure: BaseException | None = None
    try:
        with context as value:
            failure = yield value
            if failure is not None:
                raise _BodyFailedError from failure
    except _BodyFailedError as stand_in:
        for note in getattr(stand_in, "__notes__", ()):
            if failure is not None:
                failure.add_note(note)


def original_failure(failure: BaseException) -> BaseException:
    """The body's own exception, where a context manager of `as_generator` exits with the stand-in for it."""
    return (failure.__cause__ or failure) if isinstance(failure, _BodyFailedError) else failure


class _BodyFailedError(Exception):
    """Stands in for the body's exception, its ``__cause__``, while a context manager exits."""
