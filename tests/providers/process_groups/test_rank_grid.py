"""Rank groups by arithmetic, compared with literal lists and with the properties of every grid."""

from __future__ import annotations

import json
import re
import tracemalloc
from dataclasses import replace
from itertools import combinations
from math import lcm, prod
from pathlib import Path
from random import Random
from typing import Any, get_args

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from runtime_di.errors import ServiceError, SettingsError
from runtime_di.providers.process_groups.rank_grid import KINDS, Kind, RankGrid
from runtime_di.providers.process_groups.sizes import Order, size_problems

EXPECTED: list[dict[str, Any]] = json.loads(Path(__file__).with_name("data").joinpath("rank_groups.json").read_text())
SIZES = st.sampled_from((1, 2, 3, 4))
few = settings(deadline=None, max_examples=40)


@st.composite
def grids(draw: st.DrawFn) -> RankGrid:
    """Any grid of at most a hundred ranks."""
    tp, pp, cp, ep, etp = (draw(SIZES) for _ in range(5))
    order: Order = draw(st.sampled_from(get_args(Order)))
    dense, expert = tp * cp * pp, etp * ep * pp
    assume(order == "tp-cp-ep-dp-pp" or pp == 1 or dense == expert)
    world_size = dense * expert // pp * draw(st.sampled_from((1, 2)))
    assume(world_size <= 100 and world_size % dense == world_size % expert == 0)
    return RankGrid(
        world_size=world_size, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, order=order, offset=draw(st.sampled_from((0, 7)))
    )


@pytest.mark.parametrize("expected", EXPECTED, ids=lambda expected: str(expected["config"]))
def test_groups_are_those_of_the_reference(expected: dict[str, Any]) -> None:
    """Every group of every kind equals the literal lists, in their order."""
    grid = RankGrid(**expected["config"])

    groups = {kind: [list(ranks) for ranks in grid.groups(kind)] for kind in KINDS}

    assert groups == expected["groups"]


@few
@given(grids())
def test_a_rank_is_in_the_group_that_is_listed_for_it(grid: RankGrid) -> None:
    """`group_of` returns the one listed group that contains the rank, or no group."""
    for kind in KINDS:
        listed = {rank: ranks for ranks in grid.groups(kind) for rank in ranks}
        for rank in range(grid.offset + grid.world_size + 1):
            assert grid.group_of(rank, kind) == listed.get(rank, ())


@few
@given(grids())
def test_groups_of_axes_divide_the_grid(grid: RankGrid) -> None:
    """Groups of every kind but the embedding ones contain each rank of the grid once, in ascending order."""
    for kind in KINDS[:-2]:
        groups = grid.groups(kind)

        assert sorted(rank for ranks in groups for rank in ranks) == list(
            range(grid.offset, grid.offset + grid.world_size)
        )
        assert all(list(ranks) == sorted(ranks) for ranks in groups)
        assert len({len(ranks) for ranks in groups}) == 1


@few
@given(grids())
def test_embedding_groups_are_the_ends_of_each_pipeline(grid: RankGrid) -> None:
    """A pipeline group has one embedding group, of its first and last rank, and one position group, of its first."""
    ends = [tuple(sorted({stages[0], stages[-1]})) for stages in grid.groups("pp")]

    assert grid.groups("embedding") == ends
    assert grid.groups("position_embedding") == [ranks[:1] for ranks in ends]


@few
@given(grids(), st.data())
def test_axes_share_one_rank(grid: RankGrid, data: st.DataObject) -> None:
    """Groups of different axes of a grid share only the rank itself, and a joint kind is as large as their product."""
    rank = data.draw(st.integers(grid.offset, grid.offset + grid.world_size - 1))

    grids: tuple[tuple[Kind, ...], ...] = ("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp")
    for axes in grids:
        for axis in axes:
            for other in set(axes) - {axis}:
                assert set(grid.group_of(rank, axis)) & set(grid.group_of(rank, other)) == {rank}
        assert prod(len(grid.group_of(rank, axis)) for axis in axes) == grid.world_size
    assert set(grid.group_of(rank, "tp")) <= set(grid.group_of(rank, "tp_cp")) <= set(grid.group_of(rank, "tp_dp_cp"))


