"""Settings of the writer: backends, folder and rank."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from runtime_di.errors import Problem
from runtime_di.providers.writer.jsonl import JsonLinesSettings
from runtime_di.providers.writer.ranks import RankChoice, rank_problems, writing_rank
from runtime_di.providers.writer.tensorboard import TensorBoardSettings
from runtime_di.settings.capabilities import Module, Requirement, WritableFolder
from runtime_di.settings.launch import LaunchSettings
from runtime_di.settings.section import Section


class WriterSettings(Section):
    """Which metrics backends a run writes, in which folder and on which rank."""

    folder: Path | None = None
    """Folder of the run, created if needed; if unset, nothing is written."""
    jsonl: JsonLinesSettings | None = JsonLinesSettings()
    """JSON lines."""
    tensorboard: TensorBoardSettings | None = None
    """TensorBoard event files."""
    rank: RankChoice = "last"
    """Rank of the world that writes. In every order of the axes, the last rank is on the last pipeline stage, which
    computes the loss."""

    def writes(self, launch: LaunchSettings) -> bool:
        """Whether the rank in ``launch`` writes to at least one backend."""
        if self.folder is None or (self.jsonl is None and self.tensorboard is None):
            return False
        return launch.rank == writing_rank(self.rank, launch.world_size)

    def requires(self, launch: LaunchSettings) -> Iterable[Requirement]:
        if self.folder is None or not self.writes(launch):
            return
        yield WritableFolder("folder", self.folder)
        if self.tensorboard is not None:
            yield Module("tensorboard", "tensorboard", extra="tensorboard")

    def problems(self, launch: LaunchSettings) -> Iterable[Problem]:
        """Yield what is wrong with these settings in the world of ``launch``."""
        return rank_problems(self.rank, launch.world_size)
