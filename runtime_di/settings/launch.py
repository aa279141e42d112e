"""Rank and world of this process, from torchrun's launch variables."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from runtime_di.errors import Problem
from runtime_di.settings.frozen import FrozenModel
from runtime_di.settings.marks import Mark

LAUNCH_VARIABLES = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_world_size": "LOCAL_WORLD_SIZE",
    "node_rank": "GROUP_RANK",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
    "run_id": "TORCHELASTIC_RUN_ID",
    "restart_count": "TORCHELASTIC_RESTART_COUNT",
    "agent_store": "TORCHELASTIC_USE_AGENT_STORE",
    "error_file": "TORCHELASTIC_ERROR_FILE",
}
"""Field of `LaunchSettings` to the launch variable that sets it."""


class LaunchSettings(FrozenModel):
    """Rank and world of this process; a plain ``python`` run is a world of one."""

    rank: Annotated[NonNegativeInt, Mark.PER_RANK] = 0
    """Rank of this process in the world."""
    world_size: PositiveInt = 1
    """Processes in the world."""
    local_rank: Annotated[NonNegativeInt, Mark.PER_RANK] = 0
    """Rank of this process on its node."""
    local_world_size: Annotated[PositiveInt, Mark.PER_RANK] = 1
    """Processes on this node."""
    node_rank: Annotated[NonNegativeInt, Mark.PER_RANK] = 0
    """Rank of this node among the nodes."""
    master_addr: Annotated[str, Mark.PER_RANK] = "127.0.0.1"
    """Host of the rendezvous store; unused in a world of one."""
    master_port: Annotated[int, Field(ge=0, le=65535), Mark.PER_RANK] = 29500
    """Port of the rendezvous store."""
    run_id: Annotated[str | None, Mark.PER_RANK] = None
    """Name of the job, set by the launcher."""
    restart_count: Annotated[NonNegativeInt, Mark.PER_RANK] = 0
    """Restarts of this worker group so far."""
    agent_store: Annotated[bool, Mark.PER_RANK] = False
    """Whether the launcher hosts the rendezvous store, so that no rank does."""
    error_file: Annotated[Path | None, Mark.PER_RANK] = None
    """File in which the launcher looks for the error of this process."""

    def problems(self) -> Iterable[Problem]:
        """Ranks outside their world, and contradictory sizes."""
        if self.rank >= self.world_size:
            what = f"rank {self.rank} must be below the world size {self.world_size}"
            yield Problem("launch.rank", what, fix="start with torchrun, or correct RANK and WORLD_SIZE")
        if self.local_rank >= self.local_world_size:
            what = f"local rank {self.local_rank} must be below the local world size {self.local_world_size}"
            yield Problem(
                "launch.local_rank", what, fix="start with torchrun, or correct LOCAL_RANK and LOCAL_WORLD_SIZE"
            )
        if self.local_world_size > self.world_size:
            what = f"local world size {self.local_world_size} must not be above the world size {self.world_size}"
            yield Problem("launch.local_world_size", what, fix="start with torchrun, or correct LOCAL_WORLD_SIZE")
        if self.world_size > 1 and self.master_port == 0:
            what = f"{self.world_size} ranks cannot rendezvous on port 0"
            yield Problem("launch.master_port", what, fix="start with torchrun --standalone, which picks a free port")
