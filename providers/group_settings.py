"""What is particular about the groups of one kind."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from pydantic import PositiveInt

from runtime_di.section import Section

_CONFIG = ("min_ctas", "max_ctas", "cga_cluster_size", "net_name")


class GroupSettings(Section):
    """How NCCL carries the collectives of a group; other backends know none of this."""

    high_priority: bool = False
    """Whether kernels run on a stream of high priority, ahead of what other groups and the model compute."""
    min_ctas: PositiveInt | None = None
    """Least thread blocks that a kernel uses; NCCL chooses where this and the following are ``None``."""
    max_ctas: PositiveInt | None = None
    """Most thread blocks that a kernel uses, and so keeps from the model."""
    cga_cluster_size: PositiveInt | None = None
    """Thread blocks of a cooperative group array."""
    net_name: str | None = None
    """Network module, such as ``IB`` or ``Socket``."""

    def options(self, timeout: timedelta) -> Any:
        """Give this as torch takes it for a group whose backend is NCCL."""
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options(is_high_priority_stream=self.high_priority)
        options._timeout = timeout  # torch warns where it differs from the group's
        for name in _CONFIG:
            if (value := getattr(self, name)) is not None:
                setattr(options.config, name, value)
        return options
