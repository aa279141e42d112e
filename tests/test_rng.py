"""Random numbers of a rank, and the seeds that they start from."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch._inductor import config as inductor

from runtime_di.containers import TrainingRuntime, TrainingSettings
from runtime_di.errors import ServiceError
from runtime_di.providers.determinism import CUBLAS_VARIABLE, deterministic_algorithms
from runtime_di.providers.process_groups import ProcessGroups, RankGrid
from runtime_di.providers.rng import Rng, RngSettings, StreamSettings, open_rng
from runtime_di.providers.rng_seeds import STREAMS, hashed_seeds
from runtime_di.testing.ranks import run_ranks

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
    """Draw one of the pair of normal numbers that Python and numpy make at once, and leave the other."""
    return random.gauss(0, 1), float(np.random.standard_normal())


def seed_by_hand(seed: int) -> None:
    """Seed the global generators as a program without us would."""
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
def test_seeds_collide_on_no_grid(grid: RankGrid, seed: int, dp_init: bool) -> None:
    """Two streams share no seed on any ranks; two ranks share a stream's seed exactly if its axes say so (B13, B50)."""
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


def test_torch_tells_seeds_apart_by_32_bits() -> None:
    """Seeds that differ above 32 bits only are the same to torch's CPU generator: 64 bits would keep nothing apart."""
    generator = torch.Generator()

    low, high = (torch.rand(4, generator=generator.manual_seed(seed)) for seed in (7, 7 + (1 << 32)))

    assert torch.equal(low, high)


def test_hashed_seeds_stay_what_they_are() -> None:
    """A run can be repeated with a later version: the derivation gives these numbers for good."""
    seeds = seeds_of(RankGrid(world_size=8, tp=2, pp=2), RngSettings())

    assert seeds[0] == {"base": 1706752825, "model_parallel": 1706752827, "expert": 1706752831, "data": 1706752835}
    assert seeds[5] == {"base": 1706752826, "model_parallel": 1706752830, "expert": 1706752834, "data": 1706752835}


def test_added_streams_leave_the_others_alone() -> None:
    """Declaring one more stream changes no seed of those that were there."""
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
    """The megatron derivation gives Megatron-LM's seeds, equal ones on rank 70 of tp8 etp2 ep18 included."""
    settings = RngSettings(derivation="megatron", data_parallel_random_init=dp_init)

    seeds = settings.seeds(ProcessGroups.pretend(grid, rank))

    assert {stream: seeds[stream] for stream in expected} == expected


@pytest.mark.parametrize("derivation", ["hashed", "megatron"])
def test_no_rank_fails_where_megatron_does(derivation: str) -> None:
    """On tp8 etp2 ep18, where Megatron stops rank 70 of 72 because two seeds are equal, every rank starts."""
    grid = RankGrid(world_size=72, tp=8, ep=18, etp=2)
    settings = RngSettings.model_validate({"derivation": derivation})

    for rank in range(grid.world_size):
        with opened(settings, ProcessGroups.pretend(grid, rank), CPU) as rng:
            seeds = (rng.model_parallel_seed, rng.expert_seed)
            states = [rng.generator(stream).initial_seed() for stream in ("model_parallel", "expert")]

        assert states == list(seeds)
        assert (seeds[0] == seeds[1]) == (derivation == "megatron" and rank >= 70)


def test_too_many_seeds_are_told() -> None:
    """Streams that need more seeds than there are, are an error, not a collision."""

    class Huge:
        def index(self, _: str, /) -> int:
            return 0

        def size(self, _: str, /) -> int:
            return 1 << 17

    with pytest.raises(ServiceError) as error:
        hashed_seeds(1, {"base": ("pp",), "own": ("tp", "dp")}, Huge())

    assert str(error.value) == (
        "The random streams cannot be kept apart:\n"
        "  rng.streams: need 17180000256 seeds of 4294967296\n"
        "    fix: let streams differ along fewer axes"
    )


@pytest.mark.parametrize("derivation", ["hashed", "megatron"])
def test_every_source_is_seeded(derivation: str) -> None:
    """Python, numpy and torch draw the same in every run with the same seed, and other numbers with another (B51)."""
    drawn = []

    for seed in (1, 1, 2):
        settings = RngSettings.model_validate({"seed": seed, "derivation": derivation})
        with opened(settings, ALONE, CPU) as rng:
            drawn.append((*draw(), float(torch.rand((), generator=rng.generator("data")))))

    assert drawn[0] == drawn[1]
    assert not {*drawn[0]} & {*drawn[2]}


