"""The caller's rule for the embedding stages of a pipeline: disabled until overridden."""

from __future__ import annotations

from runtime_di.errors import ServiceDisabledError
from runtime_di.providers.process_groups.rank_grid import EmbeddingRule


def caller_provided_embedding() -> EmbeddingRule:
    """Keep embeddings on the first and the last stage of a pipeline, unless the caller provides a rule.

    Raises:
        ServiceDisabledError: always; an override provides the rule.
    """
    raise ServiceDisabledError.until_overridden("embedding", "embeddings are on the first and the last stage")
