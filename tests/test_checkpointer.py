"""Checkpoints: complete or not there, exact, and harmless to load."""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
import resource
import shutil
import signal
import sys
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from runtime_di.capabilities import WritableFolder
from runtime_di.launch import LaunchSettings
from runtime_di.providers.checkpointer import CheckpointSettings, open_checkpointer
from runtime_di.providers.process_groups import ProcessGroups
from runtime_di.providers.rank_grid import RankGrid
from runtime_di.providers.snapshot import (
    CheckpointError,
    ReadableCheckpoint,
    checkpoints,
    latest_complete,
    read_snapshot,
)
from runtime_di.providers.vocabulary import Vocabulary
from runtime_di.testing.ranks import RanksError, run_ranks


def open_for(folder=None, *, rank=0, world_size=1, snapshot=None, **settings):
    groups = ProcessGroups.pretend(RankGrid(world_size=world_size), rank)
    vocabulary = Vocabulary(100, 128, "tokenizer")
    return open_checkpointer(CheckpointSettings(folder=folder, **settings), groups, vocabulary, snapshot or {})


@contextmanager
def world():
    """The world that run_ranks describes, over gloo."""
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def weights(num_rows=6, fill=None):
    """A tensor whose every element tells its place."""
    whole = torch.arange(num_rows * 4, dtype=torch.float32).view(num_rows, 4) / 7
    return whole if fill is None else torch.full_like(whole, fill)


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).tolist()


# Settings


def test_defaults_write_nothing(tmp_path, monkeypatch):
    """Without a folder no step is due, nothing is there to load, and saving is refused with the setting to set."""
    monkeypatch.chdir(tmp_path)
    checkpointer = open_for()

    with pytest.raises(CheckpointError) as caught:
        checkpointer.save({"step": 1}, 1)

    assert (checkpointer.due(1000), checkpointer.load({"step": 0}), checkpointer.latest) == (False, None, None)
    assert list(tmp_path.iterdir()) == []
    assert str(caught.value) == (
        "The checkpoint was not saved; earlier ones are as they were.\n"
        "  checkpoint.folder: not set: nowhere to save\n"
        "    fix: set checkpoint.folder, or save only when due(step)"
    )


def test_due_every_so_many_steps(tmp_path):
    """A step is due when it is a positive multiple of ``every``, or the last one."""
    checkpointer = open_for(tmp_path, every=5)

    due = [step for step in range(12) if checkpointer.due(step, last=11)]

    assert due == [5, 10, 11]


def test_settings_from_no_checkpoint_are_refused():
    """load_settings without load is a contradiction."""
    with pytest.raises(ValueError, match="set load as well, or unset load_settings"):
        CheckpointSettings(load_settings=True)


def test_requirements_are_a_writable_folder_and_a_checkpoint(tmp_path):
    """The folder must be writable on every rank, and the checkpoint to load be there unless the folder has one."""
    settings = CheckpointSettings(folder=tmp_path / "run", load=tmp_path / "base")

    required = list(settings.requires(LaunchSettings(rank=1, world_size=2)))

    assert required == [
        WritableFolder("folder", tmp_path / "run"),
        ReadableCheckpoint("load", tmp_path / "base", unless=tmp_path / "run"),
    ]


# Round trip


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**80),
        0.1,
        float("inf"),
        "naïve \U0001f600 \ud800",
        b"\x00\xff",
        [],
        {},
        (1, (2.5, None), [()]),
        {1: "a", None: [True], (0, 1): {"$tuple": 3}},
        {"$dict": [[1, 2]]},
        random.Random(1).getstate(),
    ],
)
def test_plain_value_comes_back(tmp_path, value):
    """A plain value comes back equal and of its own type."""
    open_for(tmp_path).save({"state": value}, 1)
    state = {"state": "another"}

    open_for(tmp_path).load(state)

    assert (state["state"], repr(state["state"])) == (value, repr(value))


