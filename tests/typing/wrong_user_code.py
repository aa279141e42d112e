"""What a user may not write; every line marked is an error of both type checkers."""

from __future__ import annotations

from runtime_di.containers import TrainingRuntime


def train(runtime: TrainingRuntime) -> None:
    runtime.tokenizer.encod("text")  # wrong
    runtime.settings.parallel.tensr  # wrong
    runtime.tokenizer = runtime.tokenizer  # wrong
