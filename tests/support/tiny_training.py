"""A training run of examples/pretrain_gpt.py that takes a second."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

from prepare_corpus import prepare

TINY = [
    *("--model.num_layers", "1"),
    *("--model.width", "32"),
    *("--model.context_length", "32"),
    *("--batch.global_size", "8"),
    *("--batch.micro_size", "2"),
    *("--train.steps", "6"),
    *("--train.validate_every", "3"),
    *("--checkpoint.every", "2"),
]


def tiny_corpus(folder: Path) -> Path:
    """Write a corpus of a few files."""
    prepare(folder, Path(sysconfig.get_path("stdlib")) / "email", vocabulary_size=512, max_bytes=200_000)
    return folder


def tiny_argv(corpus: Path, run: Path, *more: str) -> list[str]:
    """Flags of a tiny run that writes metrics and checkpoints to ``run``."""
    return [
        *TINY,
        *("--tokenizer.path", str(corpus)),
        *("--corpus.folder", str(corpus)),
        *("--writer.folder", str(run)),
        *("--checkpoint.folder", str(run / "checkpoints")),
        *more,
    ]


def train_in_process(argv: list[str]) -> None:
    """Run the example in this process as one rank."""
    from pretrain_gpt import PretrainRuntime, train

    with PretrainRuntime.open(PretrainRuntime.settings_class().load(argv)) as runtime:
        train(runtime)


def losses(run: Path, name: str = "train/loss") -> dict[int, float]:
    """Loss of each step in the run's metrics file; if a step was written twice, the last value."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["value"] for line in lines if line.get("name") == name}
