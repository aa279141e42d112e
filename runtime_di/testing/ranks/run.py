"""Runs a function in several real processes, as torchrun starts them on one node."""
# ruff: noqa: S301 the pickles come from our own processes

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection, forkserver
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import indent
from typing import TypeVar, TypeVarTuple
from unittest import mock

from runtime_di.settings.launch import LAUNCH_VARIABLES
from runtime_di.testing.ranks.child import OWN_STACK, STACKS_SIGNAL, Outcome, run_rank

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Environment = Mapping[str, str]

_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOAD = (
    "dependency_injector.containers",
    "pydantic_settings",
    "runtime_di.testing.ranks.run",
    "tokenizers",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)
_NOT_INHERITED = ("RUNTIME_DI_", "TORCHELASTIC_", "GROUP_", "ROLE_")
_GRACE_S = 3.0
_STACKS_WAIT_S = 1.0


class RanksError(Exception):
    """Some ranks raised, died or did not end in time.

    Attributes:
        failures: rank to its failure, with traceback or stacks; the first rank to end comes first.
        exceptions: rank to its exception, if it can be pickled.
        stopped: rank to the stacks of a rank that was killed because others had failed.
    """

    def __init__(
        self,
        heading: str,
        failures: Mapping[int, str],
        exceptions: Mapping[int, BaseException],
        stopped: Mapping[int, str],
    ) -> None:
        super().__init__(heading, failures, exceptions, stopped)
        self.heading = heading
        self.failures = dict(failures)
        self.exceptions = dict(exceptions)
        self.stopped = dict(stopped)

    def __str__(self) -> str:
        lines = [f"rank {rank} {text}" for rank, text in (self.failures | self.stopped).items()]
        return "\n".join([self.heading, *(indent(line, "  ") for line in lines)])


def run_ranks(
    function: Callable[[*Ts], T],
    num_ranks: int,
    *args: *Ts,
    timeout_s: float = 60.0,
    env: Environment | Callable[[int], Environment] | None = None,
) -> list[T]:
    """Call ``function(*args)`` in ``num_ranks`` new processes and return the results in rank order.

    Each process gets torchrun's variables for one node, one OpenMP thread, and this process's environment without its
    launch variables and those that start with ``RUNTIME_DI_``. The output of the ranks is printed when all have ended,
    each line prefixed with its rank. No rank outlives this call or this process. All ranks are forks of one server
    that has imported torch: they start fast, share one hash seed, and run no ``atexit`` functions.

    Args:
        function: defined at the top level of an importable module; it does not see the state of this process.
        num_ranks: world size; at least 1.
        args: arguments for every rank; arguments and results must be picklable.
        timeout_s: seconds from the start of the last rank until all ranks have ended.
        env: further variables, for all ranks or as a function of the rank; they override all others.

    Raises:
        RanksError: a rank raised, died, or was still running at the timeout. After the first failure the other ranks
            have a few seconds to end by themselves.
        ValueError: ``num_ranks`` is below 1.
    """
    __tracebackhide__ = True
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}: at least one rank is required")
    call = _pickled(function, args)
    _start_server()
    with TemporaryDirectory(prefix="ranks-") as folder, _reserved_port() as port:
        environments = [_environment(rank, num_ranks, port, env) for rank in range(num_ranks)]
        ranks = [_Rank(Path(folder, str(rank)), environment, call) for rank, environment in enumerate(environments)]
        try:
            for rank in ranks:
                rank.process.start()
            outcomes = _wait(ranks, timeout_s)
            stacks = _stacks({number: rank for number, rank in enumerate(ranks) if number not in outcomes})
        finally:
            _end(ranks)
    if stacks or any(outcome.failure for outcome in outcomes.values()):
        raise _error(f"{function.__module__}.{function.__qualname__}", outcomes, stacks, timeout_s)
    return [pickle.loads(outcomes[rank].result) for rank in range(num_ranks)]


