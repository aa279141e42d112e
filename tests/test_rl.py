"""Reinforcement learning: one set of processes trains and generates, on shared ranks or on ranks of its own."""

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
from runtime_di.providers.rollout import Rollout
from runtime_di.testing.fakes import FakeWriter
from runtime_di.testing.ranks import RanksError, run_ranks
from tiny_checkpoint import Tiny, make_tiny
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
    """Logits of the next token, looked up by the last one."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.rows = nn.Parameter(rows)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = self.rows.full_tensor() if isinstance(self.rows, DTensor) else self.rows
        return rows[tokens]


def table(runtime: RLRuntime, name: str, scale: float) -> Table:
    """A table whose rows the grid's tensor-parallel ranks share."""
    rows = scale * torch.eye(SIZE).roll(1, dims=1)
    grid = runtime.grids[name]
    if grid.size("tp") > 1:
        return Table(distribute_tensor(rows, grid.mesh["tp"], [Shard(0)], src_data_rank=None))
    return Table(rows)


# The boundary


def test_one_boundary_has_both_sides() -> None:
    """Training and generation start together, in one world, and the rollout last of all."""
    with RLRuntime.open(settings()) as runtime:
        built = runtime.start().built

        assert {"microbatches", "checkpointer", "timers", "grids", "rng", "rngs"} < {*built}
        assert built[-1] == "rollout"
        assert list(runtime.grids.here) == ["trainer", "rollout"]


def test_padded_rows_fit_both_sides() -> None:
    """A rollout whose ranks cannot share the trainer's padded vocabulary is refused with the factors."""
    grids = {"trainer": {"size": 1}, "rollout": {"parallel": {"tensor": 3}}}

    with pytest.raises(SettingsError) as refused:
        settings(grids, launch={"world_size": 4})

    assert str(refused.value) == (
        "RLSettings cannot be used as given: 1 problem.\n"
        "  vocabulary.divisible_by = 128 (from default): the 3 tensor-parallel ranks of the rollout cannot share rows "
        "padded to a multiple of 128\n"
        "    fix: make it a multiple of 3"
    )


# The rollout


def generate_with_published_weights(grids: dict[str, Any]) -> list[Any]:
    """Publish a table that counts up, and generate with it where the rollout is."""
    with RLRuntime.open(settings(grids, rollout={"num_tokens": 3})) as runtime:
        runtime.start()
        rollout = runtime.rollout
        if rollout.is_here:
            rollout.load(table(runtime, "rollout", scale=0.0))
        trained = table(runtime, "trainer", scale=100.0) if runtime.grids["trainer"].is_here else None
        rollout.update(trained)
        rollout.update(trained)
        if not rollout.is_here:
            with pytest.raises(ServiceError, match="has no policy on this rank"):
                rollout.generate(torch.zeros(1, 1, dtype=torch.int64), SIZE)
            return [rollout.version]
        return [rollout.version, *rollout.generate(torch.tensor([[1], [4]]), SIZE).tolist()]


COUNTED = [2, [1, 2, 3, 4], [4, 5, 0, 1]]


@pytest.mark.parametrize(
    ("num_ranks", "grids", "expected"),
    [
        (2, {}, [COUNTED] * 2),
        (2, {"trainer": {"parallel": {"tensor": 2}}}, [COUNTED] * 2),
        (2, {"rollout": {"size": 1}}, [[2], COUNTED]),
        (3, {"trainer": {"size": 1}, "rollout": {"parallel": {"tensor": 2}}}, [[2], COUNTED, COUNTED]),
        (4, {"trainer": {"size": 2, "parallel": {"tensor": 2}}}, [[2], [2], COUNTED, COUNTED]),
    ],
    ids=["shared", "shared, split otherwise", "apart", "apart, rollout split", "apart, trainer split"],
)
def test_rollout_generates_with_the_trainers_weights(
    num_ranks: int, grids: dict[str, Any], expected: list[Any]
) -> None:
    """The policy has the trained weights after an update, on whatever ranks the two are and however they are split."""
    assert run_ranks(generate_with_published_weights, num_ranks, grids) == expected


def generate_in_another_dtype(grids: dict[str, Any], trained_in: str, generates_in: str) -> list[Any]:
    """Publish weights of one dtype, twice, to a policy that has another; return the policy's dtype and weights."""
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


APART: dict[str, Any] = {"rollout": {"size": 1}}
APART_AND_SPLIT: dict[str, Any] = {"trainer": {"size": 1}, "rollout": {"parallel": {"tensor": 2}}}


