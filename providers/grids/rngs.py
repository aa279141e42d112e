"""Random numbers of modules with their own grids, seeded by a rank's coordinates on each grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime_di.providers.grids.service import Grids
from runtime_di.providers.rng.seeds import NUM_SEEDS, first_seed, megatron_seeds, positions
from runtime_di.providers.rng.settings import RngSettings
from runtime_di.providers.rng.streams import RandomStreams

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class _Coordinates:
    """Coordinates of a rank on the axes of all grids, such as ``language.tp``; 0 on a grid that it is not on."""

    grids: Grids

    def index(self, axis: str, /) -> int:
        name, kind = axis.split(".")
        grid = self.grids[name].grid
        return grid.coordinates(self.grids[name].rank).get(kind, 0)

    def size(self, axis: str, /) -> int:
        name, kind = axis.split(".")
        return self.grids[name].grid.sizes[kind]


def module_seeds(settings: RngSettings, grids: Grids) -> dict[str, dict[str, int]]:
    """Derive the seeds of every stream of every module for this rank.

    No two streams of a run share a seed: those of modules count down from the first seed of the run. The ``base``
    streams of all modules come first, so that their seeds depend on pipeline sizes alone.
    """
    axes = settings.axes
    streams = {
        f"{name}.{stream}": tuple(f"{name}.{axis}" for axis in axes[stream]) for stream in axes for name in grids
    }
    numbers, first = positions(streams, _Coordinates(grids)), first_seed(settings.seed)
    seeds = {name: {stream: (first - 1 - numbers[f"{name}.{stream}"]) % NUM_SEEDS for stream in axes} for name in grids}
    if settings.derivation == "megatron":
        for name, grid in grids.here.items():
            seeds[name] |= megatron_seeds(settings.seed, grid, settings.data_parallel_random_init)
    return seeds


def open_module_rngs(settings: RngSettings, grids: Grids, device: torch.device) -> Mapping[str, RandomStreams]:
    """Create the streams of the modules of this rank; the global generators do not change.

    ``base`` is a stream too: initialise and run a module within ``rngs["vision"].fork("base")``, so that modules on the
    same ranks do not change each other's random numbers.
    """
    seeds = module_seeds(settings, grids)
    return {name: RandomStreams(seeds[name], device) for name in grids.here}
