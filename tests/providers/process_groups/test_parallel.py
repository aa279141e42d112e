"""The parallel sizes as settings."""

from __future__ import annotations

from runtime_di.errors import Problem
from runtime_di.providers.process_groups.parallel import ParallelSettings


def test_problems_name_the_settings() -> None:
    """B18: the problem of a size that does not divide the world names its setting and the sizes that do."""
    problems = list(ParallelSettings(tensor=3).problems(2))

    what = "tensor x pipeline x context = 3 x 1 x 1 = 3 does not divide the world size 2"
    assert problems == [Problem("parallel.tensor", what, fix="choose tensor from 1, 2")]


def test_expert_sizes_have_their_own_rule() -> None:
    """B18: expert sizes that exceed the world are refused though the dense sizes fit it."""
    problems = list(ParallelSettings(tensor=2, expert=4, expert_tensor=4).problems(8))

    what = "expert_tensor x expert x pipeline = 4 x 4 x 1 = 16 does not divide the world size 8"
    assert problems == [Problem("parallel.expert_tensor", what, fix="choose expert_tensor from 1, 2")]


def test_every_kind_of_size_that_fits_has_no_problem() -> None:
    """Sizes that divide the world on both grids form a grid, whose data-parallel size is the world size over theirs."""
    settings = ParallelSettings(tensor=2, pipeline=2, context=2, expert=4, expert_tensor=1)

    assert list(settings.problems(16)) == []
    assert settings.data(16) == settings.grid(16).sizes["dp"] == 2
