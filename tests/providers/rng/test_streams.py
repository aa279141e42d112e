"""Named random streams."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime_di.containers import TrainingRuntime, TrainingSettings
from runtime_di.errors import ServiceError
from runtime_di.providers.process_groups.service import ProcessGroups, RankGrid
from runtime_di.providers.rng.settings import RngSettings, StreamSettings
from runtime_di.testing.ranks import run_ranks
from tests.support.random_draws import ALONE, CPU, draw, opened


def test_generator_is_the_same_each_time() -> None:
    """A stream has one generator, which continues from its own state, whatever the others draw."""
    with opened(RngSettings(streams=(StreamSettings(name="augment"),)), ALONE, CPU) as rng:
        expected = torch.rand(4, generator=torch.Generator().manual_seed(rng.seeds["augment"]))
        first = torch.rand(2, generator=rng.generator("augment"))
        torch.rand(3), torch.rand(3, generator=rng.generator("data"))
        second = torch.rand(2, generator=rng.generator("augment"))

    assert torch.equal(torch.cat([first, second]), expected)


def test_fork_runs_on_a_stream_and_restores_the_generator() -> None:
    """Within a fork the global generator runs on the stream; after it, both continue from their own states."""
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
    """Forks nest, except for a stream within itself, which would draw the same numbers twice."""
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
        "  stream 'model_parallel': is already forked\n"
        "    fix: fork another stream within it, or none"
    )


def test_unknown_stream_is_refused() -> None:
    """Requesting an undeclared stream is an error that names the declared ones."""
    with opened(RngSettings(), ALONE, CPU) as rng, pytest.raises(ServiceError) as error:
        rng.generator("dropout")

    assert str(error.value) == (
        "No such random stream:\n"
        "  stream 'dropout': not one of model_parallel, expert, data\n"
        "    fix: declare it in rng.streams"
    )


def resume_tensor_parallel(folder: Path) -> tuple[float, float]:
    """Save on data-parallel ranks, resume on tensor-parallel ones; return the next number of each run."""
    flags = ["--checkpoint.folder", str(folder), "--log.level", "ERROR"]
    with TrainingRuntime.open(TrainingSettings.load(flags)) as runtime:
        torch.rand(3, generator=runtime.rng.generator("model_parallel"))
        runtime.checkpointer.save({"rng": runtime.rng}, 1)
        saved = float(torch.rand((), generator=runtime.rng.generator("model_parallel")))
    with TrainingRuntime.open(TrainingSettings.load([*flags, "--parallel.tensor", "2"])) as runtime:
        runtime.checkpointer.load({"rng": runtime.rng})
        return saved, float(torch.rand((), generator=runtime.rng.generator("model_parallel")))


@pytest.mark.processes
def test_streams_stay_distinct_in_another_layout(tmp_path: Path) -> None:
    """If ranks shared a stream and must not in the new layout, only the rank with the stream's seed resumes it."""
    (saved, first), (_, second) = run_ranks(resume_tensor_parallel, 2, tmp_path)

    assert first == saved
    assert second != saved


def test_state_without_a_stream_leaves_it_unchanged() -> None:
    """A stream that was declared after the state was saved starts from its own seed."""
    with opened(RngSettings(), ALONE, CPU) as rng:
        state = rng.state_dict()

    with opened(RngSettings(streams=(StreamSettings(name="augment"),)), ALONE, CPU) as rng:
        rng.load_state_dict(state)

        assert rng.generator("augment").initial_seed() == rng.seeds["augment"]


def test_state_that_does_not_fit_changes_nothing() -> None:
    """A state of other streams, or of another device type, is refused with all mismatches, and nothing is loaded."""
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
        "  stream 'data': was saved on another device type\n"
        "    fix: start from new seeds: leave the random state out of what is loaded\n"
        "  stream 'gone': is not a stream of this run\n"
        "    fix: declare it in rng.streams"
    )
    assert (after["python"], after["numpy"]) == (before["python"], before["numpy"])
    assert torch.equal(after["torch"]["cpu"], before["torch"]["cpu"])


def test_streams_at_another_place_keep_their_own_seeds(caplog: pytest.LogCaptureFixture) -> None:
    """Loaded at another place of another grid, streams with an equal seed resume; the others are logged."""
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
    assert caplog.messages == ["random streams not loaded, because their saved state has other seeds: data"]


def test_streams_of_another_seed_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A state of a run with another seed restores neither streams nor global generators, which the log reports."""
    with opened(RngSettings(seed=1), ALONE, CPU) as rng:
        state = rng.state_dict()

    with opened(RngSettings(seed=2), ALONE, CPU) as rng:
        before = torch.get_rng_state()
        rng.load_state_dict(state)

        assert torch.equal(torch.get_rng_state(), before)
    (message,) = caplog.messages
    assert message.endswith(f": {', '.join(['base', *state['streams']])}")