def test_generators_go_on_where_they_were(tmp_path):
    """The states of torch's, numpy's and Python's generators come back as plain values."""
    generator = torch.Generator().manual_seed(1)
    numbers, python = np.random.default_rng(1), random.Random(1)
    states = {"torch": generator.get_state(), "numpy": numbers.bit_generator.state, "python": python.getstate()}
    open_for(tmp_path).save({"rng": states}, 1)
    expected = torch.rand(3, generator=generator).tolist(), numbers.random(3).tolist(), python.random()
    state: dict[str, Any] = {"rng": {"torch": torch.Generator().get_state(), "numpy": {}, "python": ()}}

    open_for(tmp_path).load(state)
    generator.set_state(state["rng"]["torch"])
    numbers.bit_generator.state = state["rng"]["numpy"]
    python.setstate(state["rng"]["python"])

    assert (torch.rand(3, generator=generator).tolist(), numbers.random(3).tolist(), python.random()) == expected


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def test_tensors_come_back_bitwise_and_in_place(tmp_path):
    """Tensors of any dtype, shape and strides come back bit for bit in the tensors that were given."""
    shared = torch.randn(3, 4)
    tensors = {str(dtype): torch.randn(2, 3).to(dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 3), "nan": torch.tensor([float("nan"), -0.0])}
    tensors |= {"strided": torch.randn(4, 6).t()[::2], "tied": shared, "tied too": shared, "part": shared[1]}
    open_for(tmp_path).save({"model": tensors}, 1)
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    model = dict(targets)

    open_for(tmp_path).load({"model": model})

    assert {name: bits(tensor) for name, tensor in targets.items()} == {n: bits(t) for n, t in tensors.items()}
    assert all(model[name] is target for name, target in targets.items())


def test_tensors_and_values_may_be_nested(tmp_path):
    """Tensors among plain values, in dicts, lists and tuples, are filled in place; values are replaced."""
    open_for(tmp_path).save({"a": {0: [weights(), {"lr": 0.1}], "t": (torch.ones(2), 5)}, "n": 7}, 1)
    kept = [weights(fill=0), torch.zeros(2)]
    state: dict[str, Any] = {"a": {0: [kept[0], {}], "t": (kept[1], None)}, "n": 0}

    open_for(tmp_path).load(state)

    assert torch.equal(kept[0], weights())
    assert torch.equal(kept[1], torch.ones(2))
    assert (state["a"][0][1], state["a"]["t"][1], state["n"]) == ({"lr": 0.1}, 5, 7)


def test_files_of_bounded_size_are_written(tmp_path, monkeypatch):
    """Tensors are spread over files of bounded size, whole tensors under their own names."""
    from safetensors import safe_open

    monkeypatch.setattr("runtime_di.providers.checkpoint_storage._FILE_BYTES", 64)
    tensors = {name: torch.full((8,), float(index)) for index, name in enumerate("abcde")}

    folder = open_for(tmp_path).save({"model": tensors}, 1)

    names = [list(safe_open(file, framework="pt").keys()) for file in sorted(folder.glob("*.safetensors"))]
    assert names == [["model.a", "model.b"], ["model.c", "model.d"], ["model.e"]]


class App:
    """Model and optimizer as torch's own recipe for distributed checkpoints has them."""

    def __init__(self, seed, shard=None):
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
        if shard:
            shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1 * seed)

    def step(self, num_steps):
        for number in range(num_steps):
            self.optimizer.zero_grad()
            loss = self.model(torch.full((3, 4), float(number))).sum()
            loss.backward()
            self.optimizer.step()
        return self

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def bits(self):
        parameters = [p.full_tensor() if isinstance(p, DTensor) else p for p in self.model.parameters()]
        return [bits(parameter.detach()) for parameter in parameters]


def test_training_goes_on_bitwise(tmp_path):
    """A model and its optimizer that are loaded take the very steps that the saved ones would have taken."""
    saved = App(1).step(2)
    open_for(tmp_path).save({"app": saved}, 2)
    loaded = App(2)

    step = open_for(tmp_path).load({"app": loaded})

    assert step == 2
    assert loaded.optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert loaded.step(2).bits() == saved.step(2).bits()


