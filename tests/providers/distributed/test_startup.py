"""What other ranks do when one dies during startup, and how ranks restart."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed import distributed_c10d as c10d

from runtime_di.containers import TrainingRuntime, TrainingSettings
from runtime_di.providers.distributed.rendezvous.keys import RendezvousKeys
from runtime_di.providers.distributed.rendezvous.protocol import Rendezvous
from runtime_di.providers.process_groups.parallel import ParallelSettings
from runtime_di.providers.process_groups.rank_grid import KINDS
from runtime_di.providers.process_groups.settings import DistributedSettings
from runtime_di.testing.ranks import RanksError, run_ranks
from tests.support.open_process_groups import opened

if TYPE_CHECKING:
    from pytest_mock import MockerFixture

NUM_RANKS = 4
STARTUP_S = 2.5


def die(*_args: Any, **_kwargs: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a killed process does not go on")


def die_after_arriving(
    self: RendezvousKeys, key: str, more: int = 0, count: Callable[..., int] = RendezvousKeys.count
) -> int:
    counted = count(self, key, more)
    return die() if key == "arrivals" and more else counted


def die_among_groups(*args: Any, new_group: Callable[..., Any] = dist.new_group, **kwargs: Any) -> Any:
    """Create two groups, and die in the call that creates the third."""
    return die() if len(c10d._world.pg_map) > 2 else new_group(*args, **kwargs)


PHASES: Mapping[str, Any] = {
    "before it arrives": mock.patch.object(Rendezvous, "join", die),
    "after it arrived": mock.patch.object(RendezvousKeys, "count", die_after_arriving),
    "before it decides": mock.patch.object(Rendezvous, "_decide", die),
    "before the world is created": mock.patch("torch.distributed.init_process_group", die),
    "before groups are created": mock.patch("torch.distributed.new_group", die),
    "while groups are created": mock.patch("torch.distributed.new_group", die_among_groups),
}


def start_and_die(folder: str, victim: int, phase: str) -> None:
    """Start as an entrypoint would, all ranks at once; leave the exit status and the error output in a file."""
    ready = FileStore(f"{folder}/ready", -1)
    ready.add("ready", 1)
    while ready.add("ready", 0) < NUM_RANKS:
        time.sleep(0.01)
    if int(os.environ["RANK"]) == victim:
        PHASES[phase].start()
    with mock.patch("sys.stderr") as stderr:
        try:
            TrainingRuntime.main(
                lambda runtime: runtime.start(),
                ["--parallel.tensor", "2", "--distributed.startup_timeout_s", str(STARTUP_S), "--log.level", "ERROR"],
            )
        except SystemExit as left:
            written = "".join(str(call.args[0]) for call in stderr.write.call_args_list)
            ended = {"status": left.code, "written": written, "pid": os.getpid()}
            Path(folder, os.environ["RANK"]).write_text(json.dumps(ended))


STORE_LOST = r"no store at 127\.0\.0\.1:\d+, which rank 0 must host"
LOST = (
    r"process_groups: the (world|\w+ group) of ranks? \S+ could not be created: "
    "|rank [0-3] failed: ServiceError|ranks were not ready within"
)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("victim", "phase", "expected"),
    [
        (2, "before it arrives", "rank 2 of 4 did not arrive within 2.5 s"),
        (2, "after it arrived", LOST),
        (0, "before it decides", STORE_LOST),
        (0, "before the world is created", f"{STORE_LOST}|{LOST}"),
        (1, "before groups are created", LOST),
        (0, "before groups are created", LOST),
        (2, "while groups are created", LOST),
    ],
)
def test_others_end_when_one_is_killed(
    victim: int, phase: str, expected: str, tmp_path: Path, mocker: MockerFixture
) -> None:
    """Whenever a rank is killed during startup, all others end soon, non-zero, with an error that names the cause."""
    mocker.patch("runtime_di.testing.ranks.run._GRACE_S", 20)

    with pytest.raises(RanksError) as failed:
        run_ranks(start_and_die, NUM_RANKS, str(tmp_path), victim, phase, timeout_s=60)

    ended = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(NUM_RANKS) if rank != victim]
    assert set(failed.value.failures) == {victim}
    assert [end["status"] for end in ended] == [1] * (NUM_RANKS - 1)
    assert [end["written"] for end in ended if not re.search(expected, end["written"])] == []
    assert not any(psutil.pid_exists(end["pid"]) for end in ended)


def fail_and_start_again(failing: int) -> list[str]:
    """Open, have one rank fail in the body while others wait for it, and open again in the same processes."""
    rank, ended = int(os.environ["RANK"]), []
    for attempt in range(2):
        try:
            with opened(ParallelSettings(tensor=2), DistributedSettings(timeout_s=2)) as groups:
                if attempt == 0 and rank == failing:
                    raise KeyError("loss")
                total = torch.ones(1)
                dist.all_reduce(total, group=groups.group("tp_dp_cp"))
                ended.append(f"{int(total)} ranks")
        except KeyError:
            ended.append("failed")
        except RuntimeError:
            ended.append("lost a rank")
    return ended


@pytest.mark.processes
@pytest.mark.parametrize("failing", [0, 3])
def test_ranks_start_again_after_one_failed(failing: int) -> None:
    """B22, B53: after an exception on one rank, the processes open again at once, though rank 0 hosts the store."""
    ended = run_ranks(fail_and_start_again, 4, failing)

    assert [first for first, _ in ended] == ["failed" if rank == failing else "lost a rank" for rank in range(4)]
    assert [second for _, second in ended] == ["4 ranks"] * 4


TORCHRUN_SCRIPT = """
import os, signal
import torch, torch.distributed as dist
from runtime_di.containers import TrainingRuntime

