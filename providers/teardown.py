"""A teardown that knows whether what it follows has failed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def teardown(step: Callable[[BaseException | None], None]) -> Iterator[None]:
    """Call ``step`` after the body, with the body's exception or ``None``.

    The body's exception is what leaves; an error of ``step`` becomes a note on it, and leaves itself only after a
    success.
    """
    try:
        yield
    except BaseException as failure:
        try:
            step(failure)
        except Exception as error:  # noqa: BLE001 - whatever it is, the first failure is the news
            failure.add_note(f"and while this was torn down: {error!r}")
        raise
    step(None)


def yielded(context: AbstractContextManager[T]) -> Generator[T, BaseException | None, None]:
    """Make a factory's generator of a context: yield its value, then leave it as the failure that is sent back says.

    Errors of leaving become notes on that failure; after a success they leave themselves.
    """
    failure: BaseException | None = None
    try:
        with context as value:
            failure = yield value
            if failure is not None:
                raise _BodyFailed from failure
    except _BodyFailed as failed:
        for note in getattr(failed, "__notes__", ()):
            if failure is not None:
                failure.add_note(note)


def root(failure: BaseException) -> BaseException:
    """Give the body's own exception for the one that stands for it in a context that is left."""
    return (failure.__cause__ or failure) if isinstance(failure, _BodyFailed) else failure


class _BodyFailed(Exception):  # noqa: N818 - no error of its own: it stands for the body's
    """Leaves a context as the body's exception would, which keeps its traceback."""