def test_raw_optimizer_without_state_is_told(tmp_path):
    """An optimizer that has no state yet cannot take one that has: an error, not a silent loss."""
    app = App(1).step(1)
    open_for(tmp_path).save({"optimizer": app.optimizer}, 1)

    with pytest.raises(CheckpointError) as caught:
        open_for(tmp_path).load({"optimizer": App(1).optimizer})

    assert str(caught.value) == (
        f"{tmp_path}/step-00000001 does not hold this state.\n"
        f"  state optimizer: without tensors here, and with tensors in the checkpoint\n"
        f"    fix: give the state its tensors before loading, as get_optimizer_state_dict does"
    )


# What does not fit


def test_what_cannot_be_saved_is_told_at_once(tmp_path):
    """Every value that would not come back is named, with what to do; nothing is left that looks complete."""
    state = {"numpy": np.zeros(2), "deep": {"x": [{1, 2}]}, "fine": 1, "shape": torch.Size([2])}

    with pytest.raises(CheckpointError) as caught:
        open_for(tmp_path).save(state, 1)

    fix = "    fix: give it as numbers, strings, bytes, lists, tuples, dicts or tensors, as numpy's tolist() does"
    assert str(caught.value) == (
        "The state cannot be saved.\n"
        f"  state deep: holds a builtins.set, which a checkpoint cannot hold\n{fix}\n"
        f"  state numpy: holds a numpy.ndarray, which a checkpoint cannot hold\n{fix}\n"
        f"  state shape: holds a torch.Size, which a checkpoint cannot hold\n{fix}"
    )
    assert latest_complete(tmp_path) is None


def test_paths_that_collide_are_refused(tmp_path):
    """Two entries of one dotted path would overwrite each other, so they are refused."""
    with pytest.raises(CheckpointError, match=r"state a\.b: two entries share this path"):
        open_for(tmp_path).save({"a": {"b": torch.ones(1)}, "a.b": 1}, 1)


def test_what_cannot_be_loaded_is_told_at_once(tmp_path):
    """Every entry that the checkpoint lacks or has otherwise is named, and nothing is loaded."""
    open_for(tmp_path).save({"w": weights(), "lr": 0.1, "gone": 1}, 1)
    state = {"w": weights(3, fill=0), "v": torch.zeros(1), "lr": torch.zeros(1), "n": 5}

    with pytest.raises(CheckpointError) as caught:
        open_for(tmp_path).load(state)

    assert str(caught.value) == (
        f"{tmp_path}/step-00000001 does not hold this state.\n"
        "  state lr: a tensor here, and not in the checkpoint\n"
        "    fix: load a checkpoint that has it, or leave it out of the state that is loaded\n"
        "  state v: a tensor here, and not in the checkpoint\n"
        "    fix: load a checkpoint that has it, or leave it out of the state that is loaded\n"
        "  state w: of size [3, 4] here, and [6, 4] in the checkpoint\n"
        "    fix: give the model the shape that it was saved with; checkpoint.load_settings takes it from there\n"
        "  state n: a plain value here, and not in the checkpoint\n"
        "    fix: load a checkpoint that has it, or leave it out of the state that is loaded"
    )
    assert torch.equal(state["w"], weights(3, fill=0))


# The folder


def test_folder_comes_before_load(tmp_path):
    """A run resumes from its own folder, and starts from ``load`` while that holds nothing."""
    open_for(tmp_path / "base").save({"n": 1}, 100)
    run = {"folder": tmp_path / "run", "load": tmp_path / "base"}
    first, again = {"n": 0}, {"n": 0}

    started = open_for(**run).load(first)
    open_for(**run).save({"n": 2}, 5)
    resumed = open_for(**run).load(again)

    assert (started, first, resumed, again) == (100, {"n": 1}, 5, {"n": 2})
    assert open_for(**run).latest == tmp_path / "run/step-00000005"


