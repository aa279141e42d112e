"""A model with its optimizer, and what a run starts from."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict

from runtime_di.containers import TrainingRuntime


class Trained:
    """Base of what trains a model; what a checkpoint holds of it fits any number of ranks."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **parts)


def start_from_checkpoint(runtime: TrainingRuntime, state: dict[str, Any]) -> int:
    """Load the state and return its step; from a checkpoint of the weights alone, load these and begin at step 0."""
    if not runtime.checkpointer.weights_only:
        return runtime.checkpointer.load(state) or 0
    trained = {name: part for name, part in state.items() if isinstance(part, Trained)}
    runtime.checkpointer.load({name: {"model": get_model_state_dict(part.model)} for name, part in trained.items()})
    runtime.log.info("began with the weights alone of %s, and with a fresh optimizer", runtime.checkpointer.latest)
    return 0
