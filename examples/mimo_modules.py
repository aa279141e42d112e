"""The two modules of the MiMo example, and their training on grids of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor, nn

from gpt import GPT, average_gradients, parallelize
from numerals import HEIGHT, draw

if TYPE_CHECKING:
    from train_mimo import CaptionRuntime


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


class Language(nn.Module):
    """Features, then the bytes of a caption, to the caption's mean cross entropy in nats per byte."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, features: Tensor, captions: Tensor) -> Tensor:
        """Predict the first byte from the features alone, each later one from those before it too."""
        x = torch.cat((features, self.gpt.embedding(captions[:, :-1])), dim=1)
        for block in self.gpt.blocks:
            x = block(x, self.gpt.cos[: x.size(1)], self.gpt.sin[: x.size(1)])
        logits = self.gpt.head(F.layer_norm(x[:, features.size(1) - 1 :], (x.size(2),)))
        return F.cross_entropy(logits.flatten(0, 1), captions.flatten())


class Captioner:
    """Trains both modules: features pass from the vision ranks to the language ranks, and their gradients back."""

    def __init__(self, runtime: CaptionRuntime) -> None:
        self.runtime, self.link = runtime, runtime.grids.links["activations"]
        here = {"vision": self._vision, "language": self._language}
        self.modules = {name: here[name]() for name in runtime.grids.here}
        parameters = [parameter for module in self.modules.values() for parameter in module.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, weight_decay=0.0)

    def step(self, step: int) -> float:
        """Train on one global batch and return its loss, equal on all ranks."""
        settings = self.runtime.settings
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learn.learning_rate * min(1.0, 10 * step / settings.learn.steps)
        self.optimizer.zero_grad()
        size = self.runtime.microbatches.at(0).global_size
        num_micro = size // (settings.batch.micro_size * self.link.num_blocks)
        pictures, captions = (part.chunk(num_micro) for part in draw((settings.rng.seed << 32) + step, size))
        losses = [self._pass(*micro, 1 / num_micro) for micro in zip(pictures, captions, strict=True)]
        for name, module in self.modules.items():
            if self.runtime.grids[name].size("dp") > 1:
                average_gradients(module, self.runtime.grids[name].group("dp"))
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        self.optimizer.step()
        return self._told(sum(losses, torch.zeros(())))

    def _pass(self, pictures: Tensor, captions: Tensor, weight: float) -> Tensor:
        """Pass some samples forwards and backwards; return this rank's weighted loss on its share of them."""
        grids, width = self.runtime.grids, self.runtime.settings.model.width
        sent, arrived, loss = None, None, torch.zeros(())
        if "vision" in self.modules:
            sent = self.modules["vision"](self._share(pictures, "vision"))
        if "language" in self.modules:
            captions = self._share(captions, "language")
            arrived = torch.empty((len(captions), self.runtime.settings.num_positions, width), device=captions.device)
        self.link.carry(None if sent is None else sent.detach(), arrived)
        if arrived is not None:
            loss = self.modules["language"](arrived.requires_grad_(), captions) * weight
            loss.backward()
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

    def _vision(self) -> nn.Module:
        settings = self.runtime.settings
        with self.runtime.rngs["vision"].fork("base"):
            module = Vision(settings.vision.patch_width, settings.vision.hidden_width, settings.model.width)
        return module.to(self.runtime.device)

    def _language(self) -> nn.Module:
        runtime, grid = self.runtime, self.runtime.grids["language"]
        gpt = GPT(runtime.settings.model, runtime.vocabulary.padded_size, runtime.rngs["language"].generator("base"))
        module = Language(gpt.to(runtime.device))
        if grid.size("tp") > 1:
            parallelize(gpt, grid.mesh["tp"])
        return module
