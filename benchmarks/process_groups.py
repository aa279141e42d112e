"""Time of group creation on a rank: runtime-di, torch's init_device_mesh and megatron-core side by side.

Rank N/2 + 5 of N ranks, on the backend ``fake``, creates its groups for the same parallel sizes in a separate process:
seconds and calls of ``new_group``, without the creation of the world. Then eight Gloo processes do so on loopback.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

from runtime_di.providers.distributed.world import World, join_world
from runtime_di.providers.process_groups.creation import create_groups
from runtime_di.providers.process_groups.mesh import open_mesh
from runtime_di.providers.process_groups.parallel import ParallelSettings
from runtime_di.providers.process_groups.service import KINDS, Kind, ProcessGroups
from runtime_di.providers.process_groups.settings import DistributedSettings
from runtime_di.settings.launch import LaunchSettings
from runtime_di.settings.model import RuntimeSettings
from runtime_di.testing import run_ranks

PARALLEL = ParallelSettings(tensor=8, pipeline=8, context=2, expert=8, expert_tensor=1)
WORLD_SIZES = (1_024, 16_384, 131_072)
PEERS = ("init_device_mesh", "megatron-core")
LIMIT_S = 60
REPEATS = {"ours": 5, "init_device_mesh": 3, "megatron-core": 1}

LOOPBACK = ParallelSettings(tensor=2, pipeline=2)
LOOPBACK_RANKS, LOOPBACK_REPEATS = 8, 9
ON_LOOPBACK = ("ours, same axes", "init_device_mesh", "ours")


def ours(parallel: ParallelSettings, launch: LaunchSettings, world: World, stack: ExitStack) -> None:
    """Create the groups of every kind, and the mesh."""
    _ours(parallel, launch, world, stack, KINDS)


def ours_of_axes(parallel: ParallelSettings, launch: LaunchSettings, world: World, stack: ExitStack) -> None:
    """Create the groups of the mesh's axes alone, and the mesh."""
    _ours(parallel, launch, world, stack, parallel.grid(launch.world_size).axes)


def _ours(
    parallel: ParallelSettings, launch: LaunchSettings, world: World, stack: ExitStack, kinds: Sequence[Kind]
) -> None:
    grid = parallel.grid(launch.world_size)
    groups = stack.enter_context(create_groups(grid, launch.rank, world, DistributedSettings().timeout, kinds=kinds))
    open_mesh(ProcessGroups(grid=grid, rank=launch.rank, world=world, _groups=groups))


def init_device_mesh(parallel: ParallelSettings, launch: LaunchSettings, _world: World, _stack: ExitStack) -> None:
    """Create the mesh of the same axes."""
    from torch.distributed.device_mesh import init_device_mesh as init

    grid = parallel.grid(launch.world_size)
    init("cpu", tuple(grid.sizes[axis] for axis in grid.axes), mesh_dim_names=grid.axes)


