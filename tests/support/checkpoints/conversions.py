"""Saves checkpoints to convert, converts them, and reads the results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime_di.containers import (
    ConverterRuntime,
    ConverterSettings,
)
from runtime_di.providers.checkpoint.format.index import read_index
from runtime_di.providers.checkpoint.format.snapshot import find_checkpoint, read_snapshot
from runtime_di.providers.checkpoint.protocols import CheckpointLoader
from runtime_di.providers.checkpoint.service import open_checkpoint_loader, open_checkpointer
from runtime_di.providers.checkpoint.settings import CheckpointSettings, LoadSettings
from runtime_di.providers.converter.folder import _read
from runtime_di.providers.process_groups.rank_grid import RankGrid
from runtime_di.providers.process_groups.service import ProcessGroups
from runtime_di.providers.vocabulary import Vocabulary


def save(folder: Path, size: int, rows: Tensor, tensor_parallel: int = 1, **more: Any) -> Path:
    """Save a checkpoint of a model with an embedding and a layer."""
    groups = ProcessGroups.pretend(RankGrid(world_size=1))
    vocabulary = Vocabulary(size, len(rows), "tokenizer", len(rows) - size, tensor_parallel)
    model = {"embedding.weight": rows, "up.weight": torch.randn(len(rows), 4)}
    state = {"trainer": {"model": model, **more}, "seed": 7}
    settings = {"vocabulary": {"divisible_by": 4}}
    return open_checkpointer(CheckpointSettings(folder=folder), groups, vocabulary, settings).save(state, 2)


def convert(load: Path, folder: Path, tokenizer: Any = None, **conversion: Any) -> Path:
    settings = ConverterSettings(
        checkpoint={"load": load},
        vocabulary={"divisible_by": 4 if read_snapshot(load).settings["vocabulary"]["divisible_by"] == 4 else 128},
        conversion={"folder": folder, **conversion},
        tokenizer={"kind": "file", "path": tokenizer} if isinstance(tokenizer, Path) else tokenizer,
    )
    with ConverterRuntime.open(settings) as runtime:
        return runtime.converter.convert()


def tensors(checkpoint: Path) -> dict[str, Tensor]:
    checkpoint = find_checkpoint(checkpoint) or checkpoint
    return {path: _read(checkpoint, path, entry) for path, entry in read_index(checkpoint).items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    bits = [{path: (t.dtype, t.shape, t.numpy().tobytes()) for path, t in state.items()} for state in (one, other)]
    return bits[0] == bits[1]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def loader_of(checkpoint: Path) -> CheckpointLoader:
    return open_checkpoint_loader(LoadSettings(load=checkpoint), ProcessGroups.pretend(RankGrid(world_size=1)))
