"""Saves and loads on two ranks, for tests that share one start of the processes."""

from __future__ import annotations

import resource

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from runtime_di.providers.checkpoint.format.snapshot import (
    checkpoints,
)
from tests.support.checkpoints.saved import App, failure_of, open_for, plain, weights, world


def parallel_state(fill=None):
    """One state on all ranks of a world: sharded by rows, by columns, unevenly, on both, and replicated."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "rows": distribute_tensor(weights(6, fill), mesh, [Shard(0)]),
        "columns": distribute_tensor(weights(6, fill), mesh, [Shard(1)]),
        "uneven": distribute_tensor(weights(5, fill), mesh, [Shard(0)]),
        "single": distribute_tensor(weights(1, fill), mesh, [Shard(0)]),
        "copied": distribute_tensor(weights(3, fill), mesh, [Replicate()]),
        "plain": weights(2, fill),
        "step": 20 if fill is None else 0,
        "rng": torch.full((3,), dist.get_rank() if fill is None else 9, dtype=torch.uint8),
        "position": {"sample": dist.get_rank() if fill is None else 9},
    }


def whole(state):
    return {k: (v.full_tensor() if isinstance(v, DTensor) else v) for k, v in state.items()}


def save_parallel(folder, rank, world_size):
    open_for(folder, rank=rank, world_size=world_size).save(parallel_state(), 20)


def load_parallel(folder, rank, world_size):
    state = parallel_state(fill=-1)
    step = open_for(folder, rank=rank, world_size=world_size).load(state)
    return step, plain(whole(state))


def reshard(folder, rank, world_size, here, there):
    """Save under one placement, load under another; return whether the tensors are equal."""
    mesh = init_device_mesh("cpu", (world_size,))
    saver = open_for(folder, rank=rank, world_size=world_size)
    saver.save({"w": distribute_tensor(weights(), mesh, [here])}, 1)
    state = {"w": distribute_tensor(weights(fill=0), mesh, [there])}
    open_for(folder, rank=rank, world_size=world_size).load(state)
    return torch.equal(state["w"].full_tensor(), weights())


def train_sharded(folder, rank, world_size):
    """Save after two steps and continue; load into another app and continue; return the bits of both."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world_size,))
    apps = [App(seed, lambda model: fully_shard(model, mesh=mesh)) for seed in (1, 2)]
    open_for(folder, rank=rank, world_size=world_size).save({"app": apps[0].step(2)}, 2)
    open_for(folder, rank=rank, world_size=world_size).load({"app": apps[1]})
    return [app.step(2).bits() for app in apps]


def save_with_one_disk_full(folder, rank, world_size):
    """Save, save with a file size limit on rank 1, save without; return the error of the second and what it left."""
    checkpointer = open_for(folder, rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    state = {"w": distribute_tensor(torch.ones(2, 40_000), mesh, [Shard(0)])}
    checkpointer.save(state, 10)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000 if rank == 1 else unlimited[0], unlimited[1]))
    failure = failure_of(lambda: checkpointer.save(state, 20))
    left = checkpoints(folder)[-1].name, len(list(folder.iterdir()))
    dist.barrier()
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    checkpointer.save(state, 30)
    return str(failure), left


def fail_on_rank_1(folder, rank, world_size):
    """Save, and then load, a state that is invalid on rank 1 only; return the location of each problem."""
    checkpointer = open_for(folder, rank=rank, world_size=world_size)
    unsaved = failure_of(lambda: checkpointer.save({"x": {1} if rank else 1}, 1))
    checkpointer.save({"x": 1}, 1)
    unloaded = failure_of(lambda: checkpointer.load({"x": 0, "y": 0} if rank else {"x": 0}))
    return [problem.where for error in (unsaved, unloaded) for problem in error.problems]


def two_rank_scenarios(root):
    """Run all scenarios of two ranks in one start of the processes."""
    with world() as (rank, world_size):
        save_parallel(root / "two", rank, world_size)
        return {
            "two": load_parallel(root / "two", rank, world_size),
            "one": load_parallel(root / "one", rank, world_size),
            "rows to columns": reshard(root / "a", rank, world_size, Shard(0), Shard(1)),
            "columns to copies": reshard(root / "b", rank, world_size, Shard(1), Replicate()),
            "trained": train_sharded(root / "trained", rank, world_size),
            "disk full": save_with_one_disk_full(root / "full", rank, world_size),
            "failed": fail_on_rank_1(root / "failed", rank, world_size),
        }
