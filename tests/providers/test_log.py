"""The runtime's logger."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pydantic import ValidationError

from runtime_di.providers.log import LOGGER, LogSettings, open_log
from runtime_di.providers.vocabulary import Vocabulary
from runtime_di.settings.launch import LaunchSettings

opened = contextmanager(open_log)


@contextmanager
def bare_root() -> Iterator[logging.Logger]:
    """Remove pytest's handlers from the root logger for the duration of a test."""
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        yield root
    finally:
        root.handlers = handlers


def state() -> tuple[int, bool, list[logging.Handler], list[logging.Handler]]:
    logger, root = logging.getLogger(LOGGER), logging.getLogger()
    return logger.level, logger.propagate, list(logger.handlers), list(root.handlers)


@pytest.mark.parametrize(
    ("rank", "settings", "level"),
    [
        (0, LogSettings(), "INFO"),
        (1, LogSettings(), "WARNING"),
        (1, LogSettings(other_ranks_level="INFO"), "INFO"),
        (0, LogSettings(level="ERROR"), "ERROR"),
        (1, LogSettings(level="ERROR"), "ERROR"),
    ],
)
def test_other_ranks_are_no_louder_than_rank_0(rank: int, settings: LogSettings, level: str) -> None:
    """Rank 0 logs from its level on, other ranks from theirs, but never more than rank 0 (B42: no default is lost)."""
    launch = LaunchSettings(rank=rank, world_size=2)

    with opened(settings, launch) as log:
        effective = logging.getLevelName(log.getEffectiveLevel())

    assert effective == level


def test_lines_of_several_ranks_name_their_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a configured root, lines go to standard error once, with the rank, and the root gets no handler."""
    with bare_root() as root, opened(LogSettings(), LaunchSettings(rank=1, world_size=2)) as log:
        log.warning("slow link")
        handlers = list(root.handlers)

    assert capsys.readouterr().err.partition(" [rank")[2] == " 1] WARNING runtime_di: slow link\n"
    assert handlers == []


def test_lines_of_a_single_rank_name_no_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """With a world size of 1, lines do not name the rank."""
    with bare_root(), opened(LogSettings(), LaunchSettings()) as log:
        log.info("ready")

    assert capsys.readouterr().err.endswith(" INFO runtime_di: ready\n")


def test_configured_root_gets_each_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    """A program that configured the root logger gets each line once, in its own format."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("mine: %(message)s"))

    with bare_root() as root:
        root.addHandler(handler)
        with opened(LogSettings(), LaunchSettings()) as log:
            log.info("ready")

    assert capsys.readouterr().err == "mine: ready\n"


def test_root_configured_later_repeats_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    """If a program configures the root logger while a runtime is open, no line is printed twice."""
    with bare_root() as root, opened(LogSettings(), LaunchSettings()) as log:
        root.addHandler(logging.StreamHandler())
        log.info("ready")

    assert capsys.readouterr().err.count("ready") == 1


@pytest.mark.parametrize("configured", [False, True])
@pytest.mark.parametrize("failure", [None, ValueError("body"), KeyboardInterrupt()])
def test_close_restores_the_logger(failure: BaseException | None, configured: bool) -> None:
    """Level, handlers and propagation are restored, after success and after a failure."""
    with bare_root() as root:
        root.handlers = [logging.NullHandler()] if configured else []
        before = state()
        opening = open_log(LogSettings(level="DEBUG"), LaunchSettings())
        next(opening)
        during = state()
        with pytest.raises(StopIteration):
            opening.send(failure)  # type: ignore[attr-defined]
        after = state()

    assert during != before
    assert after == before


def test_level_must_be_known() -> None:
    """A level that logging does not have is refused when the settings are created."""
    with pytest.raises(ValidationError, match="'DEBUG', 'INFO', 'WARNING', 'ERROR' or 'CRITICAL'"):
        LogSettings.model_validate({"level": "LOUD"})


def test_vocabulary_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    """The first line contains the vocabulary's sizes, its origin and its dummy rows."""
    vocabulary = Vocabulary(size=50257, padded_size=50304, origin="tokenizer", dummy_rows=47)

    with bare_root(), opened(LogSettings(), LaunchSettings(), vocabulary):
        printed = capsys.readouterr().err

    assert printed.endswith(
        "vocabulary of 50257 tokens (from tokenizer): 50304 embedding rows, 47 of them without a token\n"
    )
