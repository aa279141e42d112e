"""The two modules of the MiMo example, and their training on grids of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor, nn

from gpt import GPT, average_gradients, parallelize
from numerals import HEIGHT, draw
from trained import Trained

if TYPE_CHECKING:
    from runtime_di.providers.grids import ModuleGrid
    from train_mimo import CaptionRuntime

M = TypeVar("M", bound=nn.Module)


class Vision(nn.Module):
    """Pictures (batch, HEIGHT, WIDTH) to features (batch, positions, width), one position a strip of columns."""

    def __init__(self, patch_width: int, hidden_width: int, width: int) -> None:
        super().__init__()
        self.patch_width = patch_width
        self.into = nn.Linear(HEIGHT * patch_width, hidden_width)
        self.out = nn.Linear(hidden_width, width)

    def forward(self, pictures: Tensor) -> Tensor:
        """Encode each strip by itself."""
        strips = pictures.unfold(2, self.patch_width, self.patch_width)  # (batch, HEIGHT, positions, columns)
        features: Tensor = self.out(F.gelu(self.into(strips.transpose(1, 2).flatten(2))))
        return features


class Language(GPT):
    """A GPT that reads features before the tokens of a caption."""

    def caption_loss(self, features: Tensor, captions: Tensor) -> Tensor:
        """Mean cross entropy in nats per token; the features alone tell the first token, and the earlier ones more."""
        x = torch.cat((features, self.embedding(captions[:, :-1])), dim=1)
        for block in self.blocks:
            x = block(x, self.cos[: x.size(1)], self.sin[: x.size(1)])
        logits = self.head(F.layer_norm(x[:, features.size(1) - 1 :], (x.size(2),)))
        return F.cross_entropy(logits.flatten(0, 1), captions.flatten())


class Part(Trained, Generic[M]):
    """A module on its grid."""

    model: M

    def __init__(self, model: M, grid: ModuleGrid) -> None:
        self.model, self.grid = model, grid
        self.optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)

    def learn(self, learning_rate: float) -> None:
        """Follow the gradients, which each data-parallel rank has of its own samples, and forget them."""
        if self.grid.size("dp") > 1:
            average_gradients(self.model, self.grid.group("dp"))
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()


class Captioner:
    """Trains both modules: features pass from the vision ranks to the language ranks, and their gradients back."""

    def __init__(self, runtime: CaptionRuntime) -> None:
        self.runtime, self.link = runtime, runtime.grids.links["activations"]
        self.vision = self._part("vision", self._vision)
        self.language = self._part("language", self._language)

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint holds: language's part is where pretrain_gpt.py has its model."""
        parts = {"vision": self.vision, "trainer": self.language}
        rngs = {f"{name}_rng": streams for name, streams in self.runtime.rngs.items()}
        return {name: part for name, part in parts.items() if part is not None} | rngs

    def step(self, step: int) -> float:
        """Train on one global batch and return its loss, equal on all ranks."""
        settings = self.runtime.settings
        size = self.runtime.microbatches.at(0).global_size
        num_micro = size // (settings.batch.micro_size * self.link.num_blocks)
        pictures, numbers = draw((settings.rng.seed << 32) + step, size)
        micros = zip(pictures.chunk(num_micro), self.runtime.captions.of(numbers).chunk(num_micro), strict=True)
        losses = [self._pass(*micro, 1 / num_micro) for micro in micros]
        for part in (self.vision, self.language):
            if part is not None:
                part.learn(settings.learn.learning_rate * min(1.0, 10 * step / settings.learn.steps))
        return self._told(sum(losses, torch.zeros(())))

    def _pass(self, pictures: Tensor, captions: Tensor, weight: float) -> Tensor:
        """Pass some samples forwards and backwards; return this rank's weighted loss on its share of them."""
        grids, width = self.runtime.grids, self.runtime.settings.model.width
        sent, arrived, loss = None, None, torch.zeros(())
        if self.vision is not None:
            sent = self.vision.model(self._share(pictures, "vision"))
        if self.language is not None:
            captions = self._share(captions, "language")
            arrived = torch.empty((len(captions), self.runtime.settings.num_positions, width), device=captions.device)
        self.link.carry(None if sent is None else sent.detach(), arrived)
        if self.language is not None and arrived is not None:
            loss = self.language.model.caption_loss(arrived.requires_grad_(), captions) * weight
            torch.autograd.backward(loss)
        gradient = None if sent is None else torch.empty_like(sent)
        self.link.back.carry(None if arrived is None else arrived.grad, gradient)
        if sent is not None and gradient is not None:
            sent.backward(gradient * (grids["vision"].grid.sizes["dp"] / grids["language"].grid.sizes["dp"]))
        return loss.detach()

    def _share(self, samples: Tensor, name: str) -> Tensor:
        grid = self.runtime.grids[name]
        return samples.chunk(grid.size("dp"))[grid.index("dp")].to(self.runtime.device)

    def _told(self, loss: Tensor) -> float:
        """Mean of the language ranks' losses, told to all ranks."""
        language, loss = self.runtime.grids["language"], loss.to(self.runtime.device)
        if language.is_here:
            dist.all_reduce(loss, group=language.group("dp"))
            loss /= language.size("dp")
        dist.broadcast(loss, language.grid.offset, self.runtime.process_groups.group("dp"))
        return loss.item()

    def _part(self, name: str, make: Callable[[], M]) -> Part[M] | None:
        grid = self.runtime.grids[name]
        return Part(make(), grid) if grid.is_here else None

    def _vision(self) -> Vision:
        settings = self.runtime.settings
        with self.runtime.rngs["vision"].fork("base"):
            module = Vision(settings.vision.patch_width, settings.vision.hidden_width, settings.model.width)
        return module.to(self.runtime.device)

    def _language(self) -> Language:
        runtime, grid = self.runtime, self.runtime.grids["language"]
        base = runtime.rngs["language"].generator("base")
        language = Language(runtime.settings.model, runtime.vocabulary.padded_size, base).to(runtime.device)
        if grid.size("tp") > 1:
            parallelize(language, grid.mesh["tp"])
        return language
