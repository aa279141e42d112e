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

    @property
    def weights(self) -> dict[str, Any]:
        """The model's part of the state."""
        return {"model": get_model_state_dict(self.model)}

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
    runtime.checkpointer.load({name: part.weights for name, part in state.items() if isinstance(part, Trained)})
    runtime.log.info("began with the weights alone of %s, and with a fresh optimizer", runtime.checkpointer.latest)
    return 0


def resume(runtime: TrainingRuntime, state: dict[str, Any]) -> int:
    """Load this run's latest checkpoint and return its step, or else the weights of pretrain_gpt.py's trainer."""
    latest = runtime.checkpointer.latest
    if latest is not None and latest.parent == runtime.settings.checkpoint.folder:
        return runtime.checkpointer.load(state) or 0
    runtime.checkpointer.load({name: part.weights for name, part in state.items() if name == "trainer"})
    return 0
