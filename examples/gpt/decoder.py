"""Batched decoding of a GPT with a KV cache, on one tensor-parallel group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from gpt.model import GPT, parallelize

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from gpt.settings import GPTSettings
    from runtime_di.providers.checkpoint import CheckpointLoader
    from runtime_di.providers.kv_cache import KVCache
    from runtime_di.providers.process_groups import ProcessGroups
    from runtime_di.providers.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Batch:
    """New tokens of some of the cached sequences.

    Attributes:
        slots: cache slot of each sequence.
        starts: position of each sequence's first new token, which is the number of tokens already in the cache.
        tokens: new tokens of each sequence; at least one.
    """

    slots: Sequence[int]
    starts: Sequence[int]
    tokens: Sequence[Sequence[int]]


class CachedAttention:
    """Attention of one block to the cached and the new tokens of each sequence."""

    def __init__(self, cache: Tensor, slots: Tensor, positions: Tensor) -> None:
        """Use one block's keys and values.

        Args:
            cache: keys and values of the block: (2, slots, heads, length, head width).
            slots: cache slot of each sequence: (batch).
            positions: position of each new token: (batch, context).
        """
        self.keys, self.values = cache
        self.slots, self.positions = slots, positions
        self.length = int(positions.max()) + 1
        self.mask = torch.arange(self.length, device=positions.device) <= positions[:, None, :, None]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.keys[self.slots[:, None], :, self.positions] = k.transpose(1, 2)
        self.values[self.slots[:, None], :, self.positions] = v.transpose(1, 2)
        keys, values = (cached[self.slots, :, : self.length] for cached in (self.keys, self.values))
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=self.mask)


class Decoder:
    """A GPT on one tensor-parallel group: the leader broadcasts each batch, and all ranks of the group compute it.

    Attributes:
        is_leader: whether this is the group's first rank, which calls `next_logits`; the other ranks call `follow`.
        max_length: most tokens of a sequence.
        num_slots: sequences that fit in the cache.
    """

    def __init__(self, model: GPT, cache: KVCache, num_tokens: int, groups: ProcessGroups) -> None:
        """Return logits of the first ``num_tokens`` rows of the vocabulary; the other rows are padding."""
        self.model, self.num_tokens, self.groups = model.eval(), num_tokens, groups
        self.is_leader, self.num_slots = groups.index("tp") == 0, cache.sequences
        self.max_length = min(cache.length, model.settings.context_length)
        shape = model.settings
        self._cache = cache.block(
            shape.num_layers, shape.num_heads // groups.size("tp"), shape.width // shape.num_heads
        )
        self._device = self._cache.device

    def next_logits(self, batch: Batch) -> Tensor:
        """Add the tokens to the cache and return the logits after each sequence's last one: (batch, tokens), on CPU."""
        self._broadcast(batch)
        return self._logits(batch).cpu()

    def keep_alive(self) -> None:
        """Broadcast an empty batch to the followers, so that their broadcast does not time out."""
        self._broadcast(Batch([], [], []))

    def stop_followers(self) -> None:
        """Make `follow` return on the other ranks."""
        self._broadcast(None)

    def follow(self) -> None:
        """Compute this rank's shard of every batch that the leader broadcasts, until the leader stops."""
        while (batch := self._broadcast(None)) is not None:
            if batch.slots:
                self._logits(batch)

    def _broadcast(self, batch: Batch | None) -> Batch | None:
        """Return the leader's batch on every rank of the group."""
        batches = [batch]
        if self.groups.size("tp") > 1:
            dist.broadcast_object_list(batches, src=self.groups.ranks("tp")[0], group=self.groups.group("tp"))
        return batches[0]

    @torch.no_grad()  # not inference_mode, in which DTensor is several times slower
    def _logits(self, batch: Batch) -> Tensor:
        longest = max(map(len, batch.tokens))
        padded = [[*tokens, *[0] * (longest - len(tokens))] for tokens in batch.tokens]
        tokens, starts, slots = (
            torch.tensor(values, device=self._device) for values in (padded, batch.starts, batch.slots)
        )
        positions = starts[:, None] + torch.arange(longest, device=self._device)
        cos, sin = (table[positions][:, None] for table in (self.model.cos, self.model.sin))
        attentions = [CachedAttention(cache, slots, positions) for cache in self._cache]
        logits = self.model.score(tokens, cos, sin, attentions)
        last = torch.tensor([len(tokens) - 1 for tokens in batch.tokens], device=self._device)
        return logits[torch.arange(len(last), device=self._device), last, : self.num_tokens]


def load_decoder(
    settings: GPTSettings,
    vocabulary: Vocabulary,
    num_tokens: int,
    *,
    device: torch.device,
    groups: ProcessGroups,
    mesh: DeviceMesh,
    cache: KVCache,
    checkpointer: CheckpointLoader,
) -> Decoder:
    """Build the model and load its weights from the checkpoint; collective."""
    model = GPT(settings, vocabulary.padded_size).to(device)
    if groups.size("tp") > 1:
        parallelize(model, mesh["tp"])
    checkpointer.load({"trainer": {"model": get_model_state_dict(model)}})
    return Decoder(model, cache, num_tokens, groups)