def body(runtime):
    runtime.start()
    if runtime.settings.launch.restart_count == 0 and runtime.settings.launch.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    total = torch.ones(1)
    dist.all_reduce(total)
    line = f"restart {runtime.settings.launch.restart_count}: {int(total)} ranks\\n"
    os.write(1, line.encode())  # in one piece: ranks share the pipe

TrainingRuntime.main(body, ["--log.level", "ERROR"])
"""


@pytest.mark.processes
def test_torchrun_restarts_killed_workers(tmp_path: Path) -> None:
    """B56: after a worker was killed, torchrun restarts all on the same store, and they join."""
    script = tmp_path / "train.py"
    script.write_text(TORCHRUN_SCRIPT)
    flags = ["--nproc-per-node", "2", "--max-restarts", "1", "--master-port", "0", "--rdzv-backend", "c10d"]
    command = [sys.executable, "-m", "torch.distributed.run", *flags, "--rdzv-endpoint", "127.0.0.1:0", str(script)]

    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as torchrun:
        written, errors = torchrun.communicate(timeout=110)

    assert torchrun.returncode == 0, errors
    assert written.splitlines() == ["restart 1: 2 ranks"] * 2
    assert [left for left in psutil.pids() if session_of(left) == torchrun.pid] == []


WITHOUT_HOST = """
import os, socket
from runtime_di.containers import TrainingRuntime

connect = socket.create_connection

def ask(*args):
    os.write(1, b"asked\\n")
    return connect(*args)

socket.create_connection = ask
TrainingRuntime.main(lambda runtime: runtime.start(), ["--log.level", "ERROR"])
"""


@pytest.mark.processes
def test_a_rank_without_a_host_can_be_stopped(tmp_path: Path) -> None:
    """B65: a signal ends a rank at once while it waits for the host of the store, as a launcher expects."""
    (tmp_path / "train.py").write_text(WITHOUT_HOST)
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    launch = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    command = [sys.executable, "train.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path, env={**os.environ, **launch}) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"asked\n"
        rank.terminate()
        status = rank.wait(30)

    assert status == 128 + signal.SIGTERM


def session_of(pid: int) -> int | None:
    with suppress(ProcessLookupError):
        return os.getsid(pid)
    return None


@pytest.mark.parametrize("rank", [5, 1023])
def test_a_laptop_can_be_one_rank_of_many(rank: int) -> None:
    """B50, B60: services, sizes, seeds and groups on backend fake are those of this rank in a real job."""
    launch = ["--launch.rank", str(rank), "--launch.world_size", "1024", "--distributed.backend", "fake"]
    sizes = ["--parallel.tensor", "8", "--parallel.pipeline", "4", "--batch.global_size", "512"]
    other = ["--rng.derivation", "megatron", "--log.level", "ERROR"]

    with TrainingRuntime.open(TrainingSettings.load([*launch, *sizes, *other])) as runtime:
        runtime.start()
        groups, grid = runtime.process_groups, ParallelSettings(tensor=8, pipeline=4).grid(1024)

        place = grid.coordinates(rank)

        assert set(runtime.built) == set(runtime.plan().services) - set(runtime.disabled)
        assert {kind: groups.ranks(kind) for kind in KINDS} == {kind: grid.group_of(rank, kind) for kind in KINDS}
        assert all(groups.group(kind).size() == groups.size(kind) for kind in KINDS if groups.is_member(kind))
        assert [*(runtime.mesh.get_coordinate() or ())] == [place[axis] for axis in grid.axes]
        assert runtime.settings.data_parallel == groups.size("dp") == 32
        assert runtime.microbatches.at(0).num_microbatches == 512 // 32
        assert runtime.rng.base_seed == 1234 + 100 * place["pp"]
        assert runtime.rng.model_parallel_seed == 1234 + 100 * place["pp"] + 2718 + place["tp"]
