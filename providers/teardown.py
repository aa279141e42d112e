"""A teardown that knows whether what it follows has failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