def test_checkpoint_that_is_named_must_be_there(tmp_path):
    """A run that names a checkpoint to start from does not start from scratch."""
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        open_for(load=tmp_path).load({"n": 0})


def test_latest_are_kept(tmp_path):
    """No more than ``keep`` checkpoints stay, and nothing else of them."""
    checkpointer = open_for(tmp_path, keep=2)

    for step in (1, 2, 3, 4):
        checkpointer.save({"n": step}, step)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_steps_in_a_folder_only_grow(tmp_path):
    """A step that is not later than what another run left is refused: a resume would take the other run's."""
    open_for(tmp_path).save({"n": 1}, 20)

    with pytest.raises(CheckpointError) as caught:
        open_for(tmp_path).save({"n": 2}, 20)

    assert str(caught.value) == (
        "The checkpoint of step 20 was not saved.\n"
        f"  checkpoint.folder = {tmp_path}: step 20 is not after the latest checkpoint there, step-00000020\n"
        "    fix: resume from it with load(), or give another folder"
    )


def test_own_step_is_not_saved_twice(tmp_path):
    """Saving the step just saved or just resumed from is done already, as at the end of a run."""
    saver, resumer = open_for(tmp_path), open_for(tmp_path)
    path = saver.save({"n": 1}, 20)
    before = path.stat().st_mtime_ns
    resumer.load({"n": 0})

    again = [saver.save({"n": 1}, 20), resumer.save({"n": 1}, 20)]

    assert (again, path.stat().st_mtime_ns) == ([path, path], before)


def test_snapshot_is_detached(tmp_path):
    """The snapshot tells settings and vocabulary as they were when the checkpointer was opened."""
    settings: dict[str, Any] = {"model": {"layers": 1}, "paths": [Path("a")]}
    checkpointer = open_for(tmp_path, snapshot=settings)
    settings["model"]["layers"] = 2
    checkpointer.save({}, 3)

    snapshot = read_snapshot(tmp_path)

    assert snapshot.settings == {"model": {"layers": 1}, "paths": ["a"]}
    assert snapshot.vocabulary == asdict(Vocabulary(100, 128, "tokenizer"))
    assert (snapshot.step, snapshot.world_size, snapshot.parallel["tp"]) == (3, 1, 1)


# Several ranks


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


def plain(state):
    return {k: (v.tolist() if isinstance(v, torch.Tensor) else v) for k, v in state.items()}


def save_parallel(folder, rank, world_size):
    open_for(folder, rank=rank, world_size=world_size).save(parallel_state(), 20)


def load_parallel(folder, rank, world_size):
    state = parallel_state(fill=-1)
    step = open_for(folder, rank=rank, world_size=world_size).load(state)
    return step, plain(whole(state))


def one_rank_state(fill=None):
    return {
        "rows": weights(6, fill),
        "columns": weights(6, fill),
        "uneven": weights(5, fill),
        "single": weights(1, fill),
        "copied": weights(3, fill),
        "plain": weights(2, fill),
        "step": 20 if fill is None else 0,
        "rng": torch.full((3,), 0 if fill is None else 9, dtype=torch.uint8),
        "position": {"sample": 0 if fill is None else 9},
    }


def reshard(folder, rank, world_size, here, there):
    """Save under one placement, load under another; return whether all is equal."""
    mesh = init_device_mesh("cpu", (world_size,))
    saver = open_for(folder, rank=rank, world_size=world_size)
    saver.save({"w": distribute_tensor(weights(), mesh, [here])}, 1)
    state = {"w": distribute_tensor(weights(fill=0), mesh, [there])}
    open_for(folder, rank=rank, world_size=world_size).load(state)
    return torch.equal(state["w"].full_tensor(), weights())


