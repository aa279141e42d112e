"""Train a small GPT on the sources of Python's standard library.

    python examples/prepare_corpus.py
    torchrun --nproc-per-node 2 examples/pretrain_gpt.py --config examples/pretrain_gpt.toml

Data-parallel by default; ``--parallel.tensor 2`` shards every weight over two ranks instead. ``--help`` lists all
settings. Without ``--writer.folder`` and ``--checkpoint.folder`` it writes nothing. ``--checkpoint.load`` resumes
another run's checkpoint at its step. From a checkpoint of the weights alone, which convert_checkpoint.py can write, the
run starts at step 0.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from pydantic import PositiveFloat, PositiveInt

from gpt.corpus import Corpus, CorpusSettings
from gpt.settings import GPTSettings
from runtime_di import Phase, Problem, Section, service
from runtime_di.containers import TrainingContainer, TrainingRuntime, TrainingSettings
from runtime_di.providers.microbatches import BatchSettings
from runtime_di.providers.tokenizer import FileTokenizerSettings, TokenizerSettings


class TrainSettings(Section):
    """Training steps, learning rate and validation."""

    steps: PositiveInt = 200
    """Number of training steps."""
    learning_rate: PositiveFloat = 1e-2
    """Peak learning rate, reached after a tenth of the steps."""
    validate_every: PositiveInt = 50
    """Steps between validations."""


class PretrainSettings(TrainingSettings):
    """Settings of this script."""

    tokenizer: TokenizerSettings | None = FileTokenizerSettings(path=Path("runs/corpus"))
    batch: BatchSettings = BatchSettings(global_size=16, micro_size=4)
    corpus: CorpusSettings = CorpusSettings()
    model: GPTSettings = GPTSettings()
    train: TrainSettings = TrainSettings()

    def rules(self) -> Iterable[Problem]:
        yield from super().rules()
        if self.model.num_heads % self.parallel.tensor:
            what = f"cannot share {self.model.num_heads} attention heads"
            yield Problem(
                "parallel.tensor", what, fix="use a divisor of model.num_heads", involves=("model.num_heads",)
            )
        if self.parallel.pipeline * self.parallel.context > 1:
            yield Problem("parallel", "this model has neither pipeline nor context parallelism", fix="leave both at 1")


class PretrainContainer(TrainingContainer):
    """Services of this script.

    Inherited from TrainingContainer: see ``containers/training.py``.
    Added here: corpus (RUNTIME).
    """

    corpus = service(Phase.RUNTIME, Corpus, TrainingContainer.settings.provided.corpus)


class PretrainRuntime(TrainingRuntime, container=PretrainContainer):
    """The services that `train` uses."""

    settings: PretrainSettings
    corpus: Corpus


def train(runtime: PretrainRuntime) -> None:
    """Train to the last step: from the latest checkpoint, from loaded weights, or from scratch."""
    from tqdm import tqdm

    from gpt.trainer import Trainer  # imports torch, after the settings are validated
    from gpt.training_state import start_from_checkpoint

    runtime.start()
    settings, writer, checkpointer = runtime.settings, runtime.writer, runtime.checkpointer
    trainer = Trainer(runtime)
    state = {"trainer": trainer, "rng": runtime.rng}
    first, steps = start_from_checkpoint(runtime, state), settings.train.steps
    num_tokens = runtime.microbatches.at(0).global_size * settings.model.context_length
    bar = tqdm(range(first + 1, steps + 1), initial=first, total=steps, disable=settings.launch.rank != 0)
    for step in bar:
        started = time.perf_counter()
        loss = trainer.step(step)
        bar.set_postfix(loss=f"{loss:.3f}")
        writer.scalar("train/loss", loss, step)
        writer.scalar("train/tokens_per_s", num_tokens / (time.perf_counter() - started), step)
        if step % settings.train.validate_every == 0 or step == steps:
            writer.scalar("validation/loss", trainer.validate(), step)
        if checkpointer.due(step, last=steps):
            checkpointer.save(state, step)
    runtime.log.info("trained to step %d", max(first, steps))
    runtime.log.info("metrics in %s, latest checkpoint %s", settings.writer.folder, checkpointer.latest)


if __name__ == "__main__":
    PretrainRuntime.main(train)
