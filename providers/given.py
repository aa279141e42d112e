"""What a caller may bring to an opening: ``open(..., overrides={"store": store})``; by default there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime_di.errors import Problem, ServiceDisabledError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from runtime_di.providers.rank_grid import EmbeddingRule


def no_store() -> Store:
    """Leave ranks to meet on a store of their own, at the launcher's address.

    Raises:
        ServiceDisabledError: always.
    """
    raise _not_given("store", "ranks meet at launch.master_addr")


def no_embedding() -> EmbeddingRule:
    """Leave embeddings on the first and the last stage of a pipeline.

    Raises:
        ServiceDisabledError: always.
    """
    raise _not_given("embedding", "embeddings are on the first and the last stage")


def _not_given(name: str, instead: str) -> ServiceDisabledError:
    fix = f"give one to open(): overrides={{'{name}': ...}}"
    return ServiceDisabledError("Nothing was given.", [Problem(name, f"none was given, so {instead}", fix=fix)])