def train_sharded(folder, rank, world_size):
    """Save after two steps and go on; load into others and go on; return the bits of both."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world_size,))
    apps = [App(seed, lambda model: fully_shard(model, mesh=mesh)) for seed in (1, 2)]
    open_for(folder, rank=rank, world_size=world_size).save({"app": apps[0].step(2)}, 2)
    open_for(folder, rank=rank, world_size=world_size).load({"app": apps[1]})
    return [app.step(2).bits() for app in apps]


def save_with_one_disk_full(folder, rank, world_size):
    """Save, then save with a limit on rank 1's files, then without; return what the limited one raised and left."""
    checkpointer = open_for(folder, rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    state = {"w": distribute_tensor(torch.ones(2, 40_000), mesh, [Shard(0)])}
    checkpointer.save(state, 10)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000 if rank == 1 else unlimited[0], unlimited[1]))
    told = failure_of(lambda: checkpointer.save(state, 20))
    left = checkpoints(folder)[-1].name, len(list(folder.iterdir()))
    dist.barrier()
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    checkpointer.save(state, 30)
    return str(told), left


def fail_on_rank_1(folder, rank, world_size):
    """Save, and then load, what is wrong on rank 1 alone; return where each problem is."""
    checkpointer = open_for(folder, rank=rank, world_size=world_size)
    unsaved = failure_of(lambda: checkpointer.save({"x": {1} if rank else 1}, 1))
    checkpointer.save({"x": 1}, 1)
    unloaded = failure_of(lambda: checkpointer.load({"x": 0, "y": 0} if rank else {"x": 0}))
    return [problem.where for error in (unsaved, unloaded) for problem in error.problems]


def failure_of(work):
    with pytest.raises(CheckpointError) as caught:
        work()
    return caught.value


def scenarios(root):
    """All that is to be seen on two ranks, in one start of them."""
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


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with what the scenarios wrote, and under ``one`` what one rank did."""
    root = tmp_path_factory.mktemp("root")
    open_for(root / "one").save(one_rank_state(), 20)
    return root


@pytest.fixture(scope="module")
def on_two_ranks(root):
    """What each rank saw."""
    return run_ranks(scenarios, 2, root)


def test_two_ranks_load_what_two_saved(on_two_ranks):
    """At equal sizes every rank gets back its shards and its own plain values, bit for bit."""
    loaded = [seen["two"] for seen in on_two_ranks]

    expected = plain(one_rank_state())
    assert loaded == [(20, expected), (20, expected | {"rng": [1, 1, 1], "position": {"sample": 1}})]


@pytest.mark.usefixtures("on_two_ranks")
def test_one_rank_loads_what_two_saved(root, caplog):
    """Tensors are resharded; plain values that differed between ranks stay as they are, and the log names them."""
    state = one_rank_state(fill=-1)

    with caplog.at_level(logging.WARNING):
        open_for(root / "two").load(state)

    assert plain(state) == plain(one_rank_state()) | {"rng": [9, 9, 9], "position": {"sample": 9}}
    assert caplog.messages == [
        f"{root}/two/step-00000020 is of another parallel layout; not loaded, since ranks differed in it: position, rng"
    ]


def test_two_ranks_load_what_one_saved(on_two_ranks):
    """What one rank saved is resharded to two, and its plain values are everybody's."""
    loaded = [seen["one"] for seen in on_two_ranks]

    assert loaded == [(20, plain(one_rank_state()))] * 2


def test_sharding_may_change(on_two_ranks):
    """A DTensor is loaded under another placement than it was saved under."""
    equal = [seen[change] for seen in on_two_ranks for change in ("rows to columns", "columns to copies")]

    assert equal == [True] * 4


def test_sharded_training_goes_on_bitwise(on_two_ranks, root):
    """A fully sharded model and its optimizer go on as if never stopped; on one rank, they are what was saved."""
    alone = App(3)
    open_for(root / "trained").load({"app": alone})

    assert all(saved == loaded for saved, loaded in (seen["trained"] for seen in on_two_ranks))
    assert alone.bits() == App(1).step(2).bits()


