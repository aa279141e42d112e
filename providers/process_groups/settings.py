"""Settings of process groups: those of the world, and the options of single kinds."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from pydantic import Field, PositiveInt

from runtime_di.providers.distributed.settings import WorldSettings
from runtime_di.providers.process_groups.rank_grid import Kind
from runtime_di.settings.section import Section

_CONFIG = ("min_ctas", "max_ctas", "cga_cluster_size", "net_name")


class GroupSettings(Section):
    """Options of NCCL for the groups of one kind; other backends ignore them."""

    high_priority: bool = False
    """Whether kernels run on a high-priority stream, ahead of other groups and of the model."""
    min_ctas: PositiveInt | None = None
    """Fewest thread blocks of a kernel; for ``None``, here and below, NCCL chooses."""
    max_ctas: PositiveInt | None = None
    """Most thread blocks of a kernel, which the model cannot use meanwhile."""
    cga_cluster_size: PositiveInt | None = None
    """Thread blocks of a cooperative group array."""
    net_name: str | None = None
    """Network module, such as ``IB`` or ``Socket``."""

    def options(self, timeout: timedelta) -> Any:
        """Return these options as torch's options of an NCCL group."""
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options(is_high_priority_stream=self.high_priority)
        options._timeout = timeout  # torch warns where it differs from the group's
        for name in _CONFIG:
            if (value := getattr(self, name)) is not None:
                setattr(options.config, name, value)
        return options


class DistributedSettings(WorldSettings):
    """How ranks communicate."""

    groups: dict[Kind, GroupSettings] = Field(default_factory=dict)
    """Options of the groups of some kinds, such as ``{"tp": {"high_priority": true}}``."""
