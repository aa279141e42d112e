"""Test the training of pretrain_gpt.py with fakes: no corpus, no tokenizer file, no torch.distributed.

pytest examples/test_with_fakes.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpt.trainer import Trainer
from pretrain_gpt import PretrainRuntime, train
from runtime_di.testing import (
    FakeCheckpointer,
    FakeTokenizer,
    FakeWriter,
    assert_not_built,
    assert_order,
    fake_process_groups,
)
from runtime_di.testing.plugin import OpenRuntime

SMALL = {
    "model": {"num_layers": 1, "width": 16, "num_heads": 2, "context_length": 8},
    "batch": {"global_size": 4, "micro_size": 2},
    "train": {"steps": 20, "validate_every": 10},
}


def counting_batch(_split: str, seed: int, size: int, length: int) -> torch.Tensor:
    """Windows of numbers that go up by one: (size, length + 1)."""
    return (torch.arange(seed % 7, seed % 7 + size)[:, None] + torch.arange(length + 1)) % 50


@pytest.fixture
def overrides(fake: Callable[..., Any]) -> dict[str, Any]:
    """Fakes of the services that are slow or need files or other ranks."""
    return {
        "tokenizer": FakeTokenizer(size=60),
        "corpus": fake(PretrainRuntime, "corpus", **{"batch.side_effect": counting_batch}),
        "process_groups": fake_process_groups(),
        "mesh": fake(PretrainRuntime, "mesh"),
        "checkpointer": FakeCheckpointer(every=15),
        "writer": FakeWriter(),
    }


def test_loss_falls(open_runtime: OpenRuntime, overrides: dict[str, Any]) -> None:
    """In a few steps the model learns to count."""
    with open_runtime(PretrainRuntime, overrides, **SMALL) as runtime:
        trainer = Trainer(runtime)
        losses = [trainer.step(step) for step in range(1, 21)]

        assert losses[-1] < losses[0] - 1
        assert trainer.model.embedding.num_embeddings == 128  # noqa: PLR2004 - 60 tokens, padded
        assert_not_built(runtime, "mesh", "checkpointer")
        assert not torch.distributed.is_initialized()


def test_train_writes_and_saves(open_runtime: OpenRuntime, overrides: dict[str, Any]) -> None:
    """A whole training run logs every step, validates twice, and saves when due and at the end."""
    with open_runtime(PretrainRuntime, overrides, **SMALL) as runtime:
        train(runtime)

        assert [step for step, _ in overrides["writer"].scalars["train/loss"]] == list(range(1, 21))
        assert [step for step, _ in overrides["writer"].scalars["validation/loss"]] == [10, 20]
        assert list(overrides["checkpointer"].saved) == [15, 20]
        assert_order(runtime, "tokenizer", "vocabulary", "writer", "process_groups", "mesh", "rng")


def test_train_resumes_from_a_checkpoint(open_runtime: OpenRuntime, overrides: dict[str, Any]) -> None:
    """A run with an earlier run's checkpoints trains only the remaining steps."""
    settings = SMALL | {"train": {"steps": 15}}
    with open_runtime(PretrainRuntime, overrides, **settings) as first:
        train(first)
    saved = overrides["checkpointer"].saved
    resumed = overrides | {"writer": FakeWriter(), "checkpointer": FakeCheckpointer(saved=saved)}

    with open_runtime(PretrainRuntime, resumed, **SMALL) as runtime:
        train(runtime)

        assert [step for step, _ in resumed["writer"].scalars["train/loss"]] == [16, 17, 18, 19, 20]
