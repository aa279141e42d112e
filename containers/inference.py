"""The inference entrypoint: a worker that generates, and saves nothing."""

from __future__ import annotations

from runtime_di.containers.worker import WorkerContainer, WorkerRuntime, WorkerSettings
from runtime_di.phases import Phase
from runtime_di.providers.kv_cache import KVCache, KVCacheSettings, open_kv_cache
from runtime_di.services import service


class InferenceSettings(WorkerSettings):
    """Settings of an inference worker."""

    cache: KVCacheSettings | None = KVCacheSettings()
    """Keys and values of the sequences being generated."""


class InferenceContainer(WorkerContainer):
    """Services of an inference worker."""

    cache = service(Phase.DISTRIBUTED, open_kv_cache, WorkerContainer.settings.provided.cache, WorkerContainer.device)


class InferenceRuntime(WorkerRuntime, container=InferenceContainer):
    """What an inference worker holds."""

    settings: InferenceSettings
    cache: KVCache
