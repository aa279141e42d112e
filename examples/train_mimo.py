"""Train a vision encoder and the pretrained GPT to write the numbers in pictures, each module on its own grid.

    torchrun --nproc-per-node 2 examples/train_mimo.py --grids.vision.size 1
    torchrun --nproc-per-node 3 examples/train_mimo.py --grids.vision.size 1 --grids.language.parallel.tensor 2
    torchrun --nproc-per-node 2 examples/train_mimo.py

In the first two commands vision and language have separate ranks, which send each other activations and gradients; in
the third, both modules use all ranks. The loss is the same. Language starts from the checkpoint of ``make train``,
which also states the vocabulary size. The captions are token ids beside the corpus, so the script needs no tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from logging import DEBUG, INFO
from pathlib import Path

from gpt.settings import GPTSettings
from mimo.caption_data import CAPTION_LENGTH, CaptionFileSettings, Captions
from mimo.settings import LearnSettings, VisionSettings
from runtime_di import Phase, Problem, service
from runtime_di.containers import MimoContainer, MimoRuntime, MimoSettings
from runtime_di.providers.checkpoint import CheckpointSettings
from runtime_di.providers.microbatches import BatchSettings

PICTURE_WIDTH = 16


class CaptionSettings(MimoSettings):
    """Settings of this script."""

    checkpoint: CheckpointSettings = CheckpointSettings(load=Path("runs/gpt/checkpoints"))
    batch: BatchSettings = BatchSettings(global_size=32, micro_size=8)
    captions: CaptionFileSettings = CaptionFileSettings()
    vision: VisionSettings = VisionSettings()
    model: GPTSettings = GPTSettings()
    learn: LearnSettings = LearnSettings()

    @property
    def num_positions(self) -> int:
        """Positions of a picture's features."""
        return PICTURE_WIDTH // self.vision.patch_width

    def rules(self) -> Iterable[Problem]:
        yield from super().rules()
        if PICTURE_WIDTH % self.vision.patch_width:
            yield Problem(
                "vision.patch_width", f"does not divide the picture's {PICTURE_WIDTH} columns", fix="use 2, 4 or 8"
            )
        if (length := self.num_positions + CAPTION_LENGTH - 1) > self.model.context_length:
            what = f"features and caption need {length} positions"
            yield Problem("model.context_length", what, fix=f"use {length} or more", involves=("vision",))
        for name, grid in self.grids.named.items():
            where, sizes = f"grids.{name}.parallel", grid.parallel
            if sizes.pipeline * sizes.context > 1 or (name == "vision" and sizes.tensor > 1):
                fix = "leave all but language's tensor size at 1"
                yield Problem(where, "this module supports data parallelism alone", fix=fix)
            if self.model.num_heads % sizes.tensor:
                what = f"cannot share {self.model.num_heads} attention heads"
                yield Problem(f"{where}.tensor", what, fix="use a divisor of model.num_heads", involves=("model",))


class CaptionContainer(MimoContainer):
    """Services of this script.

    Inherited from MimoContainer: see ``containers/mimo.py``.
    Added here: captions (RUNTIME).
    """

    captions = service(Phase.RUNTIME, Captions, MimoContainer.settings.provided.captions, MimoContainer.vocabulary)


class CaptionRuntime(MimoRuntime, container=CaptionContainer):
    """The services that `train` uses."""

    settings: CaptionSettings
    captions: Captions


def train(runtime: CaptionRuntime) -> None:
    """Train both modules, from this run's latest checkpoint if there is one, or else from the pretrained GPT."""
    from tqdm import tqdm

    from gpt.training_state import resume_or_load_pretrained  # imports torch, after the settings are validated
    from mimo.modules import CaptionTrainer

    runtime.start()
    trainer, checkpointer, steps = CaptionTrainer(runtime), runtime.checkpointer, runtime.settings.learn.steps
    first = resume_or_load_pretrained(runtime, trainer.state)
    bar = tqdm(range(first + 1, steps + 1), initial=first, total=steps, disable=runtime.settings.launch.rank != 0)
    for step in bar:
        loss = trainer.step(step)
        bar.set_postfix(loss=f"{loss:.3f}")
        runtime.writer.scalar("loss", loss, step)
        if checkpointer.due(step, last=steps):
            checkpointer.save(trainer.state, step)
        runtime.log.log(INFO if step in (first + 1, steps) else DEBUG, "loss %.3f in step %d", loss, step)


if __name__ == "__main__":
    CaptionRuntime.main(train)
