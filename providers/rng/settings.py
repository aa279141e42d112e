"""Settings of random numbers: the seed, the derivation of stream seeds, and a program's own streams."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from runtime_di.providers.rng.seeds import STREAMS, Axis, Coordinates, hashed_seeds, megatron_seeds
from runtime_di.settings.section import Section


class StreamSettings(Section):
    """A random stream that the program adds."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    """Name by which the program requests the stream."""
    axes: tuple[Axis, ...] = ()
    """Axes along which ranks draw different numbers; without axes, all ranks draw the same numbers."""


class RngSettings(Section):
    """How every source of random numbers is seeded."""

    seed: Annotated[int, Field(gt=0, lt=1 << 31)] = 1234
    """Seed of the run, from which all seeds of all ranks are derived."""
    derivation: Literal["hashed", "megatron"] = "hashed"
    """``hashed`` gives all streams distinct seeds; ``megatron`` gives Megatron-LM's seeds, to reproduce its runs."""
    data_parallel_random_init: bool = False
    """Whether data-parallel ranks differ in every stream, and so start from different weights."""
    deterministic: bool = False
    """Whether torch uses deterministic algorithms only; it raises for operations that have none."""
    streams: tuple[StreamSettings, ...] = ()
    """Streams beside the built-in ones; append new ones at the end, so that the seeds of the others do not change."""

    @model_validator(mode="after")
    def _stream_names_are_unique(self) -> Self:
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
