"""Opens random numbers and draws from every source."""

from __future__ import annotations

import os
import random
from contextlib import contextmanager

import numpy as np
import torch
from torch._inductor import config as inductor

from runtime_di.providers.process_groups.service import ProcessGroups, RankGrid
from runtime_di.providers.rng.determinism import CUBLAS_VARIABLE
from runtime_di.providers.rng.service import open_rng
from runtime_di.providers.rng.settings import RngSettings

opened = contextmanager(open_rng)
CPU = torch.device("cpu")
ALONE = ProcessGroups.pretend(RankGrid(world_size=1))


def seeds_of(grid: RankGrid, settings: RngSettings) -> list[dict[str, int]]:
    """Seeds of every stream on every rank of a grid."""
    return [settings.seeds(ProcessGroups.pretend(grid, rank)) for rank in range(grid.world_size)]


def draw() -> tuple[float, float, float]:
    """Draw from the global generators of Python, numpy and torch."""
    return random.random(), float(np.random.random()), float(torch.rand(()))


def draw_halves() -> tuple[float, float]:
    """Draw one of the two normal numbers that Python and numpy generate together, and leave the other."""
    return random.gauss(0, 1), float(np.random.standard_normal())


def seed_by_hand(seed: int) -> None:
    """Seed the global generators as a program without runtime-di would."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def flags() -> tuple[object, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        getattr(inductor, "deterministic", None),
        os.environ.get(CUBLAS_VARIABLE),
    )
