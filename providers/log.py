"""The runtime's logger."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from runtime_di.settings.section import Section

if TYPE_CHECKING:
    from runtime_di.providers.vocabulary import Vocabulary
    from runtime_di.settings.launch import LaunchSettings

Level = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]

LOGGER = "runtime_di"


class LogSettings(Section):
    """Log levels of the runtime, by rank."""

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
    """Configure the logger ``runtime_di``, log the vocabulary, and restore the logger on close.

    If the program has configured logging, its own handlers print the lines. Otherwise the logger writes to standard
    error and does not propagate, so that no line is printed twice if the program configures logging later.
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
        if logger.level == own_level:  # else another runtime, opened before this one, has already restored it
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
