"""Settings of the world: backend, timeouts and the flight recorder."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, PositiveInt

from runtime_di.settings.capabilities import CudaDevice, Requirement
from runtime_di.settings.launch import LaunchSettings
from runtime_di.settings.section import Section

Seconds: TypeAlias = Annotated[float, Field(ge=0.001, le=31_536_000)]


class WorldSettings(Section):
    """How ranks join the world; `DistributedSettings` adds the groups."""

    backend: Literal["auto", "gloo", "nccl", "fake"] = "auto"
    """``auto`` is NCCL on CUDA devices, else Gloo; ``fake`` is one rank of a world whose other ranks do not exist."""
    timeout_s: Seconds = 600.0
    """Seconds that a rank waits for others in each collective of every group, and when it closes."""
    startup_timeout_s: Seconds = 120.0
    """Seconds that a rank waits for others to arrive, and in each step of group creation. Where ranks restart inside
    their processes it should be at least ``timeout_s``: the others may wait that long for a rank that failed."""
    cpu_collectives: bool = False
    """Whether NCCL groups have Gloo as well, for collectives of CPU tensors; Gloo groups always carry these."""
    flight_recorder_entries: PositiveInt | None = None
    """Number of collectives that torch records and dumps on a timeout; ``None`` leaves this to torch's variables."""

    @property
    def timeout(self) -> timedelta:
        """Timeout of every group."""
        return timedelta(seconds=self.timeout_s)

    @property
    def startup_timeout(self) -> timedelta:
        """Timeout of every group during group creation."""
        return timedelta(seconds=self.startup_timeout_s)

    def requires(self, launch: LaunchSettings) -> Iterable[Requirement]:
        """Require a CUDA driver for NCCL."""
        return [CudaDevice("backend")] if self.backend == "nccl" else []
