"""The RL entrypoint and example: trainer and rollout on shared or separate ranks, and their checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from runtime_di import Phase, SettingsError, service
from runtime_di.containers import ConverterRuntime, ConverterSettings, RLContainer, RLRuntime, RLSettings
from runtime_di.errors import ServiceError
from runtime_di.providers.grids.rollout import Rollout
from runtime_di.testing.fakes import FakeWriter
from runtime_di.testing.ranks import RanksError, run_ranks
from tests.support.checkpoints.tiny import TinyCheckpoint, train_tiny_checkpoint
from train_rl import PolicyRuntime, PolicySettings, train

SIZE = 6


def settings(grids: dict[str, Any] | None = None, **values: Any) -> RLSettings:
    return RLSettings(
        grids=grids or {},
        device={"kind": "cpu"},
        distributed={"timeout_s": 60},
        log={"level": "ERROR"},
        batch={"global_size": 4},
        **values,
    )


class Table(nn.Module):
    """A model that looks up the next token's logits by the last token."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.rows = nn.Parameter(rows)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = self.rows.full_tensor() if isinstance(self.rows, DTensor) else self.rows
        return rows[tokens]


def table(runtime: RLRuntime, name: str, scale: float) -> Table:
    """A table whose rows are sharded over the grid's tensor-parallel ranks."""
    rows = scale * torch.eye(SIZE).roll(1, dims=1)
    grid = runtime.grids[name]
    if grid.size("tp") > 1:
        return Table(distribute_tensor(rows, grid.mesh["tp"], [Shard(0)], src_data_rank=None))
    return Table(rows)


# Start


def test_one_start_builds_trainer_and_rollout() -> None:
    """One start builds the services of training and of generation; the rollout is the last."""
    with RLRuntime.open(settings()) as runtime:
        built = runtime.start().built

        assert {"microbatches", "checkpointer", "timers", "grids", "rng", "rngs"} < {*built}
        assert built[-1] == "rollout"
        assert list(runtime.grids.here) == ["trainer", "rollout"]


def test_padded_rows_fit_both_sides() -> None:
    """A rollout whose tensor-parallel size does not divide the trainer's padded vocabulary is an error."""
    grids = {"trainer": {"size": 1}, "rollout": {"parallel": {"tensor": 3}}}

    with pytest.raises(SettingsError) as refused:
        settings(grids, launch={"world_size": 4})

    assert str(refused.value) == (
        "RLSettings cannot be used: 1 problem.\n"
        "  vocabulary.divisible_by = 128 (from default): the 3 tensor-parallel ranks of the rollout cannot share rows "
        "padded to a multiple of 128\n"
        "    fix: make it a multiple of 3"
    )


# The rollout


def generate_with_published_weights(grids: dict[str, Any]) -> list[Any]:
    """Publish a table that counts up; on rollout ranks, generate with it."""
    with RLRuntime.open(settings(grids, rollout={"num_tokens": 3})) as runtime:
        runtime.start()
        rollout = runtime.rollout
        if rollout.is_here:
            rollout.load(table(runtime, "rollout", scale=0.0))
        model = table(runtime, "trainer", scale=100.0) if runtime.grids["trainer"].is_here else None
        rollout.update(model)
        rollout.update(model)
        if not rollout.is_here:
            with pytest.raises(ServiceError, match="has no policy on this rank"):
                rollout.generate(torch.zeros(1, 1, dtype=torch.int64), SIZE)
            return [rollout.version]
        return [rollout.version, *rollout.generate(torch.tensor([[1], [4]]), SIZE).tolist()]


COUNTED = [2, [1, 2, 3, 4], [4, 5, 0, 1]]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("num_ranks", "grids", "expected"),
    [
        (2, {}, [COUNTED] * 2),
        (2, {"trainer": {"parallel": {"tensor": 2}}}, [COUNTED] * 2),
        (2, {"rollout": {"size": 1}}, [[2], COUNTED]),
        (3, {"trainer": {"size": 1}, "rollout": {"parallel": {"tensor": 2}}}, [[2], COUNTED, COUNTED]),
        (4, {"trainer": {"size": 2, "parallel": {"tensor": 2}}}, [[2], [2], COUNTED, COUNTED]),
    ],
    ids=["shared", "shared, trainer split", "separate", "separate, rollout split", "separate, trainer split"],
)
def test_rollout_generates_with_the_trainers_weights(
    num_ranks: int, grids: dict[str, Any], expected: list[Any]
) -> None:
    """After an update the policy has the trained weights, on any grids with any tensor-parallel sizes."""
    assert run_ranks(generate_with_published_weights, num_ranks, grids) == expected


