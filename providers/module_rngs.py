"""Random numbers of modules that have grids of their own, seeded by a rank's place on each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime_di.providers.grids import Grids
from runtime_di.providers.rng import RngSettings
from runtime_di.providers.rng_seeds import NUM_SEEDS, first_seed, megatron_seeds, positions
from runtime_di.providers.rng_streams import RandomStreams

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class _Places:
    """Where a rank stands on the axes of all grids, such as ``language.tp``; at 0 on a grid that it is not on."""

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

    No two streams of a run share a seed: those of modules run downwards from the run's first, with the ``base`` of all
    modules first, so that these depend on pipeline sizes alone.
    """
    axes = settings.axes
    streams = {
        f"{name}.{stream}": tuple(f"{name}.{axis}" for axis in axes[stream]) for stream in axes for name in grids
    }
    numbers, first = positions(streams, _Places(grids)), first_seed(settings.seed)
    seeds = {name: {stream: (first - 1 - numbers[f"{name}.{stream}"]) % NUM_SEEDS for stream in axes} for name in grids}
    if settings.derivation == "megatron":
        for name, grid in grids.here.items():
            seeds[name] |= megatron_seeds(settings.seed, grid, settings.data_parallel_random_init)
    return seeds


def open_module_rngs(settings: RngSettings, grids: Grids, device: torch.device) -> Mapping[str, RandomStreams]:
    """Make the streams of the modules of this rank; the global generators are left as they are.

    ``base`` is a stream too: make a module's weights, and run it, within ``rngs["vision"].fork("base")``, and modules
    on the same ranks leave each other's numbers alone.
    """
    seeds = module_seeds(settings, grids)
    return {name: RandomStreams(seeds[name], device) for name in grids.here}