def test_full_disk_of_one_rank_fails_the_save_on_all(on_two_ranks, root):
    """A rank that cannot write fails the save on every rank, earlier checkpoints stay, and a later save succeeds."""
    outcomes = [seen["disk full"] for seen in on_two_ranks]

    for told, left in outcomes:
        assert told.startswith("The checkpoint was not saved; earlier ones are as they were.\n  rank 1: OSError: ")
        assert "File too large" in told
        assert left == ("step-00000010", 2)
    assert sorted(path.name for path in (root / "full").iterdir()) == ["step-00000010", "step-00000030"]


def test_failure_of_one_rank_is_raised_on_all(on_two_ranks):
    """What one rank cannot save, or cannot find, is an error on every rank that names it."""
    failures = [seen["failed"] for seen in on_two_ranks]

    assert failures == [["state x", "state y"]] * 2


def die_in_second_save(folder):
    with world() as (rank, world_size):
        checkpointer = open_for(folder, rank=rank, world_size=world_size)
        checkpointer.save(parallel_state(), 10)
        if rank == 1:
            die_at(3)
        checkpointer.save(parallel_state(), 20)


def die_at(count):
    """Have this process killed before its ``count``-th operation on files from now on."""
    left = [count]

    def hook(event, _):
        if event == "open" or event.startswith("os."):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def test_killed_rank_leaves_the_earlier_checkpoint(tmp_path):
    """When a rank is killed in the middle of a save, the other raises, and the earlier checkpoint is the latest."""
    with pytest.raises(RanksError) as caught:
        run_ranks(die_in_second_save, 2, tmp_path)

    state = one_rank_state(fill=-1)
    assert open_for(tmp_path).load(state) == 10
    assert torch.equal(state["rows"], weights())
    assert set(caught.value.failures) == {0, 1}
    assert "-9" in caught.value.failures[1]


def save_and_die(folder, count):
    """In a forked child, save step 20 and die before the ``count``-th file operation, or within a file if 0."""
    child = os.fork()
    if child == 0:
        if count:
            die_at(count)
        else:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
        open_for(folder).save({"w": weights(fill=20), "n": 20}, 20)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_everywhere(folder):
    """Kill a save at each of its file operations; return the outcomes: exit code, step and content that load."""
    outcomes = []
    for count in range(200):
        run = folder / str(count)
        shutil.copytree(folder / "before", run)
        exit_code = save_and_die(run, count)
        state = {"w": weights(fill=0), "n": 0}
        step = open_for(run).load(state)
        outcomes.append((exit_code, step, state["n"], state["w"][0, 0].item()))
        open_for(run).save({"w": weights(fill=30), "n": 30}, 30)
        left = sorted(path.name for path in run.iterdir())
        assert left == [f"step-{kept:08d}" for kept in sorted({10, step, 30})], left
        if exit_code == 0:
            return outcomes
    pytest.fail("the save never came to its end")


def test_save_killed_anywhere_is_complete_or_not_there(tmp_path):
    """Killed before any of its file operations, or within a file, a save leaves the earlier checkpoint or its own."""
    open_for(tmp_path / "before").save({"w": weights(fill=10), "n": 10}, 10)

    (*killed, ended) = run_ranks(kill_everywhere, 1, tmp_path)[0]

    assert ended == (0, 20, 20, 20)
    assert {exit_code for exit_code, *_ in killed} == {-signal.SIGKILL, -signal.SIGXFSZ}
    assert {tuple(loaded) for _, *loaded in killed} == {(10, 10, 10), (20, 20, 20)}
    assert [step for _, step, *_ in killed] == sorted(step for _, step, *_ in killed)


def pretend_to_be_rank_3(folder):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    mesh = init_device_mesh("cpu", (4,))
    state = {"w": distribute_tensor(weights(8, fill=0), mesh, [Shard(0)], src_data_rank=None)}
    checkpointer = open_for(folder, rank=3, world_size=4)
    checkpointer.load(state)
    try:
        checkpointer.save(state, 2)
    except CheckpointError as error:
        return state["w"].to_local().tolist(), error.problems[0].what
    return None


