"""Opens the process groups of one rank as a runtime does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from runtime_di.providers.process_groups.parallel import ParallelSettings
from runtime_di.providers.process_groups.service import ProcessGroups, open_process_groups
from runtime_di.providers.process_groups.settings import DistributedSettings
from runtime_di.settings.launch import LaunchSettings
from runtime_di.settings.model import RuntimeSettings


@contextmanager
def opened(
    parallel: ParallelSettings | None = None,
    distributed: DistributedSettings | None = None,
    launch: LaunchSettings | None = None,
    **options: Any,
) -> Iterator[ProcessGroups]:
    """Open on the CPU, as the rank of the launch variables, and close after the body."""
    factory = open_process_groups(
        distributed or DistributedSettings(timeout_s=30),
        parallel or ParallelSettings(),
        launch or RuntimeSettings().launch,
        torch.device("cpu"),
        **options,
    )
    groups, failure = next(factory), None
    try:
        yield groups
    except BaseException as error:
        failure = error
        raise
    finally:
        with suppress(StopIteration):
            factory.send(failure)
