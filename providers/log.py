"""The runtime's logger."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from runtime_di.section import Section

if TYPE_CHECKING:
    from runtime_di.launch import LaunchSettings
    from runtime_di.providers.vocabulary import Vocabulary

Level = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]

LOGGER = "runtime_di"


class LogSettings(Section):
    """How much the runtime logs."""

    level: Level = "INFO"
    """Least severe level that rank 0 logs."""
    other_ranks_level: Level = "WARNING"
    """The same for every other rank, which never logs more than rank 0."""

    def level_of(self, rank: int) -> int:
        """Return the level of a rank, as the number that `logging` uses."""
        levels = logging.getLevelNamesMapping()
        level = levels[self.level]
        return level if rank == 0 else max(level, levels[self.other_ranks_level])


def open_log(
    settings: LogSettings, launch: LaunchSettings, vocabulary: Vocabulary | None = None
) -> Iterator[logging.Logger]:
    """Set up the logger ``runtime_di``, tell the vocabulary, and put the logger back as it was on close.

    A program that configured logging gets the lines through its own handlers, in its own format; otherwise the logger
    writes to standard error itself and passes nothing on, so that no line appears twice if the program configures
    logging later.
    """
    logger = logging.getLogger(LOGGER)
    level, propagate = logger.level, logger.propagate
    handler = None if logger.hasHandlers() else _handler(launch)
    own_level = settings.level_of(launch.rank)
    logger.setLevel(own_level)
    if handler is not None:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        if vocabulary is not None:
            logger.info("%s", vocabulary)
        yield logger
    finally:
        if logger.level == own_level:  # else another runtime, opened before this one, has put it back already
            logger.setLevel(level)
        if handler is not None:
            logger.propagate = propagate
            logger.removeHandler(handler)
            handler.close()


def _handler(launch: LaunchSettings) -> logging.Handler:
    rank = f"[rank {launch.rank}] " if launch.world_size > 1 else ""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s {rank}%(levelname)s %(name)s: %(message)s"))
    return handler
