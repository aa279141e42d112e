"""Ranks agree before their world is made, or all of them are told what differs."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, TCPStore

from runtime_di import AgreementError, Phase, RuntimeDIError, service
from runtime_di.containers import TrainingContainer, TrainingRuntime, TrainingSettings
from runtime_di.launch import LaunchSettings
from runtime_di.providers.agreement import Agreement, Deviation, ranges
from runtime_di.providers.meeting import Meeting
from runtime_di.testing import FakeCheckpointer, FakeTokenizer
from runtime_di.testing.ranks import run_ranks


def open_probe(groups: object) -> str:
    return f"probe of {type(groups).__name__}"


def first_stage(stages: tuple[int, ...]) -> tuple[int, ...]:
    return stages[:1]


class ProbedContainer(TrainingContainer):
    probe = service(Phase.DISTRIBUTED, open_probe, TrainingContainer.process_groups)


class ProbedRuntime(TrainingRuntime, container=ProbedContainer):
    probe: str


@dataclass(frozen=True)
class Start:
    """One start of all ranks.

    Attributes:
        argv: flags of every rank.
        env: further variables, by rank.
        probed: ranks whose program has one service more.
        torch: versions, by rank.
        away: ranks that do not come.
        given: what ranks override by a fake, by rank.
    """

    argv: Sequence[str] = ()
    env: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    probed: Sequence[int] = ()
    torch: Mapping[int, str] = field(default_factory=dict)
    away: Sequence[int] = ()
    given: Mapping[int, str] = field(default_factory=dict)


FAKES: Mapping[str, Mapping[str, Any]] = {
    "checkpointer": {"checkpointer": FakeCheckpointer()},
    "tokenizer": {"tokenizer": FakeTokenizer()},
    "first stage": {"embedding": first_stage},
    "a rank's own stages": {"embedding": lambda stages: stages[: 1 if os.environ["RANK"] == "3" else 2]},
}


def start_in_turn(folder: str, starts: Sequence[Start], agent_port: int | None = None) -> list[str]:
    """Start a runtime each time that all ranks are ready to; tell how each start ended."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if agent_port:
        os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", MASTER_PORT=str(agent_port))
    ready, ended = FileStore(f"{folder}/ready", -1), []
    for number, start in enumerate(starts):
        ready.add(f"{number}", 1)
        while ready.add(f"{number}", 0) < num_ranks:
            time.sleep(0.01)
        with (
            mock.patch.dict(os.environ, start.env.get(rank, {})),
            mock.patch.object(torch, "__version__", start.torch.get(rank, torch.__version__)),
        ):
            ended.append(start_once(start, rank))
    return ended


def start_once(start: Start, rank: int) -> str:
    if rank in start.away:
        return "away"
    runtime = ProbedRuntime if rank in start.probed else TrainingRuntime
    try:
        settings = TrainingSettings.load(["--log.level", "ERROR", *STARTUP, *start.argv])
        with runtime.open(settings, overrides=FAKES.get(start.given.get(rank, ""))) as opened:
            opened.start()
            dist.barrier()
            return "started"
    except RuntimeDIError as error:
        return f"{type(error).__name__}: {error}"


STARTUP = ("--distributed.startup_timeout_s", "2.5")
TENSOR = "RUNTIME_DI_PARALLEL__TENSOR"
LATE_FIX = "    fix: see why those ranks are late or gone, or raise distributed.startup_timeout_s"
SERVICES = ["device", "process_groups", "mesh", "shard_mesh", "expert_mesh", "checkpointer", "rng"]
AWAY = "away"
NCCL = "CapabilityError: This machine lacks what TrainingRuntime needs as set."


def differ(*lines: str) -> str:
    return "\n".join(["AgreementError: Ranks of one job must be started alike, and these differ:", *lines])


def absent(who: str) -> str:
    return f"  process_groups: {who} did not arrive within 2.5 s\n{LATE_FIX}"


def plan(*names: str) -> str:
    return json.dumps([*SERVICES[:-1], *names, *SERVICES[-1:]])


