"""A small GPT, its tensor-parallel sharding and its data-parallel gradient averaging."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gpt.settings import GPTSettings
from runtime_di import Problem, SettingsError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps queries, keys and values, each (batch, heads, context, head width), to an output of the same shape."""


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend from each position to itself and to the earlier positions."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def rotary_angles(context_length: int, head_width: int) -> Tensor:
    """Rotation angle of each pair of elements at each position: (context, head width / 2)."""
    frequencies = 10_000.0 ** (-torch.arange(0, head_width, 2) / head_width)
    return torch.outer(torch.arange(context_length), frequencies)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the element pairs (i, i + half) of the last dim by their position's angles."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Block(nn.Module):
    """A pre-norm transformer block: attention and MLP, each with a residual connection.

    Rows of ``qkv`` are ordered (head, q|k|v, element), so that a tensor-parallel shard has whole heads; the forward
    pass infers the number of local heads from the shape. The norms have no weights: under tensor parallelism every
    parameter is a DTensor, so that optimizers and gradient clipping need not handle a mixture.
    """

    def __init__(self, settings: GPTSettings) -> None:
        super().__init__()
        self.width, self.dropout = settings.width, settings.dropout
        self.head_width = settings.width // settings.num_heads
        self.qkv = nn.Linear(settings.width, 3 * settings.width, bias=False)
        self.out = nn.Linear(settings.width, settings.width, bias=False)
        self.up = nn.Linear(settings.width, 4 * settings.width, bias=False)
        self.down = nn.Linear(4 * settings.width, settings.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention = causal_attention) -> Tensor:
        """Return the hidden states (batch, context, width) after attention and MLP."""
        x = x + self._dropout(self._attend(self._norm(x), cos, sin, attention))
        return x + self._dropout(self.down(F.gelu(self.up(self._norm(x)))))

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, 3, self.head_width))  # (batch, context, local heads, 3, head width)
        q, k, v = heads.transpose(1, 2).unbind(dim=3)
        attended = attention(apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v)
        output: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return output

    def _norm(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.width,))

    def _dropout(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class GPT(nn.Module):
    """Maps token ids (batch, context) to logits (batch, context, padded vocabulary).

    The dummy rows of a padded vocabulary are trained like the others. Their probability falls towards zero, since they
    are never a target; cut the logits to the vocabulary's size before sampling.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, settings: GPTSettings, padded_size: int, generator: torch.Generator | None = None) -> None:
        """Draw all weights from ``generator``, or from torch's default one; equal seeds give equal models."""
        super().__init__()
        self.settings = settings
        self.embedding = nn.Embedding(padded_size, settings.width)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.num_layers))
        self.head = nn.Linear(settings.width, padded_size, bias=False)
        angles = rotary_angles(settings.context_length, settings.width // settings.num_heads)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._init_weights(generator)

    def _init_weights(self, generator: torch.Generator | None) -> None:
        """Draw normal weights with std 0.02; projections into the residual are scaled down by the number of layers."""
        for name, parameter in self.named_parameters():
            into_residual = name.endswith(("out.weight", "down.weight"))
            std = 0.02 / (2 * self.settings.num_layers) ** 0.5 if into_residual else 0.02
            nn.init.normal_(parameter, std=std, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the token after each position."""
        length = tokens.size(1)
        return self.score(tokens, self.cos[:length], self.sin[:length], [causal_attention] * len(self.blocks))

    def score(self, tokens: Tensor, cos: Tensor, sin: Tensor, attentions: Iterable[Attention]) -> Tensor:
        """Return the logits of tokens whose positions have these angles, with one attention function a block."""
        x = self.embedding(tokens)
        for block, attention in zip(self.blocks, attentions, strict=True):
            x = block(x, cos, sin, attention)
        logits: Tensor = self.head(F.layer_norm(x, (self.settings.width,)))
        return logits

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy in nats per token."""
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())


def parallelize(model: GPT, tp_mesh: DeviceMesh) -> None:
    """Shard the weights over a one-dimensional mesh; tokens and logits are replicated on all of its ranks.

    The first rank's weights are the ones that are sharded.

    Raises:
        SettingsError: the mesh size divides the number of heads or the padded vocabulary size with a remainder.
    """
    sizes = {"num_heads": model.settings.num_heads, "padded vocabulary size": model.embedding.num_embeddings}
    problems = [
        Problem(
            name,
            f"must be a multiple of the tensor-parallel size {tp_mesh.size()}",
            str(size),
            fix="change it or that size",
        )
        for name, size in sizes.items()
        if size % tp_mesh.size()
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
    """Replace each gradient by its mean over the group's ranks, in one all-reduce; call it on every rank of the group.

    Of a DTensor, the local shard is averaged: all ranks of the group must have the same shard. All gradients must have
    one dtype.
    """
    gradients = [_local_gradient(name, parameter) for name, parameter in model.named_parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    flat /= group.size()
    for gradient, mean in zip(
        gradients, flat.split_with_sizes([gradient.numel() for gradient in gradients]), strict=True
    ):
        gradient.copy_(mean.view_as(gradient))


def _local_gradient(name: str, parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        raise ValueError(f"parameter '{name}' has no gradient; average after backward(), which must reach it")
    return parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
