"""The state of the global generators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor

from runtime_di.providers.rng.service import Rng, open_rng
from runtime_di.providers.rng.settings import RngSettings
from tests.support.random_draws import ALONE, CPU, draw, draw_halves, flags, opened, seed_by_hand


@pytest.fixture
def torch_flags() -> Iterator[None]:
    """Restore torch's flags after a test that sets them."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = inductor.deterministic = False


@pytest.mark.usefixtures("torch_flags")
@pytest.mark.parametrize("failure", [None, ValueError("body")])
@pytest.mark.parametrize("before", [(False, False, True), (True, True, False)])
def test_close_restores_every_source_and_flag(before: tuple[bool, bool, bool], failure: Exception | None) -> None:
    """After close, the next numbers and the flags are those of before the opening, whether the body failed or not."""
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


def numbers(rng: Rng) -> list[Any]:
    streams = [
        float(torch.rand((), generator=rng.generator(stream))) for stream in ("model_parallel", "expert", "data")
    ]
    return [*draw(), *draw_halves(), *streams]


def test_state_goes_through_a_checkpoint(tmp_path: Any) -> None:
    """A state that was saved and loaded with ``weights_only`` restores every source: the next numbers are equal."""
    with opened(RngSettings(), ALONE, CPU) as rng:
        numbers(rng)
        torch.save(rng.state_dict(), tmp_path / "rng.pt")
        expected = numbers(rng)
    with opened(RngSettings(), ALONE, CPU) as rng:
        rng.load_state_dict(torch.load(tmp_path / "rng.pt", weights_only=True))
        restored = numbers(rng)

    assert restored == expected


def test_state_is_saved_per_rank() -> None:
    """A state contains plain values and byte tensors only, which a checkpoint saves for each rank."""

    def leaves(value: Any) -> set[Any]:
        if isinstance(value, Mapping):
            return set().union(*map(leaves, value.values()))
        if isinstance(value, list | tuple):
            return set().union(*map(leaves, value))
        return {value.dtype if isinstance(value, torch.Tensor) else type(value)}

    with opened(RngSettings(), ALONE, CPU) as rng:
        state = rng.state_dict()

    assert leaves(state) == {int, float, str, type(None), torch.uint8}
