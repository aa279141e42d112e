"""Errors that name ranks: missing ones, and those whose connection failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from runtime_di.errors import Problem, ServiceError

_MOST_RANGES = 8


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ascending ranks with their noun: ``rank 3``, ``ranks 0-5,7``."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {format_rank_ranges(ranks)}"


def format_rank_ranges(ranks: Iterable[int]) -> str:
    """Format ascending ranks as ranges: ``0-5,7``; after the first eight ranges only the number of ranks is added."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    written = [f"{first}-{last}" if last > first else f"{first}" for first, last in ranges[:_MOST_RANGES]]
    rest = sum(last - first + 1 for first, last in ranges[_MOST_RANGES:])
    return ",".join(written) + (f" and {rest} more" if rest else "")


def missing_ranks_error(what: str, timeout_s: float, setting: str = "startup_timeout_s") -> ServiceError:
    """Create the error of ranks that did not arrive within the timeout that ``setting`` sets."""
    fix = f"check why these ranks are late or gone, or raise distributed.{setting}"
    return ServiceError(
        "Ranks are missing:", [Problem("process_groups", f"{what} within {round(timeout_s, 2):g} s", fix=fix)]
    )


@contextmanager
def connection_errors(what: str) -> Iterator[None]:
    """Re-raise a torch error as a `ServiceError` that names the failed step, ``what``, and the ranks involved."""
    import torch

    try:
        yield
    except (NotImplementedError, torch.OutOfMemoryError):
        raise  # no other rank is the cause of these
    except RuntimeError as error:
        text = f"{what}: {type(error).__name__}: {error}"
        fix = "check why one of these ranks is late or gone, and that they can reach each other"
        raise ServiceError("Ranks did not connect:", [Problem("process_groups", text, fix=fix)]) from error
