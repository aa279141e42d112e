"""Training steps of the GPT: data-parallel, or tensor-parallel through DTensor."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from gpt.model import GPT, average_gradients, parallelize
from gpt.training_state import TrainingState

if TYPE_CHECKING:
    from pretrain_gpt import PretrainRuntime


class Trainer(TrainingState):
    """Trains the GPT, one global batch a step."""

    model: GPT

    def __init__(self, runtime: PretrainRuntime) -> None:
        self.runtime = runtime
        self.model = GPT(runtime.settings.model, runtime.vocabulary.padded_size).to(runtime.device)
        if runtime.process_groups.size("tp") > 1:
            parallelize(self.model, runtime.mesh["tp"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), weight_decay=0.1, betas=(0.9, 0.95))

    def step(self, step: int) -> float:
        """Train on one global batch and return its loss, equal on all ranks."""
        groups = self.runtime.process_groups
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(step)
        self.optimizer.zero_grad()
        loss = self._forward_backward("train", step)
        if groups.size("dp") > 1:
            average_gradients(self.model, groups.group("dp"))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss

    @torch.no_grad()
    def validate(self) -> float:
        """Return the mean loss of four global batches of the validation split, the same ones every time."""
        return sum(self._forward_backward("validation", number) for number in range(4)) / 4

    def _learning_rate(self, step: int) -> float:
        """Linear warmup over the first tenth of the steps, and cosine decay to a tenth of the peak."""
        settings = self.runtime.settings.train
        warmup = min(1.0, 10 * step / settings.steps)
        return settings.learning_rate * warmup * (0.55 + 0.45 * math.cos(math.pi * step / settings.steps))

    def _forward_backward(self, split: str, number: int) -> float:
        """Return the mean loss of a global batch over all ranks; with gradients enabled, accumulate this rank's."""
        settings, groups, batch = self.runtime.settings, self.runtime.process_groups, self.runtime.microbatches.at(0)
        seed = (settings.rng.seed << 32) + number
        samples = self.runtime.corpus.batch(split, seed, batch.global_size, settings.model.context_length)
        local = samples.chunk(groups.size("dp"))[groups.index("dp")].to(self.runtime.device)
        total = torch.zeros((), device=self.runtime.device)
        for micro in torch.split(local, batch.micro_size):
            loss = self.model.loss(micro[:, :-1], micro[:, 1:]) / batch.num_microbatches
            if torch.is_grad_enabled():
                torch.autograd.backward(loss)
            total += loss.detach() / groups.size("dp")
        if groups.size("dp") > 1:
            dist.all_reduce(total, group=groups.group("dp"))
        return total.item()