def test_rank_of_a_fake_world_loads_and_does_not_save(tmp_path):
    """On the fake backend a rank loads its shards; a save is refused, since nobody would write the others'."""
    open_for(tmp_path).save({"w": weights(8)}, 1)

    local, told = run_ranks(pretend_to_be_rank_3, 1, tmp_path)[0]

    assert local == weights(8)[6:].tolist()
    assert told == "rank 3 of 4 has no real peers to save the other shards"


# Hostile files


class Hostile:
    """Touches a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_no_file_of_a_checkpoint_can_run_anything(tmp_path):
    """A pickle in the place of any file, or beside them as torch's own reader takes it, is never run."""
    checkpoint = open_for(tmp_path).save({"w": weights(), "n": 1}, 1)
    names = sorted(path.name for path in checkpoint.iterdir())
    pickles = {"pickle": pickle.dumps(Hostile(tmp_path / "touched"))}
    torch.save(Hostile(tmp_path / "touched"), tmp_path / "saved")
    pickles["torch.save"] = (tmp_path / "saved").read_bytes()
    refused = []

    for content in pickles.values():
        for name in [*names, ".metadata", "__0_0.distcp"]:
            folder = tmp_path / "hostile"
            shutil.copytree(checkpoint, folder)
            (folder / name).write_bytes(content)
            try:
                open_for(load=folder).load({"w": weights(fill=0), "n": 0})
            except CheckpointError as error:
                refused.append((name, str(folder / name) in str(error)))
            shutil.rmtree(folder)

    assert names == ["snapshot.json", "tensors-00000-00000.safetensors", "tensors.json", "values-00000.json"]
    assert refused == [(name, True) for name in names] * 2
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"dtype": "load"}, "unknown dtype 'load'"),
        ({"dtype": "os"}, "unknown dtype 'os'"),
        ({"size": [6, 5]}, r"pieces do not make up a tensor of size \[6, 5\]"),
        ({"pieces": []}, r"pieces do not make up a tensor of size \[6, 4\]"),
        ({"file": "../secret.safetensors"}, "w.pieces.0.file: string should match pattern"),
        ({"file": "/etc/passwd"}, "w.pieces.0.file: string should match pattern"),
        ({"file": "gone.safetensors"}, "gone.safetensors cannot be read"),
        ({"name": "gone"}, "does not contain tensor gone"),
        ({"offsets": [1, 0]}, "pieces do not make up"),
        ({"offsets": [-1, 0]}, "greater than or equal to 0"),
    ],
)
def test_index_that_lies_is_refused(tmp_path, change, told):
    """An index that names no dtype, another place or pieces that do not fit is refused, and says why."""
    checkpoint = open_for(tmp_path).save({"w": weights()}, 1)
    index = json.loads((checkpoint / "tensors.json").read_text())
    entry = index["w"] if change.keys() <= index["w"].keys() else index["w"]["pieces"][0]
    entry.update(change)
    (checkpoint / "tensors.json").write_text(json.dumps(index))

    with pytest.raises(CheckpointError, match=told):
        open_for(tmp_path).load({"w": weights(fill=0)})


def test_damaged_files_are_told(tmp_path):
    """Files with bytes changed, cut or added load or are refused, and nothing else ever comes out of them."""
    checkpoint = open_for(tmp_path).save({"w": weights(), "rng": torch.ones(3, dtype=torch.uint8), "t": (1, {2: 3})}, 1)
    files = sorted(checkpoint.iterdir())
    chance = random.Random(1)
    refused = 0

    for number in range(160):
        file = files[number % len(files)]
        content = file.read_bytes()
        damaged = bytearray(content)
        at = chance.randrange(len(content))
        damaged[at : at + chance.randrange(3)] = chance.randbytes(chance.randrange(3))
        file.write_bytes(damaged)
        try:
            open_for(tmp_path).load({"w": weights(fill=0), "rng": torch.zeros(3, dtype=torch.uint8), "t": 0})
        except CheckpointError:
            refused += 1
        file.write_bytes(content)

    assert 50 < refused < 160
