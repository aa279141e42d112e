"""Checkpointers, states and models to save and load."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from runtime_di.providers.checkpoint.format.snapshot import (
    CheckpointError,
)
from runtime_di.providers.checkpoint.service import open_checkpointer
from runtime_di.providers.checkpoint.settings import CheckpointSettings
from runtime_di.providers.process_groups.rank_grid import RankGrid
from runtime_di.providers.process_groups.service import ProcessGroups
from runtime_di.providers.vocabulary import Vocabulary


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
    """A tensor in which every element has a different value."""
    whole = torch.arange(num_rows * 4, dtype=torch.float32).view(num_rows, 4) / 7
    return whole if fill is None else torch.full_like(whole, fill)


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).tolist()


class App:
    """A model and its optimizer, as in torch's recipe for distributed checkpoints."""

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


def plain(state):
    return {k: (v.tolist() if isinstance(v, torch.Tensor) else v) for k, v in state.items()}


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


def failure_of(work):
    with pytest.raises(CheckpointError) as caught:
        work()
    return caught.value


def die_at(count):
    """Kill this process before its ``count``-th file operation from now on."""
    left = [count]

    def hook(event, _):
        if event == "open" or event.startswith("os."):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