def generate_in_another_dtype(grids: dict[str, Any], trained_in: str, generates_in: str) -> list[Any]:
    """Publish weights of one dtype, twice, to a policy of another; return the policy's dtype and largest weight."""
    with RLRuntime.open(settings(grids)) as runtime:
        runtime.start()
        rollout = runtime.rollout
        policy, trained = table(runtime, "rollout", 0.0) if rollout.is_here else None, None
        if policy is not None:
            rollout.load(policy.to(getattr(torch, generates_in)))
        if runtime.grids["trainer"].is_here:
            trained = table(runtime, "trainer", 100.5).to(getattr(torch, trained_in))
        rollout.update(trained)
        rollout.update(trained)
        if policy is None:
            return []
        rows = policy.rows.full_tensor() if isinstance(policy.rows, DTensor) else policy.rows
        return [str(rows.dtype), rows.max().item()]


SEPARATE: dict[str, Any] = {"rollout": {"size": 1}}
SEPARATE_AND_SPLIT: dict[str, Any] = {"trainer": {"size": 1}, "rollout": {"parallel": {"tensor": 2}}}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("num_ranks", "grids", "dtypes"),
    [
        (1, {}, ("float32", "bfloat16")),
        (2, SEPARATE, ("float32", "bfloat16")),
        (2, SEPARATE, ("bfloat16", "float32")),
        (3, SEPARATE_AND_SPLIT, ("float32", "bfloat16")),
    ],
    ids=["shared", "separate", "separate, wider", "separate, split"],
)
def test_policy_of_another_dtype_gets_the_weights(
    num_ranks: int, grids: dict[str, Any], dtypes: tuple[str, str]
) -> None:
    """Weights are sent in the trained model's dtype, and the policy converts them to its own."""
    results = run_ranks(generate_in_another_dtype, num_ranks, grids, *dtypes, timeout_s=60)

    assert [result for result in results if result] == [[f"torch.{dtypes[1]}", 100.5]] * max(num_ranks - 1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_lowest_temperature_samples_the_likeliest_token(dtype: torch.dtype) -> None:
    """At the lowest temperature that settings allow, each token is the likeliest one, in every dtype."""
    with RLRuntime.open(settings(rollout={"num_tokens": 3, "temperature": 1e-6})) as runtime:
        runtime.rollout.load(table(runtime, "rollout", scale=100.0).to(dtype))

        sampled = runtime.rollout.generate(torch.tensor([[1], [4]]), SIZE)

    assert sampled.tolist() == COUNTED[1:]


@pytest.mark.parametrize("temperature", [1e-42, 0.0, float("inf")])
def test_temperature_out_of_range_is_refused(temperature: float) -> None:
    """A temperature at which logits or gradients are infinite is a settings error."""
    with pytest.raises(SettingsError, match=r"rollout\.temperature = .* input should be (greater|a finite number)"):
        settings(rollout={"temperature": temperature})


@pytest.mark.processes
def test_policy_of_another_shape_is_an_error() -> None:
    """A policy with other shapes than the trained model is an error, not a deadlock."""
    with pytest.raises(RanksError) as failed:
        run_ranks(fail_by_shape, 2, timeout_s=40)

    assert "has a policy with other weights than the trained model" in failed.value.failures[1]
    assert "was killed" not in str(failed.value)


def fail_by_shape() -> None:
    with RLRuntime.open(settings({"rollout": {"size": 1}})) as runtime:
        runtime.start()
        if runtime.rollout.is_here:
            runtime.rollout.load(Table(torch.zeros(3, 3)))
        runtime.rollout.update(None if runtime.rollout.is_here else Table(torch.zeros(2, 2)))


@pytest.mark.parametrize("failure", [None, KeyError], ids=["success", "failure"])
def test_rollout_is_shut_down_at_close(failure: type[Exception] | None) -> None:
    """At close, on success and on failure, the rollout drops its policy and refuses further use."""
    rollouts: list[Rollout] = []

    with nullcontext() if failure is None else pytest.raises(KeyError), RLRuntime.open(settings()) as runtime:
        rollouts.append(runtime.rollout)
        runtime.rollout.load(Table(torch.zeros(SIZE, SIZE)))
        if failure:
            raise failure

    with pytest.raises(ServiceError, match="is shut down\n    fix: use it inside the runtime's 'with' block"):
        rollouts[0].generate(torch.zeros(1, 1, dtype=torch.int64), SIZE)
    assert not dist.is_initialized()


def touch_at_shut_down(rollout: Rollout, file: Path) -> None:
    """Create a file when the rollout is shut down."""
    original = rollout.shut_down

    def shut_down() -> None:
        original()
        file.touch()

    rollout.shut_down = shut_down  # type: ignore[method-assign]


def fail_on_one_side(folder: Path, failing: str) -> None:
    """Fail on one grid while the other is receiving weights or samples; create a file at shutdown."""
    with RLRuntime.open(settings({"rollout": {"size": 1}})) as runtime:
        runtime.start()
        own, rollout = next(iter(runtime.grids.here)), runtime.rollout
        if rollout.is_here:
            rollout.load(Table(torch.zeros(SIZE, SIZE)))
        try:
            if own == failing:
                raise KeyError(failing)
            if own == "rollout":
                rollout.update(None)
            else:
                runtime.grids.links["samples"].carry(None, torch.zeros(4, 1))
        finally:
            touch_at_shut_down(rollout, folder / own)


@pytest.mark.processes
@pytest.mark.parametrize("failing", ["trainer", "rollout"])
def test_failure_on_one_grid_ends_the_other(failing: str, tmp_path: Path) -> None:
    """B22: when a rank of one grid fails, the other grid's rank fails too, and the rollout is shut down on both."""
    with pytest.raises(RanksError) as failed:
        run_ranks(fail_on_one_side, 2, tmp_path, failing, timeout_s=40)

    assert {*failed.value.failures} == {0, 1}
    assert "was killed" not in str(failed.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rollout", "trainer"]


# Checkpoints of several grids


def save_and_load(folder: Path, before: dict[str, Any], after: dict[str, Any]) -> list[Any]:
    """Save on the grids ``before``, load on the grids ``after``; return the loaded values and the warnings."""
    with RLRuntime.open(settings(before, checkpoint={"folder": folder})) as runtime:
        runtime.start().checkpointer.save(build_state(runtime, 3.0), 5)
    with RLRuntime.open(settings(after, checkpoint={"folder": folder})) as runtime:
        runtime.start()
        state = build_state(runtime, 0.0)
        with captured_loader_warnings() as warnings:
            step = runtime.checkpointer.load(state)
        trainer = state.get("trainer", {"scale": None, "model": {}})
        rows = [rows.full_tensor() if isinstance(rows, DTensor) else rows for rows in trainer["model"].values()]
        return [step, trainer["scale"], [row.max().item() for row in rows], state["reward"], warnings]


@contextmanager
def captured_loader_warnings() -> Iterator[list[str]]:
    log, warnings, handler = logging.getLogger("runtime_di.providers.checkpoint.loader"), [], logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.WARNING)
    yield warnings
    log.removeHandler(handler)


def build_state(runtime: RLRuntime, scale: float) -> dict[str, Any]:
    """State of this rank: the trainer's weights and scale, the random streams, and values that differ by rank."""
    state: dict[str, Any] = {f"{name}_rng": streams for name, streams in runtime.rngs.items()}
    if runtime.grids["trainer"].is_here:
        state["trainer"] = {"model": {"rows": table(runtime, "trainer", scale).rows.detach()}, "scale": scale}
    if runtime.rollout.is_here:
        state["place"] = {"rank": runtime.process_groups.rank if scale else -1}
    return state | {"reward": scale}


def save_and_load_on_other_grids(folder: Path) -> dict[str, list[Any]]:
    separate: dict[str, Any] = {"rollout": {"size": 1}}
    split: dict[str, Any] = {"trainer": {"parallel": {"tensor": 2}}}
    return {
        "shared": save_and_load(folder / "shared", separate, {}),
        "separate": save_and_load(folder / "separate", {}, separate),
        "split": save_and_load(folder / "split", separate, split),
        "same": save_and_load(folder / "same", separate, separate),
    }


@pytest.mark.processes
def test_checkpoint_loads_on_another_division_of_the_ranks(tmp_path: Path) -> None:
    """On other grids, ranks load the values that were equal on all saving ranks; a warning lists the others."""
    first, second = run_ranks(save_and_load_on_other_grids, 2, tmp_path, timeout_s=100)

    trained = [5, 3.0, [3.0], 3.0, []]
    differed = "and were not loaded: "
    data = ", ".join(f"{name}_rng.streams.data.{part}" for name in ("rollout", "trainer") for part in ("seed", "state"))
    assert first["shared"] == second["shared"] == trained
    assert first["separate"][:4] == trained[:4]
    assert first["separate"][4][0].endswith(differed + f"place, {data}")
    assert second["separate"] == [5, None, [], 3.0, []]
    assert first["split"] == second["split"] == trained
    assert (first["same"], second["same"]) == (trained, [5, None, [], 3.0, []])


# The example


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return train_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def train_example(argv: list[str]) -> list[tuple[int, float]]:
    """Run the example on this rank; return steps and rewards."""
    writer = FakeWriter()
    with PolicyRuntime.open(PolicySettings.load(argv), overrides={"writer": writer}) as runtime:
        train(runtime)
    return list(writer.scalars["reward"])


def flags(tiny: TinyCheckpoint, *more: str) -> list[str]:
    shape = [flag for flag in tiny.training() if flag not in ("--batch.global_size", "--batch.micro_size", "4", "2")]
    small = ["--batch.global_size", "32", "--batch.micro_size", "8", "--learn.learning_rate", "0.02"]
    rest = ["--rollout.num_tokens", "8", "--device.kind", "cpu", "--log.level", "ERROR"]
    return [*shape, *small, *rest, "--checkpoint.load", str(tiny.checkpoints), *more]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("num_ranks", "mode"),
    [
        (2, []),
        (2, ["--grids.rollout.size", "1"]),
        (4, ["--grids.trainer.parallel.tensor", "2", "--vocabulary.divisible_by", "64"]),
        (4, ["--grids.rollout.size", "2", "--grids.trainer.parallel.tensor", "2", "--vocabulary.divisible_by", "64"]),
    ],
    ids=["2 shared", "2 separate", "4 shared", "4 separate"],
)
def test_the_reward_rises(num_ranks: int, mode: list[str], tiny: TinyCheckpoint) -> None:
    """From a checkpoint, the reward rises on shared and on separate ranks, and is equal on all ranks."""
    rewards = run_ranks(train_example, num_ranks, flags(tiny, "--learn.steps", "10", *mode), timeout_s=100)

    first, last = rewards[0][0][1], rewards[0][-1][1]
    assert last > first + 0.1
    assert rewards == [rewards[0]] * num_ranks


