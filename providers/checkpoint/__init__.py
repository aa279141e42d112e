"""Checkpoints: saved by all ranks together, loaded at any parallel size."""

from runtime_di.providers.checkpoint.format.snapshot import CheckpointError
from runtime_di.providers.checkpoint.protocols import Checkpointer, CheckpointLoader
from runtime_di.providers.checkpoint.service import open_checkpoint_loader, open_checkpointer
from runtime_di.providers.checkpoint.settings import CheckpointSettings, LoadSettings
from runtime_di.providers.checkpoint.source import checkpoint_layers

__all__ = [
    "CheckpointError",
    "CheckpointLoader",
    "CheckpointSettings",
    "Checkpointer",
    "LoadSettings",
    "checkpoint_layers",
    "open_checkpoint_loader",
    "open_checkpointer",
]
