"""The rollout of reinforcement learning: it generates with its own policy, whose weights the trainer publishes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from itertools import repeat
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, PositiveInt

from runtime_di.errors import Problem, ServiceError
from runtime_di.providers.grids.service import Grids
from runtime_di.providers.rng.streams import RandomStreams
from runtime_di.settings.section import Section

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class RolloutSettings(Section):
    """How the policy generates samples."""

    num_tokens: PositiveInt = 16
    """Number of tokens to generate after each prompt."""
    temperature: Annotated[float, Field(ge=1e-6, allow_inf_nan=False)] = 1.0
    """Divisor of the logits: below 1, likely tokens become more likely. The minimum always draws the most likely token;
    a lower value would draw the same, and the gradients of its likelihood would overflow."""


class Rollout:
    """Generation on the rollout grid; a rank that only trains takes part in `update` alone.

    Attributes:
        version: number of weight updates.
    """

    def __init__(self, settings: RolloutSettings, grids: Grids, streams: RandomStreams | None) -> None:
        """Draw from the ``data`` stream of the rollout grid, which differs between its data-parallel ranks."""
        self.version = 0
        self._settings, self._link, self._streams = settings, grids.links["weights"], streams
        self._device = grids["rollout"].device_type
        self._policy: nn.Module | None = None
        self._dtypes: list[torch.dtype] = []
        self._is_open = True

    @property
    def is_here(self) -> bool:
        """Whether this rank generates."""
        return self._streams is not None

    def load(self, policy: nn.Module) -> None:
        """Set the model that generates; it maps token ids (batch, length) to logits (batch, length, vocabulary)."""
        self._check()
        self._policy = policy.eval().requires_grad_(False)

    def update(self, trained: nn.Module | None) -> None:
        """Copy the weights of the trained model to the policy; collective over both grids.

        The two models may be sharded differently: whole weights are sent, one at a time, and each rank keeps its shard.
        They may have different dtypes: weights are sent in that of the trained model, and cast to that of the policy.

        Args:
            trained: on the ranks of the trainer, a model with the parameters of the policy, in the same order.

        Raises:
            ServiceError: the rollout is shut down, or has no policy on a rank that generates.
        """
        self._check()
        if self.version == 0:
            self._compare(trained)
        sources = trained.parameters() if trained is not None else repeat(None)
        targets = self._loaded_policy().parameters() if self.is_here else repeat(None)
        for source, target, dtype in zip(sources, targets, self._dtypes, strict=False):
            self._move(source, target, dtype)
        self.version += 1

    def generate(self, prompts: Tensor, size: int) -> Tensor:
        """Generate continuations: prompts (batch, length) to prompts and tokens (batch, length + num_tokens).

        Args:
            prompts: token ids; equal on all ranks of a data-parallel replica.
            size: of the vocabulary; logits beyond it are padding, and never drawn.

        Raises:
            ServiceError: the rollout is shut down, or does not generate on this rank.
        """
        import torch

        self._check()
        policy, tokens = self._loaded_policy(), prompts
        generator = self._streams.generator("data") if self._streams else None
        with torch.no_grad():
            for _ in range(self._settings.num_tokens):
                logits = policy(tokens)[:, -1, :size]
                below = logits - logits.amax(-1, keepdim=True)  # the largest stays 0 at any temperature
                weights = (below / self._settings.temperature).softmax(-1)
                drawn = torch.multinomial(weights, 1, generator=generator)
                tokens = torch.cat((tokens, drawn), dim=1)
        return tokens

    def shut_down(self) -> None:
        """Release the policy; later calls raise an error."""
        self._policy, self._is_open = None, False

    def _compare(self, trained: nn.Module | None) -> None:
        """Check that both models have the same weights, so that no rank waits for ever; publish the dtypes."""
        import torch

        models = [model for model in (trained, self._policy) if model is not None]
        own = [_digest(model) for model in models]
        published = torch.tensor(own[0], device=self._device)
        self._link.publish(published)
        if {*own} != {int(published)}:
            raise _error("has a policy with other weights than the trained model", fix="give both the same parameters")
        known = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
        indices = [known.index(weight.dtype) for weight in models[0].parameters()]
        self._link.publish(sent := torch.tensor(indices, dtype=torch.int64, device=self._device))
        self._dtypes = [known[index] for index in sent.tolist()]

    def _move(self, source: Tensor | None, target: Tensor | None, dtype: torch.dtype) -> None:
        import torch

        if source is not None:
            self._link.publish(weight := _whole(source).to(dtype))
        elif target is not None:
            self._link.publish(weight := torch.empty(target.shape, dtype=dtype, device=target.device))
        if target is not None:
            _fill(target, weight)

    def _loaded_policy(self) -> nn.Module:
        if self._policy is None:
            raise _error("has no policy on this rank", fix="where is_here, call load() before update() and generate()")
        return self._policy

    def _check(self) -> None:
        if not self._is_open:
            raise _error("is shut down", fix="use it inside the runtime's 'with' block")


def open_rollout(settings: RolloutSettings, grids: Grids, rngs: Mapping[str, RandomStreams]) -> Iterator[Rollout]:
    """Open the rollout of this rank, which has no policy yet; it is shut down when the runtime closes."""
    rollout = Rollout(settings, grids, rngs.get("rollout"))
    yield rollout
    rollout.shut_down()


def _digest(model: nn.Module) -> int:
    shapes = [(name, *weight.shape) for name, weight in model.named_parameters()]
    return int.from_bytes(blake2b(str(shapes).encode(), digest_size=7).digest(), "big")


def _whole(weight: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return weight.full_tensor().detach() if isinstance(weight, DTensor) else weight.detach()


def _fill(target: Tensor, weight: Tensor) -> None:
    import torch
    from torch.distributed.tensor import DTensor, Replicate

    if isinstance(target, DTensor):
        mesh = target.device_mesh
        whole = DTensor.from_local(weight, mesh, [Replicate()] * mesh.ndim, run_check=False)
        weight = whole.redistribute(mesh, target.placements)
    with torch.no_grad():
        target.copy_(weight)


def _error(what: str, fix: str) -> ServiceError:
    return ServiceError("The rollout cannot be used:", [Problem("rollout", what, fix=fix)])
