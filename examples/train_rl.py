"""Train the pretrained GPT by policy gradients to write tokens that match a pattern.

    torchrun --nproc-per-node 2 examples/train_rl.py
    torchrun --nproc-per-node 2 examples/train_rl.py --grids.rollout.size 1

The first command is colocated: each rank generates and trains. In the second command one rank trains and one generates,
and they send each other samples and weights. The reward is the share of generated tokens that are words in lower case.
The policy starts from the checkpoint of ``make train``; ``--checkpoint.load`` names another.
"""

from __future__ import annotations

from collections.abc import Iterable
from logging import DEBUG, INFO
from pathlib import Path
from typing import Any

from gpt.corpus import Corpus, CorpusSettings
from gpt.settings import GPTSettings
from rl.settings import LearnSettings, Reward, RewardSettings
from runtime_di import Phase, Problem, service
from runtime_di.containers import RLContainer, RLRuntime, RLSettings
from runtime_di.providers.checkpoint import CheckpointSettings
from runtime_di.providers.microbatches import BatchSettings
from runtime_di.providers.tokenizer import FileTokenizerSettings, TokenizerSettings


class PolicySettings(RLSettings):
    """Settings of this script."""

    checkpoint: CheckpointSettings = CheckpointSettings(load=Path("runs/gpt/checkpoints"))
    tokenizer: TokenizerSettings | None = FileTokenizerSettings(path=Path("runs/corpus"))
    batch: BatchSettings = BatchSettings(global_size=32, micro_size=8)
    corpus: CorpusSettings = CorpusSettings()
    model: GPTSettings = GPTSettings()
    learn: LearnSettings = LearnSettings()
    reward: RewardSettings = RewardSettings()

    def rules(self) -> Iterable[Problem]:
        yield from super().rules()
        if self.tokenizer is None:
            what = "not set: the reward reads the text of tokens"
            yield Problem("tokenizer", what, fix="leave it out, or name a tokenizer")
        length = self.learn.prompt_length + self.rollout.num_tokens
        if length > self.model.context_length:
            what = f"prompt and new tokens, {length} in all, exceed model.context_length {self.model.context_length}"
            yield Problem("rollout.num_tokens", what, fix="generate fewer", involves=("learn", "model"))
        for name, grid in self.grids.named.items():
            where = f"grids.{name}.parallel"
            if self.model.num_heads % grid.parallel.tensor:
                what = f"cannot share {self.model.num_heads} attention heads"
                yield Problem(f"{where}.tensor", what, fix="use a divisor of model.num_heads", involves=("model",))
            if grid.parallel.pipeline * grid.parallel.context > 1:
                yield Problem(where, "this model has neither pipeline nor context parallelism", fix="leave both at 1")


class PolicyContainer(RLContainer):
    """Services of this script.

    Inherited from RLContainer: see ``containers/rl.py``.
    Added here: corpus and reward (RUNTIME).
    """

    corpus = service(Phase.RUNTIME, Corpus, RLContainer.settings.provided.corpus)
    reward = service(Phase.RUNTIME, Reward, RLContainer.settings.provided.reward, RLContainer.tokenizer)


class PolicyRuntime(RLRuntime, container=PolicyContainer):
    """The services that `train` uses."""

    settings: PolicySettings
    corpus: Corpus
    reward: Reward


def train(runtime: PolicyRuntime) -> None:
    """Train the policy, from this run's latest checkpoint if there is one, or else from the pretrained GPT."""
    from tqdm import tqdm

    from gpt.training_state import resume_or_load_pretrained  # imports torch, after the settings are validated
    from rl.policy import PolicyTrainer, build_model, exchange_samples, generate_samples, mean_reward

    runtime.start()
    settings, checkpointer = runtime.settings, runtime.checkpointer
    trainer = PolicyTrainer(runtime) if runtime.grids["trainer"].is_here else None
    if runtime.rollout.is_here:
        runtime.rollout.load(build_model(runtime, "rollout"))
    state: dict[str, Any] = {f"{name}_rng": streams for name, streams in runtime.rngs.items()}
    state |= {"trainer": trainer} if trainer else {}
    first, steps = resume_or_load_pretrained(runtime, state), settings.learn.steps
    bar = tqdm(range(first + 1, steps + 1), initial=first, total=steps, disable=settings.launch.rank != 0)
    for step in bar:
        runtime.rollout.update(trainer.model if trainer else None)
        samples = generate_samples(runtime, step)
        reward = mean_reward(runtime, samples)
        received = exchange_samples(runtime, samples)
        if trainer and received:
            trainer.step(received[0], received[1] - reward)
        bar.set_postfix(reward=f"{reward:.3f}")
        runtime.writer.scalar("reward", reward, step)
        if checkpointer.due(step, last=steps):
            checkpointer.save(state, step)
        runtime.log.log(INFO if step in (first + 1, steps) else DEBUG, "mean reward %.3f in step %d", reward, step)


if __name__ == "__main__":
    PolicyRuntime.main(train)