@few
@given(grids(), st.data())
def test_coordinates_are_positions_in_groups(grid: RankGrid, data: st.DataObject) -> None:
    """A rank's coordinate on an axis is its position in its group of that axis."""
    rank = data.draw(st.integers(grid.offset, grid.offset + grid.world_size - 1))

    coordinates = grid.coordinates(rank)

    assert coordinates == {axis: grid.group_of(rank, axis).index(rank) for axis in KINDS if axis in grid.sizes}


@few
@given(grids())
def test_equal_partitions_are_equal_groups(grid: RankGrid) -> None:
    """Two kinds have one partition exactly if each rank's groups, a rank alone where it is in none, are the same."""
    ranks = range(grid.offset, grid.offset + grid.world_size)
    groups = {kind: [grid.group_of(rank, kind) or (rank,) for rank in ranks] for kind in KINDS}

    for kind in KINDS:
        for other in KINDS:
            assert (grid.partition(kind) == grid.partition(other)) == (groups[kind] == groups[other]), (kind, other)


def random_grid(random: Random) -> RankGrid:
    """A grid of at most 64 ranks, of random sizes in either order."""
    while True:
        tp, pp, cp, ep, etp = (random.choice((1, 1, 2, 3, 4)) for _ in range(5))
        order: Order = random.choice(get_args(Order))
        world_size = lcm(tp * cp * pp, etp * ep * pp) * random.choice((1, 2, 3))
        fits = order == "tp-cp-ep-dp-pp" or pp == 1 or tp * cp == etp * ep
        if fits and world_size <= 64:
            return RankGrid(world_size=world_size, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, order=order, offset=world_size)


def test_thousands_of_grids() -> None:
    """On many grids, groups divide the grid, a rank's group contains it, and groups of two axes share it alone."""
    random = Random(0)

    for _ in range(2500):
        grid = random_grid(random)
        ranks = range(grid.offset, grid.offset + grid.world_size)
        rank = random.choice(ranks)
        for kind in KINDS[:-2]:
            assert sorted(member for group in grid.groups(kind) for member in group) == [*ranks], (grid, kind)
            assert rank in grid.group_of(rank, kind), (grid, kind, rank)
        for axes in (("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp"), ("tp", "dp_cp", "pp"), ("tp_cp", "dp")):
            for one, other in combinations(axes, 2):
                assert {*grid.group_of(rank, one)} & {*grid.group_of(rank, other)} == {rank}, (grid, one, other, rank)


def test_one_stage_has_both_embeddings() -> None:
    """The caller's rule is not called where a pipeline has one stage: its rank has both embeddings, in one group."""
    grid = RankGrid(world_size=2, embedding=lambda stages: stages[1:3])

    assert grid.groups("embedding") == [(0,), (1,)]
    assert grid.partition("embedding") == grid.partition("position_embedding")


def test_a_rank_outside_the_grid_is_in_no_group() -> None:
    """A rank in another part of a split world has no group of any kind and no coordinates."""
    grid = RankGrid(world_size=4, tp=2, offset=4)

    assert {grid.group_of(3, kind) for kind in KINDS} == {()}
    assert grid.coordinates(8) == {}
    assert grid.group_of(4, "tp") == (4, 5)


def test_a_rule_chooses_embedding_ranks() -> None:
    """The caller's rule returns the ranks of a pipeline with embeddings, in any order; groups are ascending."""
    grid = RankGrid(world_size=8, pp=4, embedding=lambda stages: (stages[2], stages[0]))

    assert grid.groups("embedding") == [(0, 4), (1, 5)]
    assert grid.group_of(2, "embedding") == ()


def test_a_rule_must_choose_from_the_pipeline() -> None:
    """A rule that returns a rank of another pipeline, or fails, is reported with its result or its error."""
    grid = RankGrid(world_size=4, pp=2, embedding=lambda _: (1,))

    with pytest.raises(
        SettingsError, match=r"the rule returned \[1\], which is not part of the pipeline group \[0, 2\]"
    ):
        grid.group_of(0, "embedding")
    with pytest.raises(SettingsError, match=r"the rule failed for the pipeline group \[0, 2\]: TypeError"):
        replace(grid, embedding=lambda _: None).group_of(0, "embedding")  # type: ignore[arg-type, return-value]


