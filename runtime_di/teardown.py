"""Takes services down, the last built first."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from runtime_di.errors import ServiceError

Teardown = tuple[str, Generator[Any, Any, Any]]
"""A service and the generator factory that waits after its ``yield``."""


def take_down(
    teardowns: Sequence[Teardown], failure: BaseException | None
) -> tuple[list[Exception], BaseException | None]:
    """Resume every factory in reverse, whatever the others raise.

    Args:
        teardowns: in build order.
        failure: the exception that ended the body, which every factory is handed.

    Returns:
        The errors of teardowns, and the first KeyboardInterrupt or SystemExit of one.
    """
    errors: list[Exception] = []
    interrupt: BaseException | None = None
    for name, generator in reversed(teardowns):
        try:
            generator.send(failure)
            generator.close()
            raise ServiceError(f"The factory of '{name}' yielded twice.\n  fix: yield the service once")
        except StopIteration:
            continue
        except Exception as error:  # noqa: BLE001 - collected, and raised once all are down
            if error is not failure:
                error.add_note(f"raised by the teardown of service '{name}'")
                errors.append(error)
        except BaseException as stop:  # noqa: BLE001 - raised once all are down
            interrupt = interrupt or (None if stop is failure else stop)
    return errors, interrupt


def never_run(teardowns: Sequence[Teardown]) -> None:
    """Keep suspended factories from ever being resumed in a forked child, not even by the garbage collector."""
    import ctypes

    for _, generator in teardowns:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(generator))
