"""Random numbers: global generators seeded by the rank's place, and streams beside them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from runtime_di.errors import Problem, ServiceError
from runtime_di.providers.determinism import deterministic_algorithms
from runtime_di.providers.rng_seeds import STREAMS, Axis, Coordinates, hashed_seeds, megatron_seeds
from runtime_di.providers.rng_state import global_generators, global_state, kept_global_state, restore_global_state
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

    def seeds(self, place: Coordinates) -> dict[str, int]:
        """Derive the seed of every stream for the rank at ``place``; streams that Megatron lacks are hashed."""
        dp: tuple[Axis, ...] = ("dp",) if self.data_parallel_random_init else ()
        streams = {name: axes if "dp" in axes else axes + dp for name, axes in STREAMS.items()}
        seeds = hashed_seeds(self.seed, {**streams, **{own.name: own.axes for own in self.streams}}, place)
        if self.derivation == "megatron":
            seeds |= megatron_seeds(self.seed, place, self.data_parallel_random_init)
        return seeds


class Rng:
    """The random streams of this rank.

    The global generators of Python, numpy and torch run on the seed of ``base``. Every other stream has a generator
    of its own on the rank's device, which drawing from the others leaves as it is. One thread draws at a time.

    Attributes:
        seeds: stream to the seed that it started from.
    """

    def __init__(self, seeds: Mapping[str, int], device: torch.device) -> None:
        import torch

        self.seeds = dict(seeds)
        self._globals = global_generators(device)
        self._default = [*self._globals.values()][-1]
        self._streams = {
            stream: torch.Generator(device).manual_seed(seed) for stream, seed in seeds.items() if stream != "base"
        }
        self._running: list[str] = []

    @property
    def base_seed(self) -> int:
        """Seed of the global generators; by stage, and by data-parallel rank with ``data_parallel_random_init``."""
        return self.seeds["base"]

    @property
    def model_parallel_seed(self) -> int:
        """Seed of what tensor-parallel ranks shard."""
        return self.seeds["model_parallel"]

    @property
    def expert_seed(self) -> int:
        """Seed of expert weights."""
        return self.seeds["expert"]

    def generator(self, stream: str) -> torch.Generator:
        """Return the generator of a stream, always the same one.

        Raises:
            ServiceError: there is no such stream.
        """
        if stream not in self._streams:
            known = ", ".join(self._streams)
            problem = Problem(f"stream '{stream}'", f"is none of {known}", fix="declare it in rng.streams")
            raise ServiceError("No such random stream:", [problem])
        return self._streams[stream]

    @contextmanager
    def fork(self, stream: str) -> Iterator[None]:
        """Let torch's global generator of the rank's device run on a stream, and then go on where it was.

        Within the body the stream's own `generator` stands still.

        Raises:
            ServiceError: there is no such stream, or it runs already.
        """
        own = self.generator(stream)
        if stream in self._running:
            problem = Problem(f"stream '{stream}'", "runs already", fix="fork another stream within it, or none")
            raise ServiceError("A random stream cannot be forked within itself:", [problem])
        before = self._default.get_state()
        self._default.set_state(own.get_state())
        self._running.append(stream)
        try:
            yield
        finally:
            self._running.remove(stream)
            own.set_state(self._default.get_state())
            self._default.set_state(before)

    def seed_globals(self) -> None:
        """Start the global generators from the seed of ``base``."""
        import numpy as np

        random.seed(self.base_seed)
        np.random.seed(self.base_seed)
        for generator in self._globals.values():
            generator.manual_seed(self.base_seed)

    def state_dict(self) -> dict[str, Any]:
        """Take the state of every generator, as plain values and byte tensors, which differ between ranks."""
        streams = {stream: generator.get_state() for stream, generator in self._streams.items()}
        return {**global_state(self._globals), "streams": streams, "seeds": dict(self.seeds)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring the generators back to a state.

        A stream that started from another seed, as on another place of another grid, stays where it is.

        Raises:
            ServiceError: the state is of other streams, or of another kind of device; nothing was changed.
        """
        if problems := list(self._misfits(state["streams"])):
            raise ServiceError("The random state does not fit this run:", problems)
        same = {stream for stream, seed in self.seeds.items() if state["seeds"].get(stream) == seed}
        if "base" in same:
            restore_global_state(state, self._globals)
        for stream, saved in state["streams"].items():
            if stream in same:
                self._streams[stream].set_state(saved)

    def _misfits(self, streams: Mapping[str, torch.Tensor]) -> Iterator[Problem]:
        for stream, saved in streams.items():
            if stream not in self._streams:
                yield Problem(f"stream '{stream}'", "is no stream of this run", fix="declare it in rng.streams")
            elif saved.shape != self._streams[stream].get_state().shape:
                fix = "start from new seeds: leave the random state out of what is loaded"
                yield Problem(f"stream '{stream}'", "was saved on another kind of device", fix=fix)


def open_rng(settings: RngSettings, process_groups: ProcessGroups, device: torch.device) -> Iterator[Rng]:
    """Seed every source of random numbers by the rank's place, and put all back as they were on close."""
    with ExitStack() as stack:
        stack.enter_context(kept_global_state(device))
        if settings.deterministic:
            stack.enter_context(deterministic_algorithms(device))
        rng = Rng(settings.seeds(process_groups), device)
        rng.seed_globals()
        yield rng
