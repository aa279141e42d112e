"""Seeds of a rank's random streams, computed from its place on the grid."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Literal, Protocol, TypeAlias, TypeVar

from runtime_di.errors import Problem, ServiceError

Axis: TypeAlias = Literal["tp", "cp", "dp", "pp", "ep", "etp"]
AxisT_contra = TypeVar("AxisT_contra", bound=str, contravariant=True)

STREAMS: Mapping[str, tuple[Axis, ...]] = {
    "base": ("pp",),
    "model_parallel": ("pp", "tp"),
    "expert": ("pp", "ep", "etp"),
    "data": ("dp",),
}
"""Axes along which each stream differs; ranks that differ along other axes only draw the same numbers.

``base`` seeds the global generators, for weights and dropout that tensor-parallel ranks replicate. ``model_parallel``
is for those that they shard, ``expert`` for expert weights, ``data`` for sampling and shuffling.
"""

NUM_SEEDS = 1 << 32
"""Number of distinct seeds: the CPU generators of torch and numpy use only 32 bits of a seed."""


class Coordinates(Protocol[AxisT_contra]):
    """A rank's index on each axis and the size of the axis, as `ProcessGroups` provides them."""

    def index(self, kind: AxisT_contra, /) -> int: ...

    def size(self, kind: AxisT_contra, /) -> int: ...


def hashed_seeds(seed: int, streams: Mapping[str, tuple[Axis, ...]], place: Coordinates[Axis]) -> dict[str, int]:
    """Derive one seed a stream: no two streams share a seed, and ranks share a stream's seed only if its axes allow it.

    Each stream has a range of numbers as long as the product of its axes' sizes, and the ranges follow each other. A
    rank's number within a range is its coordinates read as a mixed-radix number, the first axis fastest. The number is
    added, modulo 2^32, to a 32-bit BLAKE2b hash of the run's seed, so that runs with neighbouring seeds share hardly
    any of them.

    Raises:
        ServiceError: the streams need more than 2^32 seeds.
    """
    first = first_seed(seed)
    return {stream: (first + number) % NUM_SEEDS for stream, number in positions(streams, place).items()}


def first_seed(seed: int) -> int:
    """Hash a run's seed to the first seed of its streams."""
    return int.from_bytes(blake2b(str(seed).encode(), digest_size=4).digest(), "big")


def positions(streams: Mapping[str, tuple[AxisT_contra, ...]], place: Coordinates[AxisT_contra]) -> dict[str, int]:
    """Number the seeds of all streams on all ranks, and return the numbers of the rank at ``place``."""
    found, start = {}, 0
    for stream, axes in streams.items():
        position, num_positions = 0, 1
        for axis in axes:
            position += place.index(axis) * num_positions
            num_positions *= place.size(axis)
        found[stream] = start + position
        start += num_positions
    if start > NUM_SEEDS:
        problem = Problem(
            "rng.streams", f"need {start} of {NUM_SEEDS} seeds", fix="let streams differ along fewer axes"
        )
        raise ServiceError("The random streams cannot have distinct seeds:", [problem])
    return found


def megatron_seeds(seed: int, place: Coordinates[Axis], data_parallel_random_init: bool = False) -> dict[str, int]:
    """Compute the seeds that Megatron-LM uses, some of which are equal on large grids."""
    base = seed + 100 * place.index("pp") + (10 * place.index("dp") if data_parallel_random_init else 0)
    return {
        "base": base,
        "model_parallel": base + 2718 + place.index("tp"),
        "expert": base + 1024 + 100 * place.index("ep") + place.index("etp"),
    }