STARTS: Mapping[str, tuple[Start, str]] = {
    "a setting": (
        Start(env={**{rank: {TENSOR: "2"} for rank in range(4)}, 2: {TENSOR: "4"}}),
        differ(f"  parallel.tensor: 2 on ranks 0-1,3; 4 on rank 2 (from environment {TENSOR})"),
    ),
    "a setting of rank 0": (
        Start(env={0: {"RUNTIME_DI_RNG__SEED": "4"}}),
        differ("  rng.seed: 1234 on ranks 1-3; 4 on rank 0 (from environment RUNTIME_DI_RNG__SEED)"),
    ),
    "a world size": (
        Start(env={2: {"WORLD_SIZE": "8"}}),
        differ("  launch.world_size: 4 on ranks 0-1,3; 8 on rank 2 (from environment WORLD_SIZE)"),
    ),
    "the world size of rank 0": (
        Start(env={0: {"WORLD_SIZE": "5"}}),
        differ("  launch.world_size: 4 on ranks 1-3; 5 on rank 0 (from environment WORLD_SIZE)"),
    ),
    "a plan": (
        Start(probed=[1]),
        differ(f"  collective services: {plan()} on ranks 0,2-3; {plan('probe')} on rank 1"),
    ),
    "an override": (
        Start(given={3: "checkpointer"}),
        differ('  overridden services: [] on ranks 0-2; ["checkpointer"] on rank 3'),
    ),
    "an embedding rule": (
        Start(["--parallel.pipeline", "4"], given={1: "first stage"}),
        differ(
            "  embedding stages: [0, 3] on ranks 0,2-3; [0] on rank 1",
            '  overridden services: [] on ranks 0,2-3; ["embedding"] on rank 1',
        ),
    ),
    "an embedding rule for one pipeline": (
        Start(["--parallel.pipeline", "2"], given=dict.fromkeys(range(4), "a rank's own stages")),
        differ("  embedding stages: [0, 1] on ranks 0-2; [0] on rank 3"),
    ),
    "an override of what another service is built from": (
        Start(given={3: "tokenizer"}),
        differ('  overridden services: [] on ranks 0-2; ["tokenizer"] on rank 3'),
    ),
    "a version": (
        Start(torch={0: "2.6.0", 3: "2.6.0", 1: "2.7.0", 2: "2.6.0"}),
        differ("  version of torch: 2.6.0 on ranks 0,2-3; 2.7.0 on rank 1"),
    ),
    "a missing rank": (Start(away=[2]), "ServiceError: Ranks did not meet:\n" + absent("rank 2 of 4")),
    "a rank that cannot start": (
        Start(env={3: {"RUNTIME_DI_DISTRIBUTED__BACKEND": "nccl"}}),
        "ServiceError: Ranks did not meet:\n" + absent("rank 3 of 4"),
    ),
    "a rank twice": (
        Start(env={3: {"RANK": "1", "LOCAL_RANK": "1"}}),
        differ("  launch.rank: rank 1 arrived twice: P and P", "    fix: give each process a rank of its own"),
    ),
    "a setting and a missing rank": (
        Start(env={1: {TENSOR: "2"}}, away=[3]),
        differ(f"  parallel.tensor: 1 on ranks 0,2; 2 on rank 1 (from environment {TENSOR})", absent("rank 3 of 4")),
    ),
    "nothing": (Start(), "started"),
}


@pytest.mark.parametrize("hosted", [True, False], ids=["rank 0 hosts the store", "an agent hosts the store"])
def test_every_rank_is_told_what_differs(hosted: bool, tmp_path: Path) -> None:
    """B46, B57: whatever a rank has otherwise, all that came raise one error that names it, soon, and can go on."""
    agent = None if hosted else TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    starts: Sequence[Start] = [start for start, _ in STARTS.values()]

    ended = run_ranks(start_in_turn, 4, str(tmp_path), starts, agent.port if agent else None, timeout_s=90)

    told = {
        name: {re.sub(r"\S+ process \d+", "P", ended[rank][place]) for rank in range(4)} - {AWAY}
        for place, name in enumerate(STARTS)
    }
    told["a rank that cannot start"] = {text for text in told["a rank that cannot start"] if NCCL not in text}
    assert told == {name: {expected} for name, (_, expected) in STARTS.items()}


def test_a_second_rank_0_is_told() -> None:
    """Of two processes that are rank 0 on an agent's store, both are told, and those that wait for them."""
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    told = run_ranks(be_rank_0_or_2, 3, agent.port)

    expected = f"{AgreementError.__name__}: launch.rank: rank 0 arrived twice"
    assert [text.partition(": P")[0] for text in told] == [expected] * 3


