"""Opens the process groups of one rank as a runtime would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from runtime_di.launch import LaunchSettings
from runtime_di.providers.parallel import ParallelSettings
from runtime_di.providers.process_groups import ProcessGroups, open_process_groups
from runtime_di.providers.world import DistributedSettings
from runtime_di.settings import RuntimeSettings


@contextmanager
def opened(
    parallel: ParallelSettings | None = None,
    distributed: DistributedSettings | None = None,
    launch: LaunchSettings | None = None,
    **given: Any,
) -> Iterator[ProcessGroups]:
    """Open on the CPU, as the rank that the launch variables name, and close when left."""
    factory = open_process_groups(
        distributed or DistributedSettings(timeout_s=30),
        parallel or ParallelSettings(),
        launch or RuntimeSettings().launch,
        torch.device("cpu"),
        **given,
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
