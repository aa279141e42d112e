"""The example GPT: training, and equality of the model on every grid of ranks."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from gpt.model import GPT, GPTSettings, average_gradients, parallelize
from runtime_di.errors import SettingsError
from runtime_di.testing.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

SMALL = GPTSettings(num_layers=2, width=32, num_heads=4, context_length=16)
SIZE = 96
ROUNDING = 1e-6
Step = tuple[float, Tensor, list[Tensor]]


def gpt(seed: int = 7) -> GPT:
    return GPT(SMALL, SIZE, torch.Generator().manual_seed(seed))


def batch(num_sequences: int = 4) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, SIZE, (num_sequences, SMALL.context_length + 1), generator=torch.Generator().manual_seed(3))
    return ids[:, :-1], ids[:, 1:]


def step(model: GPT, tokens: Tensor, targets: Tensor, average: Callable[[GPT], None] = lambda _: None) -> Step:
    """Train one step; return the loss, the norm of the averaged gradients, and these gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = model.loss(tokens, targets)
    loss.backward()
    average(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    whole_gradients = gradients(model)
    optimizer.step()
    return loss.item(), whole(norm), whole_gradients


def gradients(model: GPT) -> list[Tensor]:
    return [whole(parameter.grad).clone() for parameter in model.parameters() if parameter.grad is not None]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_untrained_model_is_nearly_uniform():
    """Before training, all tokens are about equally likely."""
    loss = gpt().loss(*batch())

    assert loss.item() == pytest.approx(math.log(SIZE), abs=0.1)


def test_model_learns():
    """Forty steps on one batch halve its loss."""
    model = gpt()

    losses = [step(model, *batch())[0] for _ in range(40)]

    assert losses[-1] < losses[0] / 2


def test_later_tokens_do_not_change_earlier_logits():
    """A position attends to itself and to earlier positions alone."""
    tokens, _ = batch()
    changed = tokens.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % SIZE

    before, after = gpt()(tokens), gpt()(changed)

    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10], after[:, 10])


def test_order_of_earlier_tokens_matters():
    """Attention depends on positions: in a model of one block, swapping two earlier tokens changes the last logits."""
    model = GPT(SMALL.model_copy(update={"num_layers": 1}), SIZE, torch.Generator().manual_seed(7))
    tokens, _ = batch()
    swapped = tokens[:, [1, 0, *range(2, tokens.size(1))]]

    difference = model(tokens)[:, -1] - model(swapped)[:, -1]

    assert difference.abs().max() > ROUNDING


def test_weights_follow_from_the_seed():
    """Equal seeds give equal weights, and different seeds different ones."""
    first, same, other = gpt(seed=1), gpt(seed=1), gpt(seed=2)

    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), same.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


def test_width_that_heads_cannot_divide_is_refused():
    """A width that is not a multiple of twice the number of heads is an error that states the rule."""
    with pytest.raises(ValidationError, match="width 36 must be a multiple of twice num_heads 4"):
        GPTSettings(width=36, num_heads=4)


def test_uneven_split_is_refused():
    """One error lists every size that the tensor-parallel size does not divide, before the model is split."""
    five_ranks: Any = SimpleNamespace(size=lambda: 5)

    with pytest.raises(SettingsError) as caught:
        parallelize(gpt(), five_ranks)

    assert str(caught.value) == (
        "The model cannot be split.\n"
        "  num_heads = 4: must be a multiple of the tensor-parallel size 5\n"
        "    fix: change it or that size\n"
        "  padded vocabulary size = 96: must be a multiple of the tensor-parallel size 5\n"
        "    fix: change it or that size"
    )


def split_model() -> tuple[list[Tensor], Tensor, set[tuple[str, ...]]]:
    """On one tensor-parallel rank: the full weights, the logits, and the types of parameters and gradients."""
    dist.init_process_group("gloo")
    model = gpt()
    parallelize(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    logits = model(batch()[0])
    logits.sum().backward()
    kinds = {tuple(type(t).__name__ for t in (parameter, parameter.grad)) for parameter in model.parameters()}
    weights = [whole(parameter.detach()) for parameter in model.parameters()]
    dist.destroy_process_group()
    return weights, logits.detach(), kinds


@pytest.mark.processes
def test_split_model_is_the_same_model():
    """Two tensor-parallel ranks have the weights and the logits of one rank, and all parameters are DTensors."""
    alone = gpt()

    for weights, logits, kinds in run_ranks(split_model, 2):
        assert all(torch.equal(a, b) for a, b in zip(weights, alone.parameters(), strict=True))
        torch.testing.assert_close(logits, alone(batch()[0]))
        assert kinds == {("DTensor", "DTensor")}


def split_step() -> tuple[Tensor, list[Tensor], float]:
    """On one rank of a 2 x 2 grid: a step on this data-parallel rank's sequences, then the loss of the global batch."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = gpt()
    parallelize(model, mesh["tp"])
    tokens, targets = (ids.chunk(2)[mesh["dp"].get_local_rank()] for ids in batch())
    _, norm, means = step(model, tokens, targets, lambda model: average_gradients(model, mesh["dp"].get_group()))
    loss = model.loss(*batch()).item()
    dist.destroy_process_group()
    return norm, means, loss


@pytest.mark.processes
def test_step_on_a_grid_is_the_step_of_one_rank():
    """Data and tensor parallelism together give the gradients, their norm and the next loss of one rank."""
    alone = gpt()
    _, norm, means = step(alone, *batch())
    loss = alone.loss(*batch()).item()

    ranks = run_ranks(split_step, 4)

    for rank_norm, rank_means, rank_loss in ranks:
        torch.testing.assert_close(rank_norm, norm)
        torch.testing.assert_close(rank_means, means)
        assert rank_loss == pytest.approx(loss, rel=1e-4)
        assert all(torch.equal(a, b) for a, b in zip(rank_means, ranks[0][1], strict=True))


def averaged_gradients() -> tuple[list[Tensor], list[Tensor]]:
    """On one data-parallel rank of an unsplit model: its local gradients and the averaged ones."""
    dist.init_process_group("gloo")
    model = gpt()
    tokens, targets = (ids.chunk(2)[dist.get_rank()] for ids in batch())
    model.loss(tokens, targets).backward()
    own = gradients(model)
    average_gradients(model, init_device_mesh("cpu", (2,)).get_group())
    dist.destroy_process_group()
    return own, gradients(model)


@pytest.mark.processes
def test_gradients_are_averaged_bitwise():
    """The averaged gradients of two ranks are half of their sum, bitwise, on both ranks."""
    (own_0, mean_0), (own_1, mean_1) = run_ranks(averaged_gradients, 2)

    for a, b, at_0, at_1 in zip(own_0, own_1, mean_0, mean_1, strict=True):
        assert not torch.equal(a, b)
        assert torch.equal(at_0, (a + b) / 2)
        assert torch.equal(at_1, at_0)


def test_missing_gradient_is_named():
    """Averaging before the backward pass is an error, before any communication."""
    no_group: Any = None

    with pytest.raises(ValueError, match=r"parameter 'embedding.weight' has no gradient; average after backward\(\)"):
        average_gradients(gpt(), no_group)
