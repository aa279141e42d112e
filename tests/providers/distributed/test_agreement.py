"""Ranks agree before their world is created, or all of them report what differs."""

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
from runtime_di.providers.distributed.agreement import Agreement, Differences
from runtime_di.providers.distributed.errors import format_rank_ranges
from runtime_di.providers.distributed.rendezvous.protocol import Rendezvous
from runtime_di.settings.launch import LaunchSettings
from runtime_di.testing import FakeCheckpointer, FakeTokenizer
from runtime_di.testing.ranks import run_ranks
from tests.support.paths import ROOT


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
        env: more environment variables, by rank.
        probed: ranks whose container has one more service.
        torch: versions, by rank.
        away: ranks that do not start.
        fakes: names of the fakes that override services, by rank.
    """

    argv: Sequence[str] = ()
    env: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    probed: Sequence[int] = ()
    torch: Mapping[int, str] = field(default_factory=dict)
    away: Sequence[int] = ()
    fakes: Mapping[int, str] = field(default_factory=dict)


FAKES: Mapping[str, Mapping[str, Any]] = {
    "checkpointer": {"checkpointer": FakeCheckpointer()},
    "tokenizer": {"tokenizer": FakeTokenizer()},
    "first stage": {"embedding": first_stage},
    "a rank's own stages": {"embedding": lambda stages: stages[: 1 if os.environ["RANK"] == "3" else 2]},
}


def start_in_turn(folder: str, starts: Sequence[Start], agent_port: int | None = None) -> list[str]:
    """Start runtimes one after the other, each when all ranks are ready; return how each start ended."""
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
        with runtime.open(settings, overrides=FAKES.get(start.fakes.get(rank, ""))) as opened:
            opened.start()
            dist.barrier()
            return "started"
    except RuntimeDIError as error:
        return f"{type(error).__name__}: {error}"


STARTUP = ("--distributed.startup_timeout_s", "2.5")
TENSOR = "RUNTIME_DI_PARALLEL__TENSOR"
LATE_FIX = "    fix: check why these ranks are late or gone, or raise distributed.startup_timeout_s"
SERVICES = ["device", "process_groups", "mesh", "shard_mesh", "expert_mesh", "checkpointer", "rng"]
AWAY = "away"
NCCL = "CapabilityError: This machine lacks what TrainingRuntime needs with these settings."


def differ(*lines: str) -> str:
    return "\n".join(["AgreementError: The ranks of a job must start with equal values, and these differ:", *lines])


def missing(who: str) -> str:
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
        Start(fakes={3: "checkpointer"}),
        differ('  overridden services: [] on ranks 0-2; ["checkpointer"] on rank 3'),
    ),
    "an embedding rule": (
        Start(["--parallel.pipeline", "4"], fakes={1: "first stage"}),
        differ(
            "  embedding stages: [0, 3] on ranks 0,2-3; [0] on rank 1",
            '  overridden services: [] on ranks 0,2-3; ["embedding"] on rank 1',
        ),
    ),
    "an embedding rule for one pipeline": (
        Start(["--parallel.pipeline", "2"], fakes=dict.fromkeys(range(4), "a rank's own stages")),
        differ("  embedding stages: [0, 1] on ranks 0-2; [0] on rank 3"),
    ),
    "an override of what another service is built from": (
        Start(fakes={3: "tokenizer"}),
        differ('  overridden services: [] on ranks 0-2; ["tokenizer"] on rank 3'),
    ),
    "a version": (
        Start(torch={0: "2.6.0", 3: "2.6.0", 1: "2.7.0", 2: "2.6.0"}),
        differ("  version of torch: 2.6.0 on ranks 0,2-3; 2.7.0 on rank 1"),
    ),
    "a missing rank": (Start(away=[2]), "ServiceError: Ranks are missing:\n" + missing("rank 2 of 4")),
    "a rank that cannot start": (
        Start(env={3: {"RUNTIME_DI_DISTRIBUTED__BACKEND": "nccl"}}),
        "ServiceError: Ranks are missing:\n" + missing("rank 3 of 4"),
    ),
    "a rank twice": (
        Start(env={3: {"RANK": "1", "LOCAL_RANK": "1"}}),
        differ("  launch.rank: rank 1 arrived twice: P and P", "    fix: give each process its own rank"),
    ),
    "a setting and a missing rank": (
        Start(env={1: {TENSOR: "2"}}, away=[3]),
        differ(f"  parallel.tensor: 1 on ranks 0,2; 2 on rank 1 (from environment {TENSOR})", missing("rank 3 of 4")),
    ),
    "nothing": (Start(), "started"),
}


@pytest.mark.processes
@pytest.mark.parametrize("hosted", [True, False], ids=["rank 0 hosts the store", "an agent hosts the store"])
def test_every_rank_reports_what_differs(hosted: bool, tmp_path: Path) -> None:
    """B46, B57: whatever differs on a rank, all that arrived soon raise the same error that names it, and can retry."""
    agent = None if hosted else TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    starts: Sequence[Start] = [start for start, _ in STARTS.values()]

    ended = run_ranks(start_in_turn, 4, str(tmp_path), starts, agent.port if agent else None, timeout_s=90)

    reported = {
        name: {re.sub(r"\S+ process \d+", "P", ended[rank][place]) for rank in range(4)} - {AWAY}
        for place, name in enumerate(STARTS)
    }
    reported["a rank that cannot start"] = {text for text in reported["a rank that cannot start"] if NCCL not in text}
    assert reported == {name: {expected} for name, (_, expected) in STARTS.items()}


@pytest.mark.processes
def test_a_second_rank_0_is_reported() -> None:
    """Two processes with rank 0 on an agent's store both report it, and so do the ranks that wait for them."""
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    reported = run_ranks(be_rank_0_or_2, 3, agent.port)

    expected = f"{AgreementError.__name__}: launch.rank: rank 0 arrived twice"
    assert [text.partition(": P")[0] for text in reported] == [expected] * 3


