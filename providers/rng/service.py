"""Opens the random numbers of a rank: seeded global generators and named streams."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from runtime_di.providers.rng.determinism import deterministic_algorithms
from runtime_di.providers.rng.global_state import global_state, preserved_global_state, restore_global_state
from runtime_di.providers.rng.seeds import Axis, Coordinates
from runtime_di.providers.rng.settings import RngSettings
from runtime_di.providers.rng.streams import RandomStreams

if TYPE_CHECKING:
    import torch


class Rng(RandomStreams):
    """The random streams of this rank, and the global generators of Python, numpy and torch.

    The global generators use the seed of ``base``. Every other stream has its own generator on the rank's device, which
    drawing from another does not advance. Only one thread may draw at a time.
    """

    def __init__(self, seeds: Mapping[str, int], device: torch.device) -> None:
        super().__init__(seeds, device, without="base")

    def seed_globals(self) -> None:
        """Seed the global generators with the seed of ``base``."""
        import numpy as np

        random.seed(self.base_seed)
        np.random.seed(self.base_seed)
        for generator in self._globals.values():
            generator.manual_seed(self.base_seed)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every generator, as plain values and byte tensors, which differ between ranks."""
        return {**global_state(self._globals), "base_seed": self.base_seed, **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of every generator; see `RandomStreams.load_state_dict`."""
        super().load_state_dict(state)
        if state["base_seed"] == self.base_seed:
            restore_global_state(state, self._globals)

    def _of_other_seeds(self, state: Mapping[str, Any]) -> list[str]:
        base = [] if state["base_seed"] == self.base_seed else ["base"]
        return base + super()._of_other_seeds(state)


def open_rng(settings: RngSettings, process_groups: Coordinates[Axis], device: torch.device) -> Iterator[Rng]:
    """Seed every source of random numbers by the rank's place, and restore their states on close."""
    with ExitStack() as stack:
        stack.enter_context(preserved_global_state(device))
        if settings.deterministic:
            stack.enter_context(deterministic_algorithms(device))
        rng = Rng(settings.seeds(process_groups), device)
        rng.seed_globals()
        yield rng
