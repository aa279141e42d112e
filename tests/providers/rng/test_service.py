"""Random numbers of a rank, from opening to close."""

from __future__ import annotations

import pytest
import torch

from runtime_di.errors import ServiceError
from runtime_di.providers.process_groups.service import ProcessGroups, RankGrid
from runtime_di.providers.rng.service import open_rng
from runtime_di.providers.rng.settings import RngSettings
from tests.support.random_draws import ALONE, CPU, draw, flags, opened, seed_by_hand


@pytest.mark.parametrize("derivation", ["hashed", "megatron"])
def test_no_rank_fails_where_megatron_does(derivation: str) -> None:
    """On tp8 etp2 ep18, where Megatron aborts rank 70 of 72 because two seeds are equal, every rank starts."""
    grid = RankGrid(world_size=72, tp=8, ep=18, etp=2)
    settings = RngSettings.model_validate({"derivation": derivation})

    for rank in range(grid.world_size):
        with opened(settings, ProcessGroups.pretend(grid, rank), CPU) as rng:
            seeds = (rng.model_parallel_seed, rng.expert_seed)
            states = [rng.generator(stream).initial_seed() for stream in ("model_parallel", "expert")]

        assert states == list(seeds)
        assert (seeds[0] == seeds[1]) == (derivation == "megatron" and rank >= 70)


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
    """In the megatron derivation, the global generators start as if seeded directly with Megatron-LM's seed."""
    seed_by_hand(1234)
    expected = draw()

    with opened(RngSettings(derivation="megatron"), ALONE, CPU):
        drawn = draw()

    assert drawn == expected


def test_stages_draw_different_numbers_and_replicas_equal_ones() -> None:
    """Pipeline stages start from different weights; replicas from equal ones, but sample differently (B13, B50)."""
    grid = RankGrid(world_size=4, pp=2)
    drawn = []

    for rank in range(4):
        with opened(RngSettings(), ProcessGroups.pretend(grid, rank), CPU) as rng:
            drawn.append((float(torch.rand(())), float(torch.rand((), generator=rng.generator("data")))))

    (first, sample_0), (first_replica, sample_1), (last, _), (last_replica, _) = drawn
    assert (first, last) == (first_replica, last_replica)
    assert first != last
    assert sample_0 != sample_1


def test_failed_opening_restores_every_source() -> None:
    """If opening fails halfway, everything changed by then is restored."""
    before, state = flags(), torch.get_rng_state()

    class Broken:
        def index(self, _: str, /) -> int:
            raise ServiceError("no groups")

    with pytest.raises(ServiceError, match="no groups"):
        next(open_rng(RngSettings(deterministic=True), Broken(), CPU))  # type: ignore[arg-type]

    assert flags() == before
    assert torch.equal(torch.get_rng_state(), state)


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
