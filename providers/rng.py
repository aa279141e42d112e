"""Random numbers: global generators seeded by the rank's place, and streams beside them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from runtime_di.providers.determinism import deterministic_algorithms
from runtime_di.providers.rng_seeds import STREAMS, Axis, Coordinates, hashed_seeds, megatron_seeds
from runtime_di.providers.rng_state import global_state, kept_global_state, restore_global_state
from runtime_di.providers.rng_streams import RandomStreams
from runtime_di.section import Section

if TYPE_CHECKING:
    import torch

    from runtime_di.providers.process_groups import ProcessGroups


class StreamSettings(Section):
    """A random stream of the program's own."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    """Name by which the program asks for it."""
    axes: tuple[Axis, ...] = ()
    """Axes along which ranks draw different numbers; without any, all ranks draw the same."""


class RngSettings(Section):
    """How every source of random numbers is seeded."""

    seed: Annotated[int, Field(gt=0, lt=1 << 31)] = 1234
    """Seed of the run, from which all seeds of all ranks are derived."""
    derivation: Literal["hashed", "megatron"] = "hashed"
    """``hashed`` gives no two streams one seed; ``megatron`` gives Megatron-LM's sums, to reproduce its runs."""
    data_parallel_random_init: bool = False
    """Let data-parallel ranks differ in every stream, and so start from different weights."""
    deterministic: bool = False
    """Use deterministic algorithms only; torch raises where it has none."""
    streams: tuple[StreamSettings, ...] = ()
    """Streams beside the shipped ones; add at the end, to leave the seeds of the others as they are."""

    @model_validator(mode="after")
    def _streams_have_names_of_their_own(self) -> Self:
        names = [*STREAMS, *(stream.name for stream in self.streams)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"stream names must differ from each other and from {', '.join(STREAMS)}; rename {twice}")
        return self

    @property
    def axes(self) -> dict[str, tuple[Axis, ...]]:
        """The axes along which each stream differs between ranks."""
        dp: tuple[Axis, ...] = ("dp",) if self.data_parallel_random_init else ()
        shipped = {name: axes if "dp" in axes else axes + dp for name, axes in STREAMS.items()}
        return {**shipped, **{own.name: own.axes for own in self.streams}}

    def seeds(self, place: Coordinates[Axis]) -> dict[str, int]:
        """Derive the seed of every stream for the rank at ``place``; streams that Megatron lacks are hashed."""
        seeds = hashed_seeds(self.seed, self.axes, place)
        if self.derivation == "megatron":
            seeds |= megatron_seeds(self.seed, place, self.data_parallel_random_init)
        return seeds


class Rng(RandomStreams):
    """The random streams of this rank, and the global generators of Python, numpy and torch.

    The global generators run on the seed of ``base``. Every other stream has a generator of its own on the rank's
    device, which drawing from the others leaves as it is. One thread draws at a time.
    """

    def __init__(self, seeds: Mapping[str, int], device: torch.device) -> None:
        super().__init__(seeds, device, without="base")

    def seed_globals(self) -> None:
        """Start the global generators from the seed of ``base``."""
        import numpy as np

        random.seed(self.base_seed)
        np.random.seed(self.base_seed)
        for generator in self._globals.values():
            generator.manual_seed(self.base_seed)

    def state_dict(self) -> dict[str, Any]:
        """Take the state of every generator, as plain values and byte tensors, which differ between ranks."""
        return {**global_state(self._globals), "base_seed": self.base_seed, **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring the generators back to a state; see `RandomStreams.load_state_dict`."""
        super().load_state_dict(state)
        if state["base_seed"] == self.base_seed:
            restore_global_state(state, self._globals)

    def _of_other_seeds(self, state: Mapping[str, Any]) -> list[str]:
        base = [] if state["base_seed"] == self.base_seed else ["base"]
        return base + super()._of_other_seeds(state)


def open_rng(settings: RngSettings, process_groups: ProcessGroups, device: torch.device) -> Iterator[Rng]:
    """Seed every source of random numbers by the rank's place, and put all back as they were on close."""
    with ExitStack() as stack:
        stack.enter_context(kept_global_state(device))
        if settings.deterministic:
            stack.enter_context(deterministic_algorithms(device))
        rng = Rng(settings.seeds(process_groups), device)
        rng.seed_globals()
        yield rng