def megatron_core(parallel: ParallelSettings, _launch: LaunchSettings, _world: World, _stack: ExitStack) -> None:
    """Create the groups of megatron-core, without its Gloo groups beside those of NCCL."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        create_gloo_process_groups=False,
    )


MAKERS: dict[str, Callable[[ParallelSettings, LaunchSettings, World, ExitStack], None]] = {
    "ours": ours,
    "ours, same axes": ours_of_axes,
    "init_device_mesh": init_device_mesh,
    "megatron-core": megatron_core,
}


class OutOfTimeError(Exception):
    """The peer exceeded its time limit."""


def measure(name: str, world_size: int) -> dict[str, Any]:
    """Create the groups of one rank as ``name`` does, repeatedly; return median seconds and calls of ``new_group``."""
    import torch

    def stop(*_: object) -> None:
        raise OutOfTimeError

    launch = LaunchSettings(rank=world_size // 2 + 5, world_size=world_size)
    seconds, finished, calls = [], True, 0
    signal.signal(signal.SIGALRM, stop)
    for _ in range(REPEATS[name]):
        with (
            join_world(DistributedSettings(backend="fake"), launch, torch.device("cpu")) as world,
            ExitStack() as stack,
        ):
            if name == "megatron-core":
                importlib.import_module("megatron.core.parallel_state")
            count = stack.enter_context(counted())
            start = time.perf_counter()
            signal.alarm(LIMIT_S)
            try:
                MAKERS[name](PARALLEL, launch, world, stack)
            except OutOfTimeError:
                finished = False
            signal.alarm(0)
            seconds.append(time.perf_counter() - start)
            calls = next(count)
    return {"seconds": statistics.median(seconds), "calls": calls, "finished": finished}


@contextmanager
def counted() -> Iterator[Iterator[int]]:
    """Count the calls of the function that every way to create a group in torch uses."""
    from torch.distributed import distributed_c10d

    count, make = itertools.count(), distributed_c10d._new_group_with_tag

    def new_group(*args: Any, **kwargs: Any) -> Any:
        next(count)
        return make(*args, **kwargs)

    distributed_c10d._new_group_with_tag = new_group
    try:
        yield count
    finally:
        distributed_c10d._new_group_with_tag = make


def measured_apart(name: str, world_size: int) -> dict[str, Any]:
    """Measure in a separate process."""
    command = [sys.executable, "-W", "ignore", __file__, "--measure", name, "--world-size", str(world_size)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed at {world_size} ranks:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare_at_scale(peers: tuple[str, ...]) -> None:
    """Print a table of seconds and calls, and their ratio to ours."""
    sizes = {name: value for name, value in PARALLEL if value}
    print(f"One rank's groups on the backend fake, {sizes}")
    print(f"{'ranks':>8}  {'':<17} {'seconds':>9} {'times ours':>11} {'new_group calls':>16}")
    calls_a_rank = 0.0
    for world_size in WORLD_SIZES:
        base = measured_apart("ours", world_size)
        for name in ("ours", *peers):
            result = base if name == "ours" else measured_apart(name, world_size)
            ratio = result["seconds"] / base["seconds"]
            more = "" if result["finished"] else ">"
            print(f"{world_size:>8}  {name:<17} {more + format(result['seconds'], '.4f'):>9}", end=" ")
            print(f"{more + format(ratio, '.1f'):>11} {result['calls']:>16}")
            if name == "megatron-core" and result["finished"]:
                calls_a_rank = result["calls"] / world_size
            elif not result["finished"]:
                all_calls = calls_a_rank * world_size
                whole = result["seconds"] * all_calls / result["calls"]
                print(
                    f"{'':>10}stopped after {LIMIT_S} s at {result['calls']} of about {all_calls:.0f} calls;", end=" "
                )
                print(f"at this pace {whole:.0f} s, {whole / base['seconds']:.0f} times ours")


def loopback() -> dict[str, list[float]]:
    """Create groups over Gloo in turn; return the seconds of this rank from a barrier until all ranks are done."""
    import torch
    import torch.distributed as dist

    launch = RuntimeSettings().launch
    seconds: dict[str, list[float]] = {}
    for name in LOOPBACK_REPEATS * ON_LOOPBACK:
        with join_world(DistributedSettings(), launch, torch.device("cpu")) as world, ExitStack() as stack:
            dist.barrier()
            start = time.perf_counter()
            MAKERS[name](LOOPBACK, launch, world, stack)
            dist.barrier()
            seconds.setdefault(name, []).append(time.perf_counter() - start)
            dist.barrier()
    return seconds


def compare_on_loopback() -> None:
    """Print the median of the slowest ranks' seconds."""
    by_rank = run_ranks(loopback, LOOPBACK_RANKS, timeout_s=300)
    medians = {
        name: statistics.median(max(times) for times in zip(*(of_rank[name] for of_rank in by_rank), strict=True))
        for name in ON_LOOPBACK
    }
    sizes = {name: value for name, value in LOOPBACK if value}
    print(f"\nGroups of {LOOPBACK_RANKS} Gloo processes on loopback, {sizes}, median of {LOOPBACK_REPEATS}")
    for name, median in medians.items():
        print(f"{name:<17} {median:.4f} s   {median / medians[ON_LOOPBACK[0]]:.2f}")


def main() -> None:
    """Measure the one that the arguments name, or everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", choices=REPEATS)
    parser.add_argument("--world-size", type=int, default=WORLD_SIZES[0])
    options = parser.parse_args()
    if options.measure:
        warnings.simplefilter("ignore")
        print(json.dumps(measure(options.measure, options.world_size)))
        return
    peers = PEERS if find_spec("megatron") else PEERS[:1]
    if peers != PEERS:
        print("megatron-core is not installed: pip install 'runtime-di[bench]'")
    compare_at_scale(peers)
    compare_on_loopback()


if __name__ == "__main__":
    main()
