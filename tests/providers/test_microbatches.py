"""Micro batches of a global batch."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from runtime_di.errors import SettingsError
from runtime_di.providers.microbatches import BatchPlan, BatchSettings, MicrobatchCalculator, open_microbatches


def calculator(data_parallel: int = 1, **settings: Any) -> MicrobatchCalculator:
    return open_microbatches(BatchSettings.model_validate(settings), data_parallel)


def problem_texts(data_parallel: int, **settings: Any) -> str:
    return "\n".join(str(problem) for problem in BatchSettings.model_validate(settings).problems(data_parallel))


def test_global_batch_is_divided_evenly() -> None:
    """A global batch is divided into micro batches for every data-parallel rank."""
    microbatches = calculator(2, global_size=32, micro_size=4)

    assert microbatches.at(0) == microbatches.at(10**9) == BatchPlan(32, 4, 4)


def test_global_size_defaults_to_one_micro_batch_a_rank() -> None:
    """Without a global size every data-parallel rank runs one micro batch a step."""
    assert calculator(8, micro_size=4).at(0) == BatchPlan(32, 4, 1)


def test_uneven_global_size_names_the_nearest_that_work() -> None:
    """The error for a size that cannot be divided evenly names its factors and the nearest sizes that can."""
    problems = problem_texts(2, global_size=10, micro_size=4)

    assert problems == (
        "batch.global_size: global batch size 10 is not divisible by micro batch size 4 x data-parallel size 2\n"
        "  fix: use 8 or 16, or another micro batch size"
    )


def test_open_refuses_uneven_sizes() -> None:
    """Opening refuses sizes that cannot be divided evenly, and the error names each of them."""
    with pytest.raises(SettingsError, match="increment 3 is not") as error:
        calculator(2, global_size=8, micro_size=1, ramp_up={"start": 5, "increment": 3, "samples": 10})

    assert [problem.where for problem in error.value.problems] == ["batch.ramp_up.start", "batch.ramp_up.increment"]


def test_decrease_rounds_down() -> None:
    """With decrease_if_needed a global batch shrinks to the largest size that can be divided evenly."""
    assert calculator(2, global_size=15, micro_size=4, decrease_if_needed=True).at(0) == BatchPlan(8, 4, 1)


def test_decrease_to_nothing_is_refused() -> None:
    """With decrease_if_needed a global batch must still have one micro batch a rank."""
    problems = problem_texts(2, global_size=7, micro_size=4, decrease_if_needed=True)

    assert problems == (
        "batch.global_size: global batch size 7 is smaller than micro batch size 4 x data-parallel size 2\n"
        "  fix: use 8, or another micro batch size"
    )


def test_ramp_up_grows_in_equal_steps() -> None:
    """A ramp-up adds its increment after equal shares of its samples, even if these are not whole numbers."""
    microbatches = calculator(2, global_size=16, micro_size=2, ramp_up={"start": 4, "increment": 4, "samples": 100})

    sizes = {consumed: microbatches.at(consumed).global_size for consumed in (0, 33, 34, 66, 67, 99, 100, 101)}

    assert sizes == {0: 4, 33: 4, 34: 8, 66: 8, 67: 12, 99: 12, 100: 16, 101: 16}


def test_schedule_uses_each_size_until_its_end() -> None:
    """A schedule uses each size until its samples are consumed, and the global size from then on."""
    schedule = [{"until": 64, "global_size": 16}, {"until": 96, "global_size": 8}]
    microbatches = calculator(4, global_size=32, schedule=schedule)

    plans = [microbatches.at(consumed) for consumed in (0, 63, 64, 95, 96)]

    assert [plan.global_size for plan in plans] == [16, 16, 8, 8, 32]
    assert [plan.num_microbatches for plan in plans] == [4, 4, 2, 2, 8]


def test_every_size_of_a_schedule_is_checked() -> None:
    """An uneven size within a schedule is reported before the run starts."""
    problems = problem_texts(
        4, global_size=8, schedule=[{"until": 9, "global_size": 4}, {"until": 12, "global_size": 6}]
    )

    assert problems.startswith("batch.schedule.1.global_size: global batch size 6 is not divisible by")


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        (
            {"decrease_if_needed": True, "schedule": [{"until": 1, "global_size": 1}]},
            "decrease_if_needed cannot be used with a schedule",
        ),
        (
            {
                "ramp_up": {"start": 1, "increment": 1, "samples": 1},
                "schedule": [{"until": 1, "global_size": 1}],
            },
            "ramp_up and schedule exclude each other",
        ),
        ({"global_size": None, "schedule": [{"until": 1, "global_size": 1}]}, "set it too"),
        ({"ramp_up": {"start": 8, "increment": 1, "samples": 1}}, r"ramp_up\.start 8 must be below global_size 8"),
        ({"ramp_up": {"start": 1, "increment": 2, "samples": 1}}, "increment 2 must divide the growth of 7 samples"),
        (
            {"schedule": [{"until": 5, "global_size": 1}, {"until": 5, "global_size": 2}]},
            "in ascending order of until, but 5 follows 5",
        ),
        ({"micro_size": 0}, "greater than 0"),
    ],
)
def test_contradictions_are_refused(settings: dict[str, Any], rule: str) -> None:
    """Settings that contradict each other are refused when they are created, with the rule."""
    with pytest.raises(ValidationError, match=rule):
        BatchSettings.model_validate({"global_size": 8, **settings})


@given(
    ranks_and_micro_size=st.tuples(st.integers(1, 64), st.integers(1, 16)),
    start=st.integers(1, 8),
    num_increments=st.integers(1, 50),
    samples=st.integers(1, 10_000),
    consumed=st.integers(0, 20_000),
)
def test_ramp_up_follows_its_formula(
    ranks_and_micro_size: tuple[int, int], start: int, num_increments: int, samples: int, consumed: int
) -> None:
    """At every count the size is start + floor(consumed / (samples / increments)) * increment, evenly divided."""
    data_parallel, micro_size = ranks_and_micro_size
    unit = data_parallel * micro_size
    ramp_up = {"start": start * unit, "increment": unit, "samples": samples}
    microbatches = calculator(
        data_parallel, global_size=(start + num_increments) * unit, micro_size=micro_size, ramp_up=ramp_up
    )

    plan = microbatches.at(consumed)

    assert plan.num_microbatches == start + min(num_increments, consumed * num_increments // samples)
    assert plan.global_size == plan.num_microbatches * unit