class _Rank:
    """The process of one rank and the files that it writes."""

    def __init__(self, base: Path, environment: Environment, call: bytes) -> None:
        self.base = base
        self.process = _CONTEXT.Process(target=run_rank, args=(base, environment, call), name=f"rank {base.name}")

    def read(self, suffix: str) -> str:
        path = self.base.with_suffix(suffix)
        return OWN_STACK.sub("", path.read_text(errors="replace")).rstrip() if path.exists() else ""

    def outcome(self) -> Outcome:
        """Wait for the process and return how it ended."""
        self.process.join()
        code = self.process.exitcode or 0
        path = self.base.with_suffix(".outcome")
        outcome: Outcome | None = pickle.loads(path.read_bytes()) if path.exists() else None
        if outcome and (code == 0 or outcome.failure):
            return outcome
        how = f"{code} ({signal.strsignal(-code)})" if code < 0 else f"{code}"
        text = f"died with exit code {how} {'after' if outcome else 'before'} its function returned"
        tail = "\n".join(self.read(".err").splitlines()[-20:])
        return Outcome(failure=f"{text}; its last errors:\n{indent(tail, '  ')}" if tail else text)


def _pickled(function: Callable[..., object], args: tuple[object, ...]) -> bytes:
    try:
        return pickle.dumps((function, args))
    except Exception as error:
        error.add_note("run_ranks pickles the function and its arguments: define them at the top level of a module")
        raise


def _start_server() -> None:
    """Start the server that forks the ranks, if it is not running; with one thread, since a fork copies no others."""
    _CONTEXT.set_forkserver_preload([*_PRELOAD, *({"pytest"} & sys.modules.keys())])
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        forkserver.ensure_running()


@contextmanager
def _reserved_port() -> Iterator[int]:
    """Reserve a port for rank 0, which can listen on it because torch sets SO_REUSEADDR too."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def _environment(
    rank: int, num_ranks: int, port: int, env: Environment | Callable[[int], Environment] | None
) -> dict[str, str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCH_VARIABLES.values() and not name.startswith(_NOT_INHERITED)
    }
    launch = {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    further = env(rank) if callable(env) else env
    return inherited | launch | dict(further or {})


def _wait(ranks: Sequence[_Rank], timeout_s: float) -> dict[int, Outcome]:
    """Wait until all ranks have ended or the time is up; return the outcomes in the order in which ranks ended."""
    deadline = time.monotonic() + timeout_s
    running = {rank.process.sentinel: number for number, rank in enumerate(ranks)}
    outcomes: dict[int, Outcome] = {}
    while running and (left_s := deadline - time.monotonic()) > 0:
        for sentinel in running.keys() & connection.wait(list(running), left_s):
            number = running.pop(sentinel)
            outcomes[number] = ranks[number].outcome()
            if outcomes[number].failure:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    return outcomes


def _stacks(running: Mapping[int, _Rank]) -> dict[int, str]:
    """Have running ranks write the stacks of their threads."""
    for rank in running.values():
        with suppress(ProcessLookupError):
            os.kill(rank.process.pid or 0, STACKS_SIGNAL)
    deadline = time.monotonic() + _STACKS_WAIT_S
    while time.monotonic() < deadline and not all(rank.read(".stacks") for rank in running.values()):
        time.sleep(0.02)
    if running:
        time.sleep(0.05)  # nothing marks the end of a stack
    return {number: rank.read(".stacks") or "none were written" for number, rank in running.items()}


def _end(ranks: Sequence[_Rank]) -> None:
    """Kill the running ranks and their children, and print the output of all ranks."""
    started = [rank for rank in ranks if rank.process.pid]
    for rank in started:
        with suppress(ProcessLookupError):
            os.killpg(rank.process.pid or 0, signal.SIGKILL)
        rank.process.kill()
    for rank in started:
        rank.process.join()
        rank.process.close()
    for suffix, stream in ((".out", sys.stdout), (".err", sys.stderr)):
        for rank in started:
            stream.writelines(f"[rank {rank.base.name}] {line}\n" for line in rank.read(suffix).splitlines())


def _error(call: str, outcomes: Mapping[int, Outcome], stacks: Mapping[int, str], timeout_s: float) -> RanksError:
    failed = {rank: outcome for rank, outcome in outcomes.items() if outcome.failure}
    failures = {rank: outcome.failure for rank, outcome in failed.items()}
    exceptions = {rank: pickle.loads(outcome.exception) for rank, outcome in failed.items() if outcome.exception}
    why = "was killed because others had failed" if failed else f"was killed at the timeout of {timeout_s:g} s"
    stopped = {rank: f"{why}; its stacks:\n{indent(text, '  ')}" for rank, text in stacks.items()}
    if not failed:
        failures, stopped = stopped, {}
    heading = f"{len(failures)} of {len(outcomes) + len(stacks)} ranks failed in {call}."
    return RanksError(heading, failures, exceptions, stopped)
