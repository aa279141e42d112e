"""Rewrite a checkpoint of pretrain_gpt.py, on the CPU and in one process.

    python examples/convert_checkpoint.py --conversion.folder runs/gpt-2way --conversion.tensor 2
    python examples/convert_checkpoint.py --conversion.folder runs/gpt-weights --conversion.single_file

The first has the vocabulary's rows that two tensor-parallel ranks share, optimizer state included: pretrain_gpt.py goes
on from it at its step with ``--checkpoint.load runs/gpt-2way --parallel.tensor 2``. The second has the weights alone in
one ``model.safetensors``: with ``--checkpoint.load runs/gpt-weights`` pretrain_gpt.py begins at step 0 with a fresh
optimizer, and train_rl.py starts from it as from a whole checkpoint. Both have the tokenizer beside them and name it in
their settings, so that serve.py reads them wherever they are moved. Without ``--checkpoint.load`` the latest checkpoint
of ``make train`` is taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from runtime_di import Problem
from runtime_di.containers import ConverterRuntime, ConverterSettings
from runtime_di.providers.checkpoint_loader import LoadSettings


class ConvertSettings(ConverterSettings):
    """Settings of this script; tokenizer and padding are the checkpoint's own unless set."""

    checkpoint: LoadSettings = LoadSettings(load=Path("runs/gpt/checkpoints"), load_settings=True)

    def rules(self) -> Iterable[Problem]:
        yield from super().rules()
        if self.conversion.folder is None:
            yield Problem("conversion.folder", "not set: nowhere to write", fix="name a new folder")


class ConvertRuntime(ConverterRuntime):
    """What `convert` is given."""

    settings: ConvertSettings


def convert(runtime: ConvertRuntime) -> None:
    """Write the new checkpoint and tell where it is."""
    runtime.start()
    print(f"{runtime.settings.checkpoint.start} -> {runtime.converter.convert()}")


if __name__ == "__main__":
    ConvertRuntime.main(convert)
