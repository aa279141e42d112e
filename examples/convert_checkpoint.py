"""Rewrite a checkpoint of pretrain_gpt.py, on the CPU and in one process.

    python examples/convert_checkpoint.py --conversion.folder runs/gpt-2way --conversion.tensor 2
    python examples/convert_checkpoint.py --conversion.folder runs/gpt-weights --conversion.single_file

The first command pads the vocabulary for two tensor-parallel ranks and keeps the optimizer state: pretrain_gpt.py
resumes at the checkpoint's step with ``--checkpoint.load runs/gpt-2way --parallel.tensor 2``. The second command writes
the weights alone to one ``model.safetensors``: with ``--checkpoint.load runs/gpt-weights`` pretrain_gpt.py starts at
step 0 with a fresh optimizer, and train_rl.py starts as from a full checkpoint. Both results contain the tokenizer's
files, and their settings name these, so serve.py reads a result wherever it is moved. Without ``--checkpoint.load`` the
script converts the latest checkpoint of ``make train``.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from runtime_di import Problem
from runtime_di.containers import ConverterRuntime, ConverterSettings
from runtime_di.providers.checkpoint import LoadSettings


class ConvertSettings(ConverterSettings):
    """Settings of this script; the tokenizer and the padding come from the checkpoint unless set."""

    checkpoint: LoadSettings = LoadSettings(load=Path("runs/gpt/checkpoints"), load_settings=True)

    def rules(self) -> Iterable[Problem]:
        yield from super().rules()
        if self.conversion.folder is None:
            yield Problem("conversion.folder", "not set: there is no folder to write to", fix="name a new folder")


class ConvertRuntime(ConverterRuntime):
    """The services that `convert` uses."""

    settings: ConvertSettings


def convert(runtime: ConvertRuntime) -> None:
    """Write the converted checkpoint and print its folder."""
    runtime.start()
    print(f"{runtime.settings.checkpoint.start} -> {runtime.converter.convert()}")


if __name__ == "__main__":
    ConvertRuntime.main(convert)
