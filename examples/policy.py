"""The policy of the reinforcement-learning example: a GPT that is sampled from, and one that learns from samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from gpt import GPT, average_gradients, parallelize
from trained import Trained

if TYPE_CHECKING:
    from train_rl import PolicyRuntime


def make_model(runtime: PolicyRuntime, name: str) -> GPT:
    """Make the GPT of a grid, split as the grid's sizes say."""
    grid, generator = runtime.grids[name], runtime.rngs[name].generator("base")
    model = GPT(runtime.settings.model, runtime.vocabulary.padded_size, generator).to(runtime.device)
    if grid.size("tp") > 1:
        parallelize(model, grid.mesh["tp"])
    return model


def sample(runtime: PolicyRuntime, step: int) -> tuple[Tensor, Tensor] | None:
    """Generate this rank's share of a step's samples and judge them: token ids (share, length) and rewards (share)."""
    settings, grid = runtime.settings, runtime.grids["rollout"]
    if not grid.is_here:
        return None
    seed, length = (settings.rng.seed << 32) + step, settings.learn.prompt_length
    prompts = runtime.corpus.batch("train", seed, runtime.microbatches.at(0).global_size, length)[:, :length]
    mine = prompts.chunk(grid.size("dp"))[grid.index("dp")].to(runtime.device)
    sequences = runtime.rollout.generate(mine, runtime.vocabulary.size)
    rewards = [runtime.reward(tokens[length:]) for tokens in sequences.tolist()]
    return sequences, torch.tensor(rewards, device=runtime.device)


def mean_reward(runtime: PolicyRuntime, sampled: tuple[Tensor, Tensor] | None) -> float:
    """Average the rewards of all samples; on every rank."""
    total = torch.zeros(2, device=runtime.device)
    if sampled is not None:
        total += torch.stack((sampled[1].sum(), torch.tensor(len(sampled[1]), device=runtime.device)))
    dist.all_reduce(total, group=runtime.process_groups.group("dp"))
    return (total[0] / total[1]).item()


def pass_on(runtime: PolicyRuntime, sampled: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
    """Bring samples from the ranks that generated them to those that learn from them; collective over both grids."""
    settings, grid, link = runtime.settings, runtime.grids["trainer"], runtime.grids.links["samples"]
    received = None
    if grid.is_here:
        share = runtime.microbatches.at(0).global_size // grid.size("dp")
        length = settings.learn.prompt_length + settings.rollout.num_tokens
        sequences = torch.empty((share, length), dtype=torch.int64, device=runtime.device)
        received = sequences, torch.empty(share, device=runtime.device)
    for rows, into in zip(sampled or (None, None), received or (None, None), strict=True):
        link.carry(rows, into)
    return received


class Learner(Trained):
    """Policy gradients: samples that were better than the average become likelier."""

    def __init__(self, runtime: PolicyRuntime) -> None:
        self.runtime, self.grid = runtime, runtime.grids["trainer"]
        self.model = make_model(runtime, "trainer")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95))

    def step(self, sequences: Tensor, advantages: Tensor) -> None:
        """Learn from this rank's share of the samples."""
        settings, batch = self.runtime.settings, self.runtime.microbatches.at(0)
        for group in self.optimizer.param_groups:
            group.update(lr=settings.learn.learning_rate, weight_decay=0.0)
        self.optimizer.zero_grad()
        for tokens, weights in zip(
            sequences.chunk(batch.num_microbatches), advantages.chunk(batch.num_microbatches), strict=True
        ):
            loss = -(weights * self._log_likelihood(tokens)).mean() / batch.num_microbatches
            torch.autograd.backward(loss)
        if self.grid.size("dp") > 1:
            average_gradients(self.model, self.grid.group("dp"))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def _log_likelihood(self, tokens: Tensor) -> Tensor:
        """Mean log-probability of the tokens after the prompt, as the rollout draws them: (batch)."""
        settings, size = self.runtime.settings, self.runtime.vocabulary.size
        logits = self.model(tokens[:, :-1])[:, settings.learn.prompt_length - 1 :, :size]
        likelihoods = (logits / settings.rollout.temperature).log_softmax(-1)
        drawn = tokens[:, settings.learn.prompt_length :, None]
        mean: Tensor = likelihoods.gather(-1, drawn).squeeze(-1).mean(-1)
        return mean
