"""The world: torch.distributed, joined after a rendezvous or adopted from the caller."""

from runtime_di.providers.distributed.agreement import Agreement, agreement_of
from runtime_di.providers.distributed.rendezvous.store import caller_provided_store
from runtime_di.providers.distributed.settings import WorldSettings
from runtime_di.providers.distributed.world import World, join_world

__all__ = [
    "Agreement",
    "World",
    "WorldSettings",
    "agreement_of",
    "caller_provided_store",
    "join_world",
]