@pytest.mark.parametrize(
    ("num_ranks", "grids", "dtypes"),
    [
        (1, {}, ("float32", "bfloat16")),
        (2, APART, ("float32", "bfloat16")),
        (2, APART, ("bfloat16", "float32")),
        (3, APART_AND_SPLIT, ("float32", "bfloat16")),
    ],
    ids=["shared", "apart", "apart, wider", "apart, split"],
)
def test_a_policy_of_another_dtype_takes_the_weights(
    num_ranks: int, grids: dict[str, Any], dtypes: tuple[str, str]
) -> None:
    """Weights arrive in the trained model's dtype, and the policy keeps them in its own."""
    got = run_ranks(generate_in_another_dtype, num_ranks, grids, *dtypes, timeout_s=60)

    assert [told for told in got if told] == [[f"torch.{dtypes[1]}", 100.5]] * max(num_ranks - 1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_coldest_rollout_draws_the_likeliest(dtype: torch.dtype) -> None:
    """At the lowest temperature that settings allow, each token is the likeliest, whatever dtype the policy has."""
    with RLRuntime.open(settings(rollout={"num_tokens": 3, "temperature": 1e-6})) as runtime:
        runtime.rollout.load(table(runtime, "rollout", scale=100.0).to(dtype))

        drawn = runtime.rollout.generate(torch.tensor([[1], [4]]), SIZE)

    assert drawn.tolist() == COUNTED[1:]


@pytest.mark.parametrize("temperature", [1e-42, 0.0, float("inf")])
def test_temperature_that_nothing_can_be_divided_by_is_refused(temperature: float) -> None:
    """What would make logits or gradients infinite is told before anything starts."""
    with pytest.raises(SettingsError, match=r"rollout\.temperature = .* input should be (greater|a finite number)"):
        settings(rollout={"temperature": temperature})


def test_a_policy_of_another_shape_is_told() -> None:
    """A rollout whose policy has other weights than the trained model says so instead of waiting."""
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
def test_rollout_is_shut_down_with_the_rest(failure: type[Exception] | None) -> None:
    """However the body ends, the inference side lets go of its policy, and refuses further use."""
    rollouts: list[Rollout] = []

    with nullcontext() if failure is None else pytest.raises(KeyError), RLRuntime.open(settings()) as runtime:
        rollouts.append(runtime.rollout)
        runtime.rollout.load(Table(torch.zeros(SIZE, SIZE)))
        if failure:
            raise failure

    with pytest.raises(ServiceError, match="is shut down\n    fix: use it inside the runtime's 'with' block"):
        rollouts[0].generate(torch.zeros(1, 1, dtype=torch.int64), SIZE)
    assert not dist.is_initialized()


def note_shutting_down(rollout: Rollout, file: Path) -> None:
    original = rollout.shut_down

    def shut_down() -> None:
        original()
        file.touch()

    rollout.shut_down = shut_down  # type: ignore[method-assign]


def fail_on_one_side(folder: Path, failing: str) -> None:
    """Fail on one side, while the other waits for weights or for samples; note that the rollout was shut down."""
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
            note_shutting_down(rollout, folder / own)


@pytest.mark.parametrize("failing", ["trainer", "rollout"])
def test_a_failure_on_one_side_ends_the_other(failing: str, tmp_path: Path) -> None:
    """B22: when one side fails, the other is told at once, and the inference side is shut down on every rank."""
    with pytest.raises(RanksError) as failed:
        run_ranks(fail_on_one_side, 2, tmp_path, failing, timeout_s=40)

    assert {*failed.value.failures} == {0, 1}
    assert "was killed" not in str(failed.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rollout", "trainer"]


# Checkpoints of several grids


def carry_over(folder: Path, before: dict[str, Any], after: dict[str, Any]) -> list[Any]:
    """Save on grids laid out in one way, and load on the same ranks laid out in another."""
    with RLRuntime.open(settings(before, checkpoint={"folder": folder})) as runtime:
        runtime.start().checkpointer.save(state_of(runtime, 3.0), 5)
    with RLRuntime.open(settings(after, checkpoint={"folder": folder})) as runtime:
        runtime.start()
        state = state_of(runtime, 0.0)
        with what_the_loader_tells() as told:
            step = runtime.checkpointer.load(state)
        trainer = state.get("trainer", {"scale": None, "model": {}})
        rows = [rows.full_tensor() if isinstance(rows, DTensor) else rows for rows in trainer["model"].values()]
        return [step, trainer["scale"], [row.max().item() for row in rows], state["reward"], told]


@contextmanager
def what_the_loader_tells() -> Iterator[list[str]]:
    log, told, handler = logging.getLogger("runtime_di.providers.folder_loader"), [], logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.WARNING)
    yield told
    log.removeHandler(handler)


def state_of(runtime: RLRuntime, scale: float) -> dict[str, Any]:
    """A trainer's weights and a number, where the trainer is, the random streams here, and what differs by rank."""
    state: dict[str, Any] = {f"{name}_rng": streams for name, streams in runtime.rngs.items()}
    if runtime.grids["trainer"].is_here:
        state["trainer"] = {"model": {"rows": table(runtime, "trainer", scale).rows.detach()}, "scale": scale}
    if runtime.rollout.is_here:
        state["place"] = {"rank": runtime.process_groups.rank if scale else -1}
    return state | {"reward": scale}


def carry_over_both_ways(folder: Path) -> dict[str, list[Any]]:
    apart: dict[str, Any] = {"rollout": {"size": 1}}
    split: dict[str, Any] = {"trainer": {"parallel": {"tensor": 2}}}
    return {
        "together": carry_over(folder / "together", apart, {}),
        "apart": carry_over(folder / "apart", {}, apart),
        "split": carry_over(folder / "split", apart, split),
        "same": carry_over(folder / "same", apart, apart),
    }


def test_a_run_goes_on_with_its_ranks_divided_otherwise(tmp_path: Path) -> None:
    """On other grids of the same world, ranks take what those that held it had alike, and are told what differed."""
    first, second = run_ranks(carry_over_both_ways, 2, tmp_path, timeout_s=100)

    trained = [5, 3.0, [3.0], 3.0, []]
    differed = "not loaded, since ranks differed in it: "
    data = ", ".join(f"{name}_rng.streams.data.{part}" for name in ("rollout", "trainer") for part in ("seed", "state"))
    assert first["together"] == second["together"] == trained
    assert first["apart"][:4] == trained[:4]
    assert first["apart"][4][0].endswith(differed + f"place, {data}")
    assert second["apart"] == [5, None, [], 3.0, []]
    assert first["split"] == second["split"] == trained
    assert (first["same"], second["same"]) == (trained, [5, None, [], 3.0, []])


# The example


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def learn(argv: list[str]) -> list[tuple[int, float]]:
    """Run the example on this rank; return the reward of each step."""
    writer = FakeWriter()
    with PolicyRuntime.open(PolicySettings.load(argv), overrides={"writer": writer}) as runtime:
        train(runtime)
    return list(writer.scalars["reward"])


def flags(tiny: Tiny, *more: str) -> list[str]:
    shape = [flag for flag in tiny.training() if flag not in ("--batch.global_size", "--batch.micro_size", "4", "2")]
    small = ["--batch.global_size", "32", "--batch.micro_size", "8", "--learn.learning_rate", "0.02"]
    rest = ["--rollout.num_tokens", "8", "--device.kind", "cpu", "--log.level", "ERROR"]
    return [*shape, *small, *rest, "--checkpoint.load", str(tiny.checkpoints), *more]


@pytest.mark.parametrize(
    ("num_ranks", "mode"),
    [
        (2, []),
        (2, ["--grids.rollout.size", "1"]),
        (4, ["--grids.trainer.parallel.tensor", "2", "--vocabulary.divisible_by", "64"]),
        (4, ["--grids.rollout.size", "2", "--grids.trainer.parallel.tensor", "2", "--vocabulary.divisible_by", "64"]),
    ],
    ids=["2 shared", "2 apart", "4 shared", "4 apart"],
)
def test_the_reward_rises(num_ranks: int, mode: list[str], tiny: Tiny) -> None:
    """From a checkpoint, policy gradients make rewarded tokens likelier, in both modes; ranks agree on the reward."""
    rewards = run_ranks(learn, num_ranks, flags(tiny, "--learn.steps", "10", *mode), timeout_s=100)

    first, last = rewards[0][0][1], rewards[0][-1][1]
    assert last > first + 0.1
    assert rewards == [rewards[0]] * num_ranks


def test_the_example_resumes_apart(tiny: Tiny, tmp_path: Path) -> None:
    """A run on ranks apart saves together, and goes on from its own checkpoint as if it had not stopped."""
    apart = flags(tiny, "--grids.rollout.size", "1", "--learn.steps", "4")
    whole = run_ranks(learn, 2, [*apart, "--checkpoint.folder", str(tmp_path / "whole")], timeout_s=100)
    interrupted = [*apart, "--checkpoint.folder", str(tmp_path / "parts"), "--checkpoint.every", "2"]
    run_ranks(learn, 2, [*interrupted, "--learn.steps", "2"], timeout_s=100)

    rest = run_ranks(learn, 2, interrupted, timeout_s=100)

    assert rest[0] == whole[0][2:]


def test_the_example_starts_from_the_weights_alone(tiny: Tiny, tmp_path: Path) -> None:
    """One file of weights is as good a start as the checkpoint that it was made of, on ranks apart too."""
    argv = flags(tiny, "--learn.steps", "1")
    settings = ConverterSettings(
        checkpoint={"load": tiny.checkpoints}, conversion={"folder": tmp_path / "weights", "single_file": True}
    )
    with ConverterRuntime.open(settings) as runtime:
        weights = ["--checkpoint.load", str(runtime.converter.convert())]
    whole = learn(argv)

    apart = run_ranks(learn, 2, [*argv, *weights, "--grids.rollout.size", "1"], timeout_s=100)

    assert apart == [whole] * 2


def test_a_policy_needs_a_tokenizer() -> None:
    """The reward reads text: without a tokenizer the example is refused before anything is built."""
    with pytest.raises(SettingsError, match=r"tokenizer = None .* not set: the reward reads the text of tokens"):
        PolicySettings.load(["--tokenizer", "null"])


# A container of a user's own


class Judge:
    def __call__(self, text: str) -> float:
        return float(text.isidentifier())


class JudgedContainer(RLContainer):
    judge = service(Phase.RUNTIME, Judge)


class JudgedRuntime(RLRuntime, container=JudgedContainer):
    judge: Judge


def test_a_service_of_the_users_own() -> None:
    """A few lines add a service to the entrypoint."""
    with JudgedRuntime.open(settings()) as runtime:
        assert runtime.judge("runtime") == 1.0
