"""The next tokens of many sequences at once, by a GPT whose keys and values are cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from gpt import GPT, parallelize

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from gpt_settings import GPTSettings
    from runtime_di.providers.checkpoint_loader import CheckpointLoader
    from runtime_di.providers.kv_cache import KVCache
    from runtime_di.providers.process_groups import ProcessGroups
    from runtime_di.providers.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens that go on sequences of the cache.

    Attributes:
        places: of the sequences in the cache.
        starts: tokens that the cache holds of each by now.
        tokens: of each sequence, from its start on; at least one.
    """

    places: Sequence[int]
    starts: Sequence[int]
    tokens: Sequence[Sequence[int]]


class CachedAttention:
    """Attention of one block over what the cache holds of each sequence, the new tokens included."""

    def __init__(self, cache: Tensor, places: Tensor, positions: Tensor) -> None:
        """Take the block's part of the cache, and where each new token goes: (batch,) and (batch, context)."""
        self.keys, self.values = cache
        self.places, self.positions = places, positions
        self.length = int(positions.max()) + 1
        self.visible = torch.arange(self.length, device=positions.device) <= positions[:, None, :, None]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.keys[self.places[:, None], :, self.positions] = k.transpose(1, 2)
        self.values[self.places[:, None], :, self.positions] = v.transpose(1, 2)
        keys, values = (cached[self.places, :, : self.length] for cached in (self.keys, self.values))
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=self.visible)


class Decoder:
    """A GPT on one tensor-parallel group: the first rank leads, and the others compute their share of what it asks.

    Attributes:
        leads: whether this rank is the one to call `next_logits`; the others call `follow`.
        length: most tokens of a sequence.
        sequences: places of the cache.
    """

    def __init__(self, model: GPT, cache: KVCache, num_tokens: int, groups: ProcessGroups) -> None:
        """Score ``num_tokens`` tokens; rows of the vocabulary beyond them are padding."""
        self.model, self.num_tokens, self.groups = model.eval(), num_tokens, groups
        self.leads, self.sequences = groups.index("tp") == 0, cache.sequences
        self.length = min(cache.length, model.settings.context_length)
        shape = model.settings
        self._cache = cache.block(
            shape.num_layers, shape.num_heads // groups.size("tp"), shape.width // shape.num_heads
        )
        self._device = self._cache.device

    def next_logits(self, batch: Batch) -> Tensor:
        """Take tokens in and score what comes after the last of each sequence: (batch, tokens), on the CPU."""
        self._tell(batch)
        return self._score(batch).cpu()

    def keep_alive(self) -> None:
        """Let the followers know that there is nothing to do, before their patience ends."""
        self._tell(Batch([], [], []))

    def dismiss(self) -> None:
        """End the followers' `follow`."""
        self._tell(None)

    def follow(self) -> None:
        """Compute this rank's share of what the leader asks for, until it is done."""
        while (batch := self._tell(None)) is not None:
            if batch.places:
                self._score(batch)

    def _tell(self, batch: Batch | None) -> Batch | None:
        """Give every rank of the group what the first one has."""
        told = [batch]
        if self.groups.size("tp") > 1:
            dist.broadcast_object_list(told, src=self.groups.ranks("tp")[0], group=self.groups.group("tp"))
        return told[0]

    @torch.no_grad()  # not inference_mode, in which DTensor is several times slower
    def _score(self, batch: Batch) -> Tensor:
        longest = max(map(len, batch.tokens))
        padded = [[*tokens, *[0] * (longest - len(tokens))] for tokens in batch.tokens]
        tokens, starts, places = (
            torch.tensor(given, device=self._device) for given in (padded, batch.starts, batch.places)
        )
        positions = starts[:, None] + torch.arange(longest, device=self._device)
        cos, sin = (table[positions][:, None] for table in (self.model.cos, self.model.sin))
        attends = [CachedAttention(cache, places, positions) for cache in self._cache]
        logits = self.model.score(tokens, cos, sin, attends)
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
    """Make the model and fill it from the checkpoint; collective."""
    model = GPT(settings, vocabulary.padded_size).to(device)
    if groups.size("tp") > 1:
        parallelize(model, mesh["tp"])
    checkpointer.load({"trainer": {"model": get_model_state_dict(model)}})
    return Decoder(model, cache, num_tokens, groups)