@pytest.mark.processes
def test_the_example_resumes_on_separate_ranks(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """A run on separate ranks resumes from its own checkpoint with the rewards of an uninterrupted run."""
    separate = flags(tiny, "--grids.rollout.size", "1", "--learn.steps", "4")
    whole = run_ranks(train_example, 2, [*separate, "--checkpoint.folder", str(tmp_path / "whole")], timeout_s=100)
    interrupted = [*separate, "--checkpoint.folder", str(tmp_path / "parts"), "--checkpoint.every", "2"]
    run_ranks(train_example, 2, [*interrupted, "--learn.steps", "2"], timeout_s=100)

    rest = run_ranks(train_example, 2, interrupted, timeout_s=100)

    assert rest[0] == whole[0][2:]


@pytest.mark.processes
def test_the_example_starts_from_weights_alone(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """A run from a file of weights has the rewards of a run from the full checkpoint, on separate ranks too."""
    argv = flags(tiny, "--learn.steps", "1")
    settings = ConverterSettings(
        checkpoint={"load": tiny.checkpoints}, conversion={"folder": tmp_path / "weights", "single_file": True}
    )
    with ConverterRuntime.open(settings) as runtime:
        weights = ["--checkpoint.load", str(runtime.converter.convert())]
    whole = train_example(argv)

    separate = run_ranks(train_example, 2, [*argv, *weights, "--grids.rollout.size", "1"], timeout_s=100)

    assert separate == [whole] * 2


def test_a_policy_needs_a_tokenizer() -> None:
    """The reward needs a tokenizer: without one the settings are refused."""
    with pytest.raises(SettingsError, match=r"tokenizer = None .* not set: the reward reads the text of tokens"):
        PolicySettings.load(["--tokenizer", "null"])


# A service of the user


class Judge:
    def __call__(self, text: str) -> float:
        return float(text.isidentifier())


class JudgedContainer(RLContainer):
    judge = service(Phase.RUNTIME, Judge)


class JudgedRuntime(RLRuntime, container=JudgedContainer):
    judge: Judge


def test_user_adds_a_service() -> None:
    """A few lines add a service to the entrypoint."""
    with JudgedRuntime.open(settings()) as runtime:
        assert runtime.judge("runtime") == 1.0