def be_rank_0_or_2(port: int) -> str:
    """Meet as rank 0, but for the last process."""
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    rank = 2 if os.environ["RANK"] == "2" else 0
    try:
        Meeting(store=store, launch=LaunchSettings(rank=rank, world_size=3), timeout_s=10).hold()
    except AgreementError as error:
        return f"AgreementError: {error.problems[0].where}: " + re.sub(r"\S+ process \d+", "P", error.problems[0].what)
    return "met"


def keys_of_a_meeting(num_ranks: int) -> list[set[str]]:
    """Have ranks that agree meet; which entries of the store each has read or written."""
    store, agreement = HashStore(), Agreement({"parallel.tensor": 2})
    spies = [StoreSpy(store) for _ in range(num_ranks)]
    meetings: list[Any] = [
        Meeting(store=spy, launch=LaunchSettings(rank=rank, world_size=num_ranks), timeout_s=10, agreement=agreement)  # type: ignore[arg-type]
        for rank, spy in enumerate(spies)
    ]
    threads = [threading.Thread(target=meeting.hold) for meeting in meetings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [spy.keys for spy in spies]


def test_agreement_is_constant_work() -> None:
    """Ranks that agree touch as many entries whatever the world size, and none of another rank's."""
    leader, *followers = keys_of_a_meeting(16)

    assert [leader, followers[0]] == keys_of_a_meeting(2)
    for rank, keys in enumerate(followers, 1):
        own = {f"1/arrived/{rank}", f"1/counted/{rank}"}
        assert keys == {"opening", "1/verdict", "1/digest", "1/arrivals"} | own


class StoreSpy:
    """Notes which keys are asked for."""

    def __init__(self, store: Any) -> None:
        self.store, self.keys = store, set[str]()

    def __getattr__(self, name: str) -> Any:
        def noting(key: str | list[str], *args: Any) -> Any:
            self.keys |= {key} if isinstance(key, str) else {*key}
            return getattr(self.store, name)(key, *args)

        return noting


def test_differences_are_told_with_who_and_whence() -> None:
    """The most frequent value comes first; the others with where they come from; a lacking field is nothing."""
    own = Agreement({"a": 2, "b": "x"}, {"a": "command line --a", "b": "default"}.get)
    deviations: Mapping[int, Deviation] = {
        6: {"a": ("4", "environment A")},
        7: {"c": ("1", None)},
        3: {"b": ("y", "file f")},
    }

    told = [str(problem) for problem in own.problems(deviations, [0, 3])]

    assert told == [
        "a: 2 on ranks 0,3,7; 4 on rank 6 (from environment A)",
        "b: x on ranks 0,6-7; y on rank 3 (from file f)",
        "c: nothing on ranks 0,3,6; 1 on rank 7",
    ]


def test_the_documents_show_what_is_told() -> None:
    """The error in docs/process_groups.md is the one that a rank with another tensor-parallel size causes."""
    own = Agreement({"parallel.tensor": 2}, {"parallel.tensor": "default"}.get)
    sixth = {"parallel.tensor": ("4", "environment RUNTIME_DI_PARALLEL__TENSOR")}

    error = AgreementError(differ().partition(": ")[2].rstrip(), own.problems({6: sixth}, range(8)))

    shown = Path(__file__).parent.parent / "docs" / "process_groups.md"
    assert f"```text\n{error}\n```" in shown.read_text()


def test_two_that_differ_are_both_told_whence() -> None:
    """Where no value has most ranks, each is told with its source."""
    own = Agreement({"a": 2}, {"a": "default"}.get)

    told = [str(problem) for problem in own.problems({1: {"a": ("4", "command line --a")}}, [0])]

    assert told == ["a: 2 on rank 0 (from default); 4 on rank 1 (from command line --a)"]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([0, 1, 2, 3, 4, 5, 7], "0-5,7"),
        ([3], "3"),
        ([*range(0, 40, 2)], "0,2,4,6,8,10,12,14 and 12 more"),
    ],
)
def test_ranks_are_told_in_runs(ranks: list[int], expected: str) -> None:
    """Neighbours are drawn together, and of very many the first are told."""
    assert ranges(ranks) == expected
