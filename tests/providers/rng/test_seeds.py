"""Seeds of random streams."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime_di.errors import ServiceError
from runtime_di.providers.process_groups.service import ProcessGroups, RankGrid
from runtime_di.providers.rng.seeds import STREAMS, hashed_seeds
from runtime_di.providers.rng.settings import RngSettings, StreamSettings
from tests.support.random_draws import seeds_of


@st.composite
def grids(draw: st.DrawFn) -> RankGrid:
    """Grids of every shape, up to a few hundred ranks."""
    size = st.integers(1, 4)
    tp, cp, pp, dp = draw(size), draw(size), draw(size), draw(size)
    etp = draw(st.sampled_from([n for n in range(1, tp + 1) if tp % n == 0]))
    share = tp * cp * dp // etp
    ep = draw(st.sampled_from([n for n in range(1, share + 1) if share % n == 0]))
    return RankGrid(world_size=tp * cp * pp * dp, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)


@given(grid=grids(), seed=st.integers(1, 2**31 - 1), dp_init=st.booleans())
def test_seeds_are_distinct_on_every_grid(grid: RankGrid, seed: int, dp_init: bool) -> None:
    """No two streams share a seed; two ranks share a stream's seed exactly if its axes say so (B13, B50)."""
    own = StreamSettings(name="augment", axes=("cp", "dp", "tp"))
    settings = RngSettings(seed=seed, data_parallel_random_init=dp_init, streams=(own,))

    seeds = seeds_of(grid, settings)

    places = [grid.coordinates(rank) for rank in range(grid.world_size)]
    for stream, axes in {**STREAMS, "augment": own.axes}.items():
        differ = {*axes, "dp"} if dp_init and stream != "augment" else {*axes}
        stands = [tuple(place[axis] for axis in sorted(differ)) for place in places]
        values = [rank[stream] for rank in seeds]
        assert len({*stands}) == len({*values}) == len({*zip(stands, values, strict=True)})
    used = [{rank[stream] for rank in seeds} for stream in seeds[0]]
    assert all(one.isdisjoint(other) for one, other in itertools.combinations(used, 2))
    assert all(0 <= value < 2**32 for values in used for value in values)


def test_torch_uses_32_bits_of_a_seed() -> None:
    """Seeds that differ above 32 bits only start torch's CPU generator equally, so 64-bit seeds would not help."""
    generator = torch.Generator()

    low, high = (torch.rand(4, generator=generator.manual_seed(seed)) for seed in (7, 7 + (1 << 32)))

    assert torch.equal(low, high)


def test_hashed_seeds_never_change() -> None:
    """A run can be repeated with a later version: the derivation always returns these numbers."""
    seeds = seeds_of(RankGrid(world_size=8, tp=2, pp=2), RngSettings())

    assert seeds[0] == {"base": 1706752825, "model_parallel": 1706752827, "expert": 1706752831, "data": 1706752835}
    assert seeds[5] == {"base": 1706752826, "model_parallel": 1706752830, "expert": 1706752834, "data": 1706752835}


def test_added_stream_changes_no_other_seed() -> None:
    """Declaring one more stream changes no seed of the existing streams."""
    one = StreamSettings(name="augment", axes=("dp",))
    grid = RankGrid(world_size=4, tp=2)

    before = seeds_of(grid, RngSettings(streams=(one,)))
    after = seeds_of(grid, RngSettings(streams=(one, StreamSettings(name="evaluate"))))

    assert [rank.items() < more.items() for rank, more in zip(before, after, strict=True)] == [True] * 4


def test_neighbouring_runs_do_not_share_seeds() -> None:
    """Runs whose seeds differ by 1 share no rank's seed."""
    grid = RankGrid(world_size=64, tp=4, pp=4)

    one, other = ({s for rank in seeds_of(grid, RngSettings(seed=seed)) for s in rank.values()} for seed in (1, 2))

    assert one.isdisjoint(other)


@pytest.mark.parametrize(
    ("grid", "rank", "dp_init", "expected"),
    [
        (RankGrid(world_size=1), 0, False, {"base": 1234, "model_parallel": 3952, "expert": 2258}),
        (RankGrid(world_size=8, tp=2, pp=2), 5, False, {"base": 1334, "model_parallel": 4053, "expert": 2359}),
        (RankGrid(world_size=8, tp=2, pp=2), 7, True, {"base": 1344, "model_parallel": 4063, "expert": 2369}),
        (RankGrid(world_size=8, tp=2, ep=2, etp=1), 3, False, {"base": 1234, "model_parallel": 3953, "expert": 2358}),
        (
            RankGrid(world_size=72, tp=8, ep=18, etp=2),
            70,
            False,
            {"base": 1234, "model_parallel": 3958, "expert": 3958},
        ),
    ],
)
def test_megatron_seeds_are_its_sums(grid: RankGrid, rank: int, dp_init: bool, expected: dict[str, int]) -> None:
    """The megatron derivation returns Megatron-LM's seeds, including the equal ones on rank 70 of tp8 etp2 ep18."""
    settings = RngSettings(derivation="megatron", data_parallel_random_init=dp_init)

    seeds = settings.seeds(ProcessGroups.pretend(grid, rank))

    assert {stream: seeds[stream] for stream in expected} == expected


def test_too_many_seeds_are_refused() -> None:
    """Streams that need more than 2^32 seeds are an error, not a collision."""

    class Huge:
        def index(self, _: str, /) -> int:
            return 0

        def size(self, _: str, /) -> int:
            return 1 << 17

    with pytest.raises(ServiceError) as error:
        hashed_seeds(1, {"base": ("pp",), "own": ("tp", "dp")}, Huge())

    assert str(error.value) == (
        "The random streams cannot have distinct seeds:\n"
        "  rng.streams: need 17180000256 of 4294967296 seeds\n"
        "    fix: let streams differ along fewer axes"
    )
