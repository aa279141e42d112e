"""Wrong code of a user; every marked line is an error of both type checkers."""

from __future__ import annotations

from runtime_di.containers import TrainingRuntime


def train(runtime: TrainingRuntime) -> None:
    runtime.tokenizer.encod("text")  # wrong
    runtime.settings.parallel.tensr  # wrong
    runtime.tokenizer = runtime.tokenizer  # wrong
