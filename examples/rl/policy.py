"""The policy of the reinforcement-learning example: sampling, rewards and policy-gradient updates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from gpt.model import GPT, average_gradients, parallelize
from gpt.training_state import TrainingState

if TYPE_CHECKING:
    from train_rl import PolicyRuntime


def build_model(runtime: PolicyRuntime, name: str) -> GPT:
    """Build the GPT of a grid, sharded over the grid's tensor-parallel ranks."""
    grid, generator = runtime.grids[name], runtime.rngs[name].generator("base")
    model = GPT(runtime.settings.model, runtime.vocabulary.padded_size, generator).to(runtime.device)
    if grid.size("tp") > 1:
        parallelize(model, grid.mesh["tp"])
    return model


def generate_samples(runtime: PolicyRuntime, step: int) -> tuple[Tensor, Tensor] | None:
    """Generate and score this rank's samples of a step; ``None`` on ranks outside the rollout grid.

    Returns:
        Token ids of prompts and answers (local samples, length), and rewards (local samples).
    """
    settings, grid = runtime.settings, runtime.grids["rollout"]
    if not grid.is_here:
        return None
    seed, length = (settings.rng.seed << 32) + step, settings.learn.prompt_length
    prompts = runtime.corpus.batch("train", seed, runtime.microbatches.at(0).global_size, length)[:, :length]
    local = prompts.chunk(grid.size("dp"))[grid.index("dp")].to(runtime.device)
    sequences = runtime.rollout.generate(local, runtime.vocabulary.size)
    rewards = [runtime.reward(tokens[length:]) for tokens in sequences.tolist()]
    return sequences, torch.tensor(rewards, device=runtime.device)


def mean_reward(runtime: PolicyRuntime, samples: tuple[Tensor, Tensor] | None) -> float:
    """Average the rewards of all ranks' samples; collective over the world."""
    total = torch.zeros(2, device=runtime.device)
    if samples is not None:
        _, rewards = samples
        total += torch.stack((rewards.sum(), torch.tensor(len(rewards), device=runtime.device)))
    dist.all_reduce(total, group=runtime.process_groups.group("dp"))
    return (total[0] / total[1]).item()


def exchange_samples(runtime: PolicyRuntime, samples: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
    """Send samples from the rollout ranks to the trainer ranks; collective over both grids.

    Returns:
        Token ids and rewards of this rank's samples; ``None`` on ranks outside the trainer grid.
    """
    settings, grid, link = runtime.settings, runtime.grids["trainer"], runtime.grids.links["samples"]
    received = None
    if grid.is_here:
        num_samples = runtime.microbatches.at(0).global_size // grid.size("dp")
        length = settings.learn.prompt_length + settings.rollout.num_tokens
        sequences = torch.empty((num_samples, length), dtype=torch.int64, device=runtime.device)
        received = sequences, torch.empty(num_samples, device=runtime.device)
    for rows, into in zip(samples or (None, None), received or (None, None), strict=True):
        link.carry(rows, into)
    return received


class PolicyTrainer(TrainingState):
    """Trains the policy by policy gradients: samples with a positive advantage become likelier."""

    def __init__(self, runtime: PolicyRuntime) -> None:
        self.runtime, self.grid = runtime, runtime.grids["trainer"]
        self.model = build_model(runtime, "trainer")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95))

    def step(self, sequences: Tensor, advantages: Tensor) -> None:
        """Update the policy with this rank's token ids and their advantages."""
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
        """Mean log-probability of the tokens after the prompt, at the temperature of the rollout: (batch)."""
        settings, size = self.runtime.settings, self.runtime.vocabulary.size
        logits = self.model(tokens[:, :-1])[:, settings.learn.prompt_length - 1 :, :size]
        likelihoods = (logits / settings.rollout.temperature).log_softmax(-1)
        drawn = tokens[:, settings.learn.prompt_length :, None]
        mean: Tensor = likelihoods.gather(-1, drawn).squeeze(-1).mean(-1)
        return mean