def test_a_million_ranks_are_not_listed() -> None:
    """One rank of a world of a million computes all its groups in memory proportional to them."""
    grid = RankGrid(world_size=2**20, tp=8, pp=16, cp=4, ep=8, etp=1)
    tracemalloc.start()

    sizes = {kind: len(grid.group_of(777_777, kind)) for kind in KINDS if kind != "tp_dp_cp"}
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert sizes["dp_cp"] == 2**20 // 128
    assert most_bytes < 2**22  # a list of a million ranks takes twice that


def test_sizes_that_are_offered_fit() -> None:
    """If a change of one size is a fix, every size that the problem offers forms a grid."""
    random, num_offered = Random(0), 0

    for _ in range(3000):
        sizes: dict[str, Any] = {axis: random.randint(1, 6) for axis in ("tp", "pp", "cp", "ep")}
        sizes["etp"] = random.choice((None, 1, 2, 3))
        order, world_size = random.choice(get_args(Order)), random.choice((6, 8, 12, 24, 48, 96))
        problems = [*size_problems(world_size, sizes, order)]
        found = re.fullmatch(r"choose (\w+) from ([\d, ]+)", (len(problems) == 1 and problems[0].fix) or "")
        for size in map(int, found[2].split(", ")) if found else ():
            num_offered += 1
            RankGrid(world_size=world_size, order=order, **{**sizes, found[1]: size})  # type: ignore[index]

    assert num_offered > 1000


def test_unknown_kinds_and_coordinates_are_refused() -> None:
    """Errors of a misspelt kind, an index outside an axis, and an axis of the other grid list what exists."""
    grid = RankGrid(world_size=8, tp=2, pp=2)

    for ask in (lambda: grid.groups("ddp"), lambda: grid.group_of(0, "ddp")):  # type: ignore[arg-type]
        with pytest.raises(ServiceError, match=r"no kind of group named 'ddp'\n    fix: choose from tp, cp"):
            ask()
    with pytest.raises(SettingsError) as refused:
        grid.rank_at(dp=2, ep=0)
    assert str(refused.value) == (
        "There is no such rank:\n"
        "  dp = 2: is not a coordinate of the dense grid, {'pp': 2, 'dp': 2, 'cp': 1, 'tp': 2}\n"
        "  ep = 0: is not a coordinate of the dense grid, {'pp': 2, 'dp': 2, 'cp': 1, 'tp': 2}"
    )


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (
            {"world_size": 2, "tp": 3},
            "tp = 3: tp x pp x cp = 3 x 1 x 1 = 3 does not divide the world size 2\n    fix: choose tp from 1, 2",
        ),
        (
            {"world_size": 8, "tp": 2, "ep": 8},
            "ep = 8: etp x ep x pp = 2 x 8 x 1 = 16 does not divide the world size 8\n    fix: choose ep from 1, 2, 4",
        ),
        (
            {"world_size": 8, "tp": 3, "pp": 3},
            "tp = 3: tp x pp x cp = 3 x 3 x 1 = 9 does not divide the world size 8\n"
            "    fix: choose sizes whose product divides 8, or a world size that is a multiple of 9",
        ),
        (
            {"world_size": 16, "tp": 2, "pp": 2, "ep": 4, "order": "tp-cp-ep-pp-dp"},
            "order = tp-cp-ep-pp-dp: with pipeline stages and the order tp-cp-ep-pp-dp, etp x ep = 2 x 4 = 8 must "
            "equal tp x cp = 2 x 1 = 2\n    fix: choose the order tp-cp-ep-dp-pp, or sizes with equal products",
        ),
        (
            {"world_size": 4, "tp": 0, "cp": -1},
            "tp = 0: must be at least 1\n  cp = -1: must be at least 1",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, Any], expected: str) -> None:
    """B18: sizes that do not divide the world are refused with their factors and the nearest that do."""
    with pytest.raises(SettingsError) as refused:
        RankGrid(**sizes)

    assert str(refused.value) == "The parallel sizes do not fit the world:\n  " + expected
