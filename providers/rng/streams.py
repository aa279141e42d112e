"""Random streams: named generators of one rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from runtime_di.errors import Problem, ServiceError
from runtime_di.providers.rng.global_state import global_generators

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger(__name__)


class RandomStreams:
    """Random streams of one rank, each with a generator of its own on the rank's device.

    Drawing from a stream does not advance the others. Only one thread may draw at a time.

    Attributes:
        seeds: stream to its initial seed.
    """

    seeds: dict[str, int]

    def __init__(self, seeds: Mapping[str, int], device: torch.device, without: str | None = None) -> None:
        """Create a generator for each seed, except for the stream ``without``, which the global generators run."""
        import torch

        self.seeds = dict(seeds)
        self._globals = global_generators(device)
        self._default = [*self._globals.values()][-1]
        self._streams = {
            stream: torch.Generator(device).manual_seed(seed) for stream, seed in seeds.items() if stream != without
        }
        self._running: list[str] = []

    @property
    def base_seed(self) -> int:
        """Seed of replicated parts; differs by stage, and by data-parallel rank with ``data_parallel_random_init``."""
        return self.seeds["base"]

    @property
    def model_parallel_seed(self) -> int:
        """Seed of the parts that tensor-parallel ranks shard."""
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
            problem = Problem(f"stream '{stream}'", f"not one of {known}", fix="declare it in rng.streams")
            raise ServiceError("No such random stream:", [problem])
        return self._streams[stream]

    @contextmanager
    def fork(self, stream: str) -> Iterator[None]:
        """Run torch's global generator of the rank's device on a stream within the body, then restore it.

        Within the body the stream's own `generator` does not advance.

        Raises:
            ServiceError: there is no such stream, or it is already forked.
        """
        own = self.generator(stream)
        if stream in self._running:
            problem = Problem(f"stream '{stream}'", "is already forked", fix="fork another stream within it, or none")
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

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every stream, as plain values and byte tensors, which differ between ranks.

        Each state has its seed beside it: in another parallel layout, a rank loads the streams whose seeds are equal.
        """
        return {
            "streams": {
                stream: {"seed": self.seeds[stream], "state": generator.get_state()}
                for stream, generator in self._streams.items()
            }
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of every stream.

        A stream whose seed differs, as at another place of another grid, keeps its current state, and the log names it.

        Raises:
            ServiceError: the state is of other streams, or of another device type; nothing was changed.
        """
        if problems := list(self._mismatches(state["streams"])):
            raise ServiceError("The random state does not fit this run:", problems)
        others = self._of_other_seeds(state)
        for stream, saved in state["streams"].items():
            if stream not in others:
                self._streams[stream].set_state(saved["state"])
        if others:
            _LOG.warning("random streams not loaded, because their saved state has other seeds: %s", ", ".join(others))

    def _of_other_seeds(self, state: Mapping[str, Any]) -> list[str]:
        return [stream for stream, saved in state["streams"].items() if saved["seed"] != self.seeds[stream]]

    def _mismatches(self, streams: Mapping[str, Mapping[str, Any]]) -> Iterator[Problem]:
        for stream, saved in streams.items():
            if stream not in self._streams:
                yield Problem(f"stream '{stream}'", "is not a stream of this run", fix="declare it in rng.streams")
            elif saved["state"].shape != self._streams[stream].get_state().shape:
                fix = "start from new seeds: leave the random state out of what is loaded"
                yield Problem(f"stream '{stream}'", "was saved on another device type", fix=fix)
