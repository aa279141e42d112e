"""A small GPT, and what splits it over tensor- and data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gpt_settings import GPTSettings
from runtime_di import Problem, SettingsError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries, keys and values, each (batch, heads, context, head width), to the values' mixture of the same shape."""


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Let each position attend to itself and to what precedes it."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def rotary_angles(context_length: int, head_width: int) -> Tensor:
    """Angle by which each position turns each pair of elements: (context, head width / 2)."""
    frequencies = 10_000.0 ** (-torch.arange(0, head_width, 2) / head_width)
    return torch.outer(torch.arange(context_length), frequencies)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn element pairs (i, i + half) of the last dim by their position's angles."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Block(nn.Module):
    """Attention and MLP, each on the normalised stream and added to it.

    Rows of ``qkv`` are ordered (head, q|k|v, element), so that an equal share of rows is a share of whole heads and
    the forward pass finds out by itself how many heads are here. Norms have no weights: under tensor parallelism
    every parameter is a DTensor, and optimizers and gradient clipping never see a mixture.
    """

    def __init__(self, settings: GPTSettings) -> None:
        super().__init__()
        self.width, self.dropout = settings.width, settings.dropout
        self.head_width = settings.width // settings.num_heads
        self.qkv = nn.Linear(settings.width, 3 * settings.width, bias=False)
        self.out = nn.Linear(settings.width, settings.width, bias=False)
        self.up = nn.Linear(settings.width, 4 * settings.width, bias=False)
        self.down = nn.Linear(4 * settings.width, settings.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend = causal) -> Tensor:
        """Add what attention and the MLP say to the stream (batch, context, width)."""
        x = x + self._drop(self._attend(self._norm(x), cos, sin, attend))
        return x + self._drop(self.down(F.gelu(self.up(self._norm(x)))))

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, 3, self.head_width))  # (batch, context, heads here, 3, head width)
        q, k, v = heads.transpose(1, 2).unbind(dim=3)
        mixed = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        output: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return output

    def _norm(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.width,))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class GPT(nn.Module):
    """Token ids (batch, context) to logits (batch, context, padded vocabulary).

    Dummy rows of a padded vocabulary are trained like the rest and soon get no probability, since no target names
    them; cut the logits to the vocabulary's size before sampling.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, settings: GPTSettings, padded_size: int, generator: torch.Generator | None = None) -> None:
        """Draw all weights from ``generator``, or from torch's own: equal seeds give equal models on every grid."""
        super().__init__()
        self.settings = settings
        self.embedding = nn.Embedding(padded_size, settings.width)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.num_layers))
        self.head = nn.Linear(settings.width, padded_size, bias=False)
        angles = rotary_angles(settings.context_length, settings.width // settings.num_heads)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._initialise(generator)

    def _initialise(self, generator: torch.Generator | None) -> None:
        """Draw weights of deviation 0.02, smaller where a block adds to the stream, so that its scale stays."""
        for name, parameter in self.named_parameters():
            adds = name.endswith(("out.weight", "down.weight"))
            std = 0.02 / (2 * self.settings.num_layers) ** 0.5 if adds else 0.02
            nn.init.normal_(parameter, std=std, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """Score the token after each position."""
        length = tokens.size(1)
        return self.score(tokens, self.cos[:length], self.sin[:length], [causal] * len(self.blocks))

    def score(self, tokens: Tensor, cos: Tensor, sin: Tensor, attends: Iterable[Attend]) -> Tensor:
        """The same for tokens at the positions of these angles, with the attention of each block given."""
        x = self.embedding(tokens)
        for block, attend in zip(self.blocks, attends, strict=True):
            x = block(x, cos, sin, attend)
        logits: Tensor = self.head(F.layer_norm(x, (self.settings.width,)))
        return logits

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy in nats per token."""
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())


def parallelize(model: GPT, tp_mesh: DeviceMesh) -> None:
    """Split the weights over a mesh of one axis; tokens and logits stay whole on every rank of it.

    The first rank's weights are the ones that are split.

    Raises:
        SettingsError: the axis cannot share the heads or the vocabulary evenly.
    """
    shares = {"num_heads": model.settings.num_heads, "padded vocabulary size": model.embedding.num_embeddings}
    problems = [
        Problem(
            name,
            f"must be a multiple of the tensor-parallel size {tp_mesh.size()}",
            str(share),
            fix="change it or that size",
        )
        for name, share in shares.items()
        if share % tp_mesh.size()
    ]
    if problems:
        raise SettingsError("The model cannot be split.", problems)
    block = {"qkv": ColwiseParallel(), "out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    plan = {f"blocks.*.{name}": style for name, style in block.items()}
    plan["embedding"] = RowwiseParallel(input_layouts=Replicate())
    plan["head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, tp_mesh, plan)


@torch.no_grad()
def average_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Replace each gradient by its mean over the group's ranks, in one all-reduce; call it on every rank of it.

    Of a DTensor, this rank's part is averaged: the group's ranks must hold the same part. All gradients have one dtype.
    """
    gradients = [_local_gradient(name, parameter) for name, parameter in model.named_parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    flat /= group.size()
    for gradient, mean in zip(gradients, flat.split_with_sizes([part.numel() for part in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def _local_gradient(name: str, parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        raise ValueError(f"parameter '{name}' has no gradient; average after backward(), which must reach it")
    return parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
