"""Train two modules, one that sees pictures of numbers and one that writes them down, each on a grid of its own.

    torchrun --nproc-per-node 2 examples/train_mimo.py --grids.vision.size 1
    torchrun --nproc-per-node 4 examples/train_mimo.py --grids.vision.size 2 --grids.language.parallel.tensor 2
    torchrun --nproc-per-node 2 examples/train_mimo.py

In the first two, vision and language have ranks of their own, and activations and gradients pass between them; in the
third, both share all ranks. The loss comes out the same. Captions are bytes, so there is no tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from logging import DEBUG, INFO

from gpt_settings import GPTSettings
from mimo_settings import LearnSettings, VisionSettings
from runtime_di import Problem
from runtime_di.containers import MimoContainer, MimoRuntime, MimoSettings
from runtime_di.providers.microbatches import BatchSettings
from runtime_di.providers.vocabulary import VocabularySettings

PICTURE_WIDTH = 16
CAPTION_LENGTH = 5


class CaptionSettings(MimoSettings):
    """Settings of this script."""

    vocabulary: VocabularySettings = VocabularySettings(size=256)
    batch: BatchSettings = BatchSettings(global_size=32, micro_size=8)
    vision: VisionSettings = VisionSettings()
    model: GPTSettings = GPTSettings(width=64, context_length=16)
    learn: LearnSettings = LearnSettings()

    @property
    def num_positions(self) -> int:
        """Positions of the features that vision makes of a picture."""
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
                yield Problem(where, "this module knows data parallelism alone", fix=fix)
            if self.model.num_heads % sizes.tensor:
                what = f"cannot share {self.model.num_heads} attention heads"
                yield Problem(f"{where}.tensor", what, fix="use a divisor of model.num_heads", involves=("model",))


class CaptionRuntime(MimoRuntime, container=MimoContainer):
    """What `train` is given."""

    settings: CaptionSettings


def train(runtime: CaptionRuntime) -> None:
    """Train from the start to the last step."""
    from tqdm import tqdm

    from mimo_modules import Captioner  # torch is imported here, once the settings are known to be right

    runtime.start()
    captioner, steps = Captioner(runtime), runtime.settings.learn.steps
    bar = tqdm(range(1, steps + 1), disable=runtime.settings.launch.rank != 0)
    for step in bar:
        loss = captioner.step(step)
        bar.set_postfix(loss=f"{loss:.3f}")
        runtime.writer.scalar("loss", loss, step)
        runtime.log.log(INFO if step in (1, steps) else DEBUG, "loss %.3f in step %d", loss, step)


if __name__ == "__main__":
    CaptionRuntime.main(train)
