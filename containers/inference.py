"""The inference entrypoint: the services of worker.py, and a KV cache; it loads checkpoints and never saves."""

from __future__ import annotations

from runtime_di.containers.worker import WorkerContainer, WorkerRuntime, WorkerSettings
from runtime_di.phases import Phase
from runtime_di.plan import service
from runtime_di.providers.kv_cache import KVCache, KVCacheSettings, open_kv_cache


class InferenceSettings(WorkerSettings):
    """Settings of an inference process."""

    cache: KVCacheSettings | None = KVCacheSettings()
    """KV cache of the sequences in generation."""


class InferenceContainer(WorkerContainer):
    """Services of an inference process.

    Inherited from worker.py: TOKENIZER tokenizer; VOCABULARY vocabulary; RUNTIME log, writer, store, embedding;
    DISTRIBUTED device, process_groups, mesh, shard_mesh, expert_mesh, checkpointer (loads only); RNG rng.
    Declared here: DISTRIBUTED cache.
    """

    cache = service(Phase.DISTRIBUTED, open_kv_cache, WorkerContainer.settings.provided.cache, WorkerContainer.device)


class InferenceRuntime(WorkerRuntime, container=InferenceContainer):
    """The services of an inference process, as attributes."""

    settings: InferenceSettings
    cache: KVCache
