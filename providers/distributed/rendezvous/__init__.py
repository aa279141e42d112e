"""The rendezvous: the store through which the ranks of a job join and leave."""

from runtime_di.providers.distributed.rendezvous.store import caller_provided_store, join_rendezvous

__all__ = [
    "caller_provided_store",
    "join_rendezvous",
]
