"""A checkpoint of examples/pretrain_gpt.py after two steps, with the corpus and the tokenizer behind it."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

from prepare_corpus import prepare

NUM_TOKENS = 300
"""Tokens: 384 rows for one tensor-parallel rank, 512 for two."""


@dataclass(frozen=True)
class Tiny:
    """Where the corpus and the checkpoints are."""

    corpus: Path
    checkpoints: Path

    def training(self, *more: str) -> list[str]:
        """Flags of a run with the same corpus and shape that logs to no file."""
        return [
            *("--corpus.folder", str(self.corpus)),
            *("--tokenizer.path", str(self.corpus)),
            *("--model.num_layers", "1"),
            *("--model.width", "32"),
            *("--model.context_length", "32"),
            *("--batch.global_size", "4"),
            *("--batch.micro_size", "2"),
            *more,
        ]


def make_tiny(folder: Path, num_tokens: int = NUM_TOKENS) -> Tiny:
    """Make the corpus and train in this process."""
    tiny = Tiny(folder / "corpus", folder / "checkpoints")
    prepare(tiny.corpus, Path(sysconfig.get_path("stdlib")) / "email", vocabulary_size=num_tokens, max_bytes=200_000)
    train_here(tiny.training("--train.steps", "2", "--checkpoint.folder", str(tiny.checkpoints)))
    return tiny


def train_here(argv: list[str]) -> list[str]:
    """Train in this process, as one of its ranks, and return what the log said."""
    from pretrain_gpt import PretrainRuntime, train

    with PretrainRuntime.open(PretrainRuntime.settings_class().load(argv)) as runtime:
        train(runtime)
        return [str(runtime.checkpointer.latest), str(runtime.vocabulary)]
