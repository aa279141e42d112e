"""Checkpoint state of a model and its optimizer, and how a run starts from a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict

from runtime_di.containers import TrainingRuntime


class TrainingState:
    """Base of a trainer: saves and loads its model and optimizer, and can be loaded on another number of ranks."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def weights(self) -> dict[str, Any]:
        """State of the model alone."""
        return {"model": get_model_state_dict(self.model)}

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **parts)


def start_from_checkpoint(runtime: TrainingRuntime, state: dict[str, Any]) -> int:
    """Load the state and return its step; from a checkpoint with weights alone, load these and return 0."""
    if not runtime.checkpointer.weights_only:
        return runtime.checkpointer.load(state) or 0
    runtime.checkpointer.load({name: part.weights for name, part in state.items() if isinstance(part, TrainingState)})
    runtime.log.info("started from the weights of %s, with a fresh optimizer", runtime.checkpointer.latest)
    return 0


def resume_or_load_pretrained(runtime: TrainingRuntime, state: dict[str, Any]) -> int:
    """Load this run's latest checkpoint and return its step; without one, load pretrain_gpt.py's weights and return 0.

    The pretrained weights are those of the part of ``state`` that is named 'trainer'.
    """
    latest = runtime.checkpointer.latest
    if latest is not None and latest.parent == runtime.settings.checkpoint.folder:
        return runtime.checkpointer.load(state) or 0
    runtime.checkpointer.load({name: part.weights for name, part in state.items() if name == "trainer"})
    return 0
