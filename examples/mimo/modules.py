"""The vision encoder and the language model of the MiMo example, trained together on their own grids."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor, nn

from gpt.model import GPT, average_gradients, parallelize
from gpt.training_state import TrainingState
from mimo.pictures import HEIGHT, draw_samples

if TYPE_CHECKING:
    from runtime_di.providers.grids import ModuleGrid
    from train_mimo import CaptionRuntime

M = TypeVar("M", bound=nn.Module)


class VisionEncoder(nn.Module):
    """Maps pictures (batch, HEIGHT, WIDTH) to features (batch, positions, width), one position a strip of columns."""

    def __init__(self, patch_width: int, hidden_width: int, width: int) -> None:
        super().__init__()
        self.patch_width = patch_width
        self.into = nn.Linear(HEIGHT * patch_width, hidden_width)
        self.out = nn.Linear(hidden_width, width)

    def forward(self, pictures: Tensor) -> Tensor:
        """Encode each strip independently of the others."""
        strips = pictures.unfold(2, self.patch_width, self.patch_width)  # (batch, HEIGHT, positions, columns)
        features: Tensor = self.out(F.gelu(self.into(strips.transpose(1, 2).flatten(2))))
        return features


class LanguageModel(GPT):
    """A GPT whose input is the features of a picture, followed by the tokens of its caption."""

    def caption_loss(self, features: Tensor, captions: Tensor) -> Tensor:
        """Mean cross entropy in nats per token; the first token is predicted from the features alone."""
        x = torch.cat((features, self.embedding(captions[:, :-1])), dim=1)
        for block in self.blocks:
            x = block(x, self.cos[: x.size(1)], self.sin[: x.size(1)])
        logits = self.head(F.layer_norm(x[:, features.size(1) - 1 :], (x.size(2),)))
        return F.cross_entropy(logits.flatten(0, 1), captions.flatten())


class ModuleTrainer(TrainingState, Generic[M]):
    """One module and its optimizer, on the ranks of the module's grid."""

    model: M

    def __init__(self, model: M, grid: ModuleGrid) -> None:
        self.model, self.grid = model, grid
        self.optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)

    def update(self, learning_rate: float) -> None:
        """Average the gradients over the data-parallel ranks, step the optimizer and zero the gradients."""
        if self.grid.size("dp") > 1:
            average_gradients(self.model, self.grid.group("dp"))
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()


class CaptionTrainer:
    """Trains both modules: features go from the vision ranks to the language ranks, and their gradients back."""

    def __init__(self, runtime: CaptionRuntime) -> None:
        self.runtime, self.link = runtime, runtime.grids.links["activations"]
        self.vision = self._module_trainer("vision", self._build_vision)
        self.language = self._module_trainer("language", self._build_language)

    @property
    def state(self) -> dict[str, Any]:
        """Checkpoint state; language has the key 'trainer', under which pretrain_gpt.py saves its model."""
        trainers = {"vision": self.vision, "trainer": self.language}
        rngs = {f"{name}_rng": streams for name, streams in self.runtime.rngs.items()}
        return {name: trainer for name, trainer in trainers.items() if trainer is not None} | rngs

    def step(self, step: int) -> float:
        """Train on one global batch and return its loss, equal on all ranks."""
        settings = self.runtime.settings
        size = self.runtime.microbatches.at(0).global_size
        num_micro = size // (settings.batch.micro_size * self.link.num_blocks)
        pictures, numbers = draw_samples((settings.rng.seed << 32) + step, size)
        micros = zip(pictures.chunk(num_micro), self.runtime.captions.tokens(numbers).chunk(num_micro), strict=True)
        losses = [self._forward_backward(*micro, 1 / num_micro) for micro in micros]
        for trainer in (self.vision, self.language):
            if trainer is not None:
                trainer.update(settings.learn.learning_rate * min(1.0, 10 * step / settings.learn.steps))
        return self._average_loss(sum(losses, torch.zeros(())))

    def _forward_backward(self, pictures: Tensor, captions: Tensor, weight: float) -> Tensor:
        """Run one micro batch forwards and backwards; return this rank's loss on its samples, times ``weight``."""
        grids, width = self.runtime.grids, self.runtime.settings.model.width
        sent, received, loss = None, None, torch.zeros(())
        if self.vision is not None:
            sent = self.vision.model(self._local_samples(pictures, "vision"))
        if self.language is not None:
            captions = self._local_samples(captions, "language")
            received = torch.empty((len(captions), self.runtime.settings.num_positions, width), device=captions.device)
        self.link.carry(None if sent is None else sent.detach(), received)
        if self.language is not None and received is not None:
            loss = self.language.model.caption_loss(received.requires_grad_(), captions) * weight
            torch.autograd.backward(loss)
        gradient = None if sent is None else torch.empty_like(sent)
        self.link.back.carry(None if received is None else received.grad, gradient)
        if sent is not None and gradient is not None:
            sent.backward(gradient * (grids["vision"].grid.sizes["dp"] / grids["language"].grid.sizes["dp"]))
        return loss.detach()

    def _local_samples(self, samples: Tensor, name: str) -> Tensor:
        """Samples of this rank's data-parallel index on a grid."""
        grid = self.runtime.grids[name]
        return samples.chunk(grid.size("dp"))[grid.index("dp")].to(self.runtime.device)

    def _average_loss(self, loss: Tensor) -> float:
        """Average the loss over the language ranks and broadcast it to all ranks."""
        language, loss = self.runtime.grids["language"], loss.to(self.runtime.device)
        if language.is_here:
            dist.all_reduce(loss, group=language.group("dp"))
            loss /= language.size("dp")
        dist.broadcast(loss, language.grid.offset, self.runtime.process_groups.group("dp"))
        return loss.item()

    def _module_trainer(self, name: str, build: Callable[[], M]) -> ModuleTrainer[M] | None:
        """Build a module on the ranks of its grid; ``None`` on the others."""
        grid = self.runtime.grids[name]
        return ModuleTrainer(build(), grid) if grid.is_here else None

    def _build_vision(self) -> VisionEncoder:
        settings = self.runtime.settings
        with self.runtime.rngs["vision"].fork("base"):
            module = VisionEncoder(settings.vision.patch_width, settings.vision.hidden_width, settings.model.width)
        return module.to(self.runtime.device)

    def _build_language(self) -> LanguageModel:
        runtime, grid = self.runtime, self.runtime.grids["language"]
        base = runtime.rngs["language"].generator("base")
        language = LanguageModel(runtime.settings.model, runtime.vocabulary.padded_size, base).to(runtime.device)
        if grid.size("tp") > 1:
            parallelize(language, grid.mesh["tp"])
        return language
