"""A checkpoint of examples/pretrain_gpt.py after two steps, with its corpus and tokenizer."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

from prepare_corpus import prepare

NUM_TOKENS = 300
"""Vocabulary size; padded to 384 rows for one tensor-parallel rank, and to 512 for two."""


@dataclass(frozen=True)
class TinyCheckpoint:
    """Folders of the corpus and of the checkpoints."""

    corpus: Path
    checkpoints: Path

    def training(self, *more: str) -> list[str]:
        """Flags of a run with the same corpus and model shape, without writer and checkpoint folders."""
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


def train_tiny_checkpoint(folder: Path, num_tokens: int = NUM_TOKENS) -> TinyCheckpoint:
    """Write the corpus, train two steps in this process and save."""
    tiny = TinyCheckpoint(folder / "corpus", folder / "checkpoints")
    prepare(tiny.corpus, Path(sysconfig.get_path("stdlib")) / "email", vocabulary_size=num_tokens, max_bytes=200_000)
    train_in_process(tiny.training("--train.steps", "2", "--checkpoint.folder", str(tiny.checkpoints)))
    return tiny


def train_in_process(argv: list[str]) -> list[str]:
    """Train in this process as one rank; return the latest checkpoint and the vocabulary as text."""
    from pretrain_gpt import PretrainRuntime, train

    with PretrainRuntime.open(PretrainRuntime.settings_class().load(argv)) as runtime:
        train(runtime)
        return [str(runtime.checkpointer.latest), str(runtime.vocabulary)]
