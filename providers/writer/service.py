"""Opens the metric writer of a run, on the one rank that writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from typing import Any

from runtime_di.errors import Problem, SettingsError
from runtime_di.providers.writer.fan_out import FanOutWriter
from runtime_di.providers.writer.jsonl import JsonLinesWriter
from runtime_di.providers.writer.null import NullWriter
from runtime_di.providers.writer.protocol import Writer
from runtime_di.providers.writer.settings import WriterSettings
from runtime_di.providers.writer.tensorboard import TensorBoardWriter
from runtime_di.settings.launch import LaunchSettings


def open_writer(settings: WriterSettings, launch: LaunchSettings, run: Mapping[str, Any]) -> Iterator[Writer]:
    """Open the backends on the rank that writes, and write the run's settings.

    Args:
        settings: backends, folder and the rank that writes.
        launch: this rank and the world size.
        run: the run's settings as JSON values, with secrets masked.

    Raises:
        SettingsError: the rank that writes is not in the world, or the folder cannot be written.
    """
    if problems := list(settings.problems(launch)):
        raise SettingsError("The writer cannot be opened:", problems)
    with ExitStack() as stack:  # closes every backend, even if another fails to open or to close
        try:
            backends = [stack.enter_context(closing(backend)) for backend in _open_backends(settings, launch)]
        except OSError as error:
            problem = Problem(
                "writer.folder", str(error), str(settings.folder), fix="name a folder that can be written"
            )
            raise SettingsError("The writer cannot be opened:", [problem]) from error
        writer = FanOutWriter(backends) if backends else NullWriter()
        writer.settings(run)
        yield writer


def _open_backends(settings: WriterSettings, launch: LaunchSettings) -> Iterator[JsonLinesWriter | TensorBoardWriter]:
    if settings.folder is None or not settings.writes(launch):
        return
    settings.folder.mkdir(parents=True, exist_ok=True)
    if settings.jsonl is not None:
        yield JsonLinesWriter(settings.folder / settings.jsonl.file)
    if settings.tensorboard is not None:
        yield TensorBoardWriter(settings.tensorboard, settings.folder)