def test_megatron_seeds_reach_every_source_unchanged() -> None:
    """In the megatron derivation, the global generators start as plain seeding with the sum would start them."""
    seed_by_hand(1234)
    expected = draw()

    with opened(RngSettings(derivation="megatron"), ALONE, CPU):
        drawn = draw()

    assert drawn == expected


def test_stages_draw_other_numbers_and_replicas_the_same() -> None:
    """Pipeline stages start from other weights; data-parallel replicas from the same, but sample apart (B13, B50)."""
    grid = RankGrid(world_size=4, pp=2)
    drawn = []

    for rank in range(4):
        with opened(RngSettings(), ProcessGroups.pretend(grid, rank), CPU) as rng:
            drawn.append((float(torch.rand(())), float(torch.rand((), generator=rng.generator("data")))))

    (first, sample_0), (first_replica, sample_1), (last, _), (last_replica, _) = drawn
    assert (first, last) == (first_replica, last_replica)
    assert first != last
    assert sample_0 != sample_1


@pytest.fixture
def torch_flags() -> Iterator[None]:
    """Put torch's flags back after a test that sets them by hand."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = inductor.deterministic = False


@pytest.mark.usefixtures("torch_flags")
@pytest.mark.parametrize("failure", [None, ValueError("body")])
@pytest.mark.parametrize("before", [(False, False, True), (True, True, False)])
def test_close_restores_every_source_and_flag(before: tuple[bool, bool, bool], failure: Exception | None) -> None:
    """After close, as if nothing had been: the next numbers and the flags are those of before, failed or not."""
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    torch.backends.cudnn.benchmark = inductor.deterministic = before[2]
    seed_by_hand(5)
    expected = [(draw(), draw_halves()) for _ in range(2)]
    seed_by_hand(5)
    drawn = [(draw(), draw_halves())]

    opening = open_rng(RngSettings(deterministic=True), ALONE, CPU)
    next(opening)
    during = flags()
    draw()
    with pytest.raises(StopIteration):
        opening.send(failure)  # type: ignore[attr-defined]
    drawn.append((draw(), draw_halves()))

    assert during[:4] == (True, False, False, True)
    assert flags()[:4] == (*before, before[2])
    assert drawn == expected


def test_failed_opening_restores_every_source() -> None:
    """When opening fails halfway, what was changed by then is put back."""
    before, state = flags(), torch.get_rng_state()

    class Broken:
        def index(self, _: str, /) -> int:
            raise ServiceError("no groups")

    with pytest.raises(ServiceError, match="no groups"):
        next(open_rng(RngSettings(deterministic=True), Broken(), CPU))  # type: ignore[arg-type]

    assert flags() == before
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("given", "during"), [(None, ":4096:8"), (":16:8", ":16:8")])
def test_cublas_is_told_on_cuda(monkeypatch: pytest.MonkeyPatch, given: str | None, during: str) -> None:
    """On CUDA the variable that cuBLAS needs is set for a while, unless the user gave one."""
    monkeypatch.delenv(CUBLAS_VARIABLE, raising=False)
    if given is not None:
        monkeypatch.setenv(CUBLAS_VARIABLE, given)

    with deterministic_algorithms(torch.device("cuda")):
        told = os.environ[CUBLAS_VARIABLE]

    assert (told, os.environ.get(CUBLAS_VARIABLE)) == (during, given)


def test_every_grid_gets_the_same_settings() -> None:
    """A module with a grid of its own is seeded by the same settings as the whole world (B12)."""
    settings = RngSettings(deterministic=True, derivation="megatron", data_parallel_random_init=True)
    module = ProcessGroups.pretend(RankGrid(world_size=4, tp=2, offset=4), 6)

    with opened(settings, ALONE, CPU) as world:
        whole = (flags(), set(world.seeds))
        with opened(settings, module, CPU) as own:
            part = (flags(), set(own.seeds))
            seeds = own.seeds

    assert part == whole
    assert (seeds["base"], seeds["model_parallel"]) == (1244, 3962)


def test_generator_is_the_same_each_time() -> None:
    """A stream has one generator, which goes on where it was, whatever the others draw."""
    with opened(RngSettings(streams=(StreamSettings(name="augment"),)), ALONE, CPU) as rng:
        expected = torch.rand(4, generator=torch.Generator().manual_seed(rng.seeds["augment"]))
        first = torch.rand(2, generator=rng.generator("augment"))
        torch.rand(3), torch.rand(3, generator=rng.generator("data"))
        second = torch.rand(2, generator=rng.generator("augment"))

    assert torch.equal(torch.cat([first, second]), expected)


def test_fork_runs_on_a_stream_and_comes_back() -> None:
    """Within a fork the global generator runs on the stream; after it, either goes on where it was."""
    with opened(RngSettings(), ALONE, CPU) as rng:
        base = torch.rand(4, generator=torch.Generator().manual_seed(rng.base_seed))
        stream = torch.rand(4, generator=torch.Generator().manual_seed(rng.model_parallel_seed))
        drawn = [torch.rand(2)]
        with rng.fork("model_parallel"):
            forked = [torch.rand(2)]
        drawn.append(torch.rand(1))
        with pytest.raises(ValueError, match="body"), rng.fork("model_parallel"):
            forked.append(fail_after_drawing())
        drawn.append(torch.rand(1))
        forked.append(torch.rand(1, generator=rng.generator("model_parallel")))

    assert torch.equal(torch.cat(drawn), base)
    assert torch.equal(torch.cat(forked), stream[[0, 1, 3]])


def fail_after_drawing() -> torch.Tensor:
    torch.rand(1)
    raise ValueError("body")


def test_forks_of_other_streams_nest() -> None:
    """Forks nest, except of a stream within itself, which would draw numbers twice."""
    with opened(RngSettings(), ALONE, CPU) as rng, rng.fork("model_parallel"):
        with rng.fork("expert"):
            expert = torch.rand(1)
        with pytest.raises(ServiceError) as error, rng.fork("model_parallel"):
            pass
        model = torch.rand(1)

        assert torch.equal(expert, torch.rand(1, generator=torch.Generator().manual_seed(rng.expert_seed)))
        assert torch.equal(model, torch.rand(1, generator=torch.Generator().manual_seed(rng.model_parallel_seed)))
    assert str(error.value) == (
        "A random stream cannot be forked within itself:\n"
        "  stream 'model_parallel': runs already\n"
        "    fix: fork another stream within it, or none"
    )


def test_unknown_stream_is_told() -> None:
    """Asking for a stream that was not declared names those that were."""
    with opened(RngSettings(), ALONE, CPU) as rng, pytest.raises(ServiceError) as error:
        rng.generator("dropout")

    assert str(error.value) == (
        "No such random stream:\n"
        "  stream 'dropout': is none of model_parallel, expert, data\n"
        "    fix: declare it in rng.streams"
    )


def numbers(rng: Rng) -> list[Any]:
    streams = [
        float(torch.rand((), generator=rng.generator(stream))) for stream in ("model_parallel", "expert", "data")
    ]
    return [*draw(), *draw_halves(), *streams]


def test_state_goes_through_a_checkpoint(tmp_path: Any) -> None:
    """A state, saved with weights only, brings every source back to the same next numbers."""
    with opened(RngSettings(), ALONE, CPU) as rng:
        numbers(rng)
        torch.save(rng.state_dict(), tmp_path / "rng.pt")
        expected = numbers(rng)
    with opened(RngSettings(), ALONE, CPU) as rng:
        rng.load_state_dict(torch.load(tmp_path / "rng.pt", weights_only=True))
        restored = numbers(rng)

    assert restored == expected


def test_state_is_each_rank_s_own() -> None:
    """A state holds plain values and byte tensors only, which a checkpoint keeps for each rank."""

    def leaves(value: Any) -> set[Any]:
        if isinstance(value, Mapping):
            return set().union(*map(leaves, value.values()))
        if isinstance(value, list | tuple):
            return set().union(*map(leaves, value))
        return {value.dtype if isinstance(value, torch.Tensor) else type(value)}

    with opened(RngSettings(), ALONE, CPU) as rng:
        state = rng.state_dict()

    assert leaves(state) == {int, float, str, type(None), torch.uint8}


def go_on_tensor_parallel(folder: Path) -> tuple[float, float]:
    """Save as two replicas, and go on with a layer shared between them; the next numbers saved, and those drawn."""
    flags = ["--checkpoint.folder", str(folder), "--log.level", "ERROR"]
    with TrainingRuntime.open(TrainingSettings.load(flags)) as runtime:
        torch.rand(3, generator=runtime.rng.generator("model_parallel"))
        runtime.checkpointer.save({"rng": runtime.rng}, 1)
        saved = float(torch.rand((), generator=runtime.rng.generator("model_parallel")))
    with TrainingRuntime.open(TrainingSettings.load([*flags, "--parallel.tensor", "2"])) as runtime:
        runtime.checkpointer.load({"rng": runtime.rng})
        return saved, float(torch.rand((), generator=runtime.rng.generator("model_parallel")))


def test_streams_stay_apart_in_another_layout(tmp_path: Path) -> None:
    """Ranks that had one stream alike, and shall not now, go on with it only where it is theirs by its seed."""
    (saved, first), (_, second) = run_ranks(go_on_tensor_parallel, 2, tmp_path)

    assert first == saved
    assert second != saved


def test_state_without_a_stream_leaves_it_where_it_is() -> None:
    """A stream that was declared after the state was saved goes on from its own seed."""
    with opened(RngSettings(), ALONE, CPU) as rng:
        state = rng.state_dict()

    with opened(RngSettings(streams=(StreamSettings(name="augment"),)), ALONE, CPU) as rng:
        rng.load_state_dict(state)

        assert rng.generator("augment").initial_seed() == rng.seeds["augment"]


def test_state_that_does_not_fit_changes_nothing() -> None:
    """A state of other streams, or of another kind of device, is refused with every misfit before any is loaded."""
    with opened(RngSettings(), ALONE, CPU) as rng:
        state = rng.state_dict()
        other = {"seed": 1, "state": torch.zeros(16, dtype=torch.uint8)}
        streams = {**state["streams"], "gone": state["streams"]["data"], "data": other}
        draw()
        before = rng.state_dict()

        with pytest.raises(ServiceError) as error:
            rng.load_state_dict({**state, "streams": streams})
        after = rng.state_dict()

    assert str(error.value) == (
        "The random state does not fit this run:\n"
        "  stream 'data': was saved on another kind of device\n"
        "    fix: start from new seeds: leave the random state out of what is loaded\n"
        "  stream 'gone': is no stream of this run\n"
        "    fix: declare it in rng.streams"
    )
    assert (after["python"], after["numpy"]) == (before["python"], before["numpy"])
    assert torch.equal(after["torch"]["cpu"], before["torch"]["cpu"])


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"seed": 0}, "greater than 0"),
        ({"seed": 1 << 31}, "less than 2147483648"),
        ({"streams": [{"name": "data"}]}, r"stream names must differ .*; rename \['data'\]"),
        ({"streams": [{"name": "a"}, {"name": "a"}]}, r"rename \['a'\]"),
        ({"streams": [{"name": "a", "axes": ["xp"]}]}, "axes"),
    ],
)
def test_seeds_and_streams_are_checked(values: dict[str, Any], rule: str) -> None:
    """A seed that some source cannot take, and a stream of a taken name, are refused when the settings are made."""
    with pytest.raises(ValidationError, match=rule):
        RngSettings.model_validate(values)


def test_streams_of_another_place_keep_their_own_seeds(caplog: pytest.LogCaptureFixture) -> None:
    """Loaded on another place of another grid, streams with the same seed go on, others start anew and are logged."""
    with opened(RngSettings(), ALONE, CPU) as rng:
        torch.rand(3)
        torch.rand(3, generator=rng.generator("data"))
        state = rng.state_dict()
        following = torch.rand(1)

    second = ProcessGroups.pretend(RankGrid(world_size=2), rank=1)
    with opened(RngSettings(), second, CPU) as rng:
        fresh = rng.generator("data").get_state()
        rng.load_state_dict(state)

        assert torch.equal(torch.rand(1), following)
        assert torch.equal(rng.generator("data").get_state(), fresh)
    assert caplog.messages == ["random streams not loaded, since their state is of other seeds: data"]


def test_streams_of_another_seed_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A state of a run with another seed brings back neither streams nor global generators, and is logged."""
    with opened(RngSettings(seed=1), ALONE, CPU) as rng:
        state = rng.state_dict()

    with opened(RngSettings(seed=2), ALONE, CPU) as rng:
        before = torch.get_rng_state()
        rng.load_state_dict(state)

        assert torch.equal(torch.get_rng_state(), before)
    (told,) = caplog.messages
    assert told.endswith(f": {', '.join(['base', *state['streams']])}")
