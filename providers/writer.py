"""The writer of a run's metrics, on the one rank that writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import NonNegativeInt

from runtime_di.capabilities import Module, Requirement, WritableFolder
from runtime_di.errors import Problem, SettingsError
from runtime_di.providers.writer_jsonl import JsonLinesSettings, JsonLinesWriter
from runtime_di.providers.writer_tensorboard import TensorBoardSettings, TensorBoardWriter
from runtime_di.section import Section

if TYPE_CHECKING:
    from runtime_di.launch import LaunchSettings


class Writer(Protocol):
    """Where a run's numbers go; every rank has one, and those that do not write have a `NullWriter`."""

    def scalar(self, name: str, value: float, step: int) -> None:
        """Write one number of a training step."""

    def text(self, name: str, text: str, step: int) -> None:
        """Write a piece of text, such as a generated sample."""

    def settings(self, values: Mapping[str, Any]) -> None:
        """Write the settings of the run."""

    def flush(self) -> None:
        """Bring what was written so far to the disk."""


class WriterSettings(Section):
    """What a run writes, where, and on which rank."""

    folder: Path | None = None
    """Folder of the run, made if need be; without one nothing is written."""
    jsonl: JsonLinesSettings | None = JsonLinesSettings()
    """JSON lines."""
    tensorboard: TensorBoardSettings | None = None
    """TensorBoard event files."""
    rank: Literal["first", "last"] | NonNegativeInt = "last"
    """Rank of the world that writes. The last one is on the last pipeline stage in every order of the axes, where
    the loss is known."""

    def writes(self, launch: LaunchSettings) -> bool:
        """Whether the rank in ``launch`` is the one that writes, and anything is to be written at all."""
        if self.folder is None or (self.jsonl is None and self.tensorboard is None):
            return False
        named = {"first": 0, "last": launch.world_size - 1}
        return launch.rank == (named[self.rank] if isinstance(self.rank, str) else self.rank)

    def requires(self, launch: LaunchSettings) -> Iterable[Requirement]:
        if self.folder is None or not self.writes(launch):
            return
        yield WritableFolder("folder", self.folder)
        if self.tensorboard is not None:
            yield Module("tensorboard", "tensorboard", extra="tensorboard")

    def problems(self, launch: LaunchSettings) -> Iterable[Problem]:
        """Tell a rank that the world does not have, on which nothing would ever be written."""
        if isinstance(self.rank, int) and self.rank >= launch.world_size:
            yield Problem(
                "writer.rank",
                f"is not a rank of this world of {launch.world_size}",
                value=str(self.rank),
                fix=f"give a rank from 0 to {launch.world_size - 1}, 'first' or 'last'",
                involves=("launch",),
            )


class NullWriter:
    """Writes nothing."""

    def scalar(self, name: str, value: float, step: int) -> None:
        pass

    def text(self, name: str, text: str, step: int) -> None:
        pass

    def settings(self, values: Mapping[str, Any]) -> None:
        pass

    def flush(self) -> None:
        pass


class FanOutWriter:
    """Passes every call on to several writers."""

    def __init__(self, writers: Iterable[Writer]) -> None:
        self._writers = tuple(writers)

    def scalar(self, name: str, value: float, step: int) -> None:
        for writer in self._writers:
            writer.scalar(name, value, step)

    def text(self, name: str, text: str, step: int) -> None:
        for writer in self._writers:
            writer.text(name, text, step)

    def settings(self, values: Mapping[str, Any]) -> None:
        for writer in self._writers:
            writer.settings(values)

    def flush(self) -> None:
        for writer in self._writers:
            writer.flush()


def open_writer(settings: WriterSettings, launch: LaunchSettings, run: Mapping[str, Any]) -> Iterator[Writer]:
    """Open the backends on the rank that writes, and write the run's settings.

    Args:
        settings: what is written.
        launch: the rank that asks.
        run: settings of the run as JSON values, with secrets masked.

    Raises:
        SettingsError: the rank that writes is not in the world.
    """
    if problems := list(settings.problems(launch)):
        raise SettingsError("The writer cannot be opened:", problems)
    with ExitStack() as stack:  # closes every backend, even if one fails to open or to close
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