def be_rank_0_or_2(port: int) -> str:
    """Join as rank 0, except in the last process."""
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    rank = 2 if os.environ["RANK"] == "2" else 0
    try:
        Rendezvous(store=store, launch=LaunchSettings(rank=rank, world_size=3), timeout_s=10).join()
    except AgreementError as error:
        return f"AgreementError: {error.problems[0].where}: " + re.sub(r"\S+ process \d+", "P", error.problems[0].what)
    return "joined"


def keys_of_a_rendezvous(num_ranks: int) -> list[set[str]]:
    """Have ranks that agree join; return the keys of the store that each has read or written."""
    store, agreement = HashStore(), Agreement({"parallel.tensor": 2})
    spies = [StoreSpy(store) for _ in range(num_ranks)]
    joining: list[Any] = [
        Rendezvous(store=spy, launch=LaunchSettings(rank=rank, world_size=num_ranks), timeout_s=10, agreement=agreement)  # type: ignore[arg-type]
        for rank, spy in enumerate(spies)
    ]
    threads = [threading.Thread(target=own.join) for own in joining]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [spy.keys for spy in spies]


def test_agreement_is_constant_work() -> None:
    """Ranks that agree use the same number of keys at any world size, and none of another rank."""
    leader, *followers = keys_of_a_rendezvous(16)

    assert [leader, followers[0]] == keys_of_a_rendezvous(2)
    for rank, keys in enumerate(followers, 1):
        own = {f"1/arrived/{rank}", f"1/counted/{rank}"}
        assert keys == {"newest_generation", "1/decision", "1/digest", "1/arrivals"} | own


class StoreSpy:
    """Records the keys that are used."""

    def __init__(self, store: Any) -> None:
        self.store, self.keys = store, set[str]()

    def __getattr__(self, name: str) -> Any:
        def recording(key: str | list[str], *args: Any) -> Any:
            self.keys |= {key} if isinstance(key, str) else {*key}
            return getattr(self.store, name)(key, *args)

        return recording


def test_differences_have_ranks_and_sources() -> None:
    """The most frequent value comes first; the others have their source; a missing field is nothing."""
    own = Agreement({"a": 2, "b": "x"}, {"a": "command line --a", "b": "default"}.get)
    differences: Mapping[int, Differences] = {
        6: {"a": ("4", "environment A")},
        7: {"c": ("1", None)},
        3: {"b": ("y", "file f")},
    }

    reported = [str(problem) for problem in own.problems(differences, [0, 3])]

    assert reported == [
        "a: 2 on ranks 0,3,7; 4 on rank 6 (from environment A)",
        "b: x on ranks 0,6-7; y on rank 3 (from file f)",
        "c: nothing on ranks 0,3,6; 1 on rank 7",
    ]


def test_the_documents_have_the_error() -> None:
    """The error in docs/process_groups.md is the one that a rank with another tensor-parallel size causes."""
    own = Agreement({"parallel.tensor": 2}, {"parallel.tensor": "default"}.get)
    sixth = {"parallel.tensor": ("4", "environment RUNTIME_DI_PARALLEL__TENSOR")}

    error = AgreementError(differ().partition(": ")[2].rstrip(), own.problems({6: sixth}, range(8)))

    document = ROOT / "docs" / "process_groups.md"
    assert f"```text\n{error}\n```" in document.read_text()


def test_two_values_without_a_majority_both_have_sources() -> None:
    """Where no value has the most ranks, each has its source."""
    own = Agreement({"a": 2}, {"a": "default"}.get)

    reported = [str(problem) for problem in own.problems({1: {"a": ("4", "command line --a")}}, [0])]

    assert reported == ["a: 2 on rank 0 (from default); 4 on rank 1 (from command line --a)"]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([0, 1, 2, 3, 4, 5, 7], "0-5,7"),
        ([3], "3"),
        ([*range(0, 40, 2)], "0,2,4,6,8,10,12,14 and 12 more"),
    ],
)
def test_ranks_are_formatted_as_ranges(ranks: list[int], expected: str) -> None:
    """Consecutive ranks form a range, and after the first eight ranges only a number follows."""
    assert format_rank_ranges(ranks) == expected
