"""The inference entrypoint: loading, the KV cache, and services that the caller provides."""

from __future__ import annotations

import os
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from runtime_di import CapabilityError, LaunchSettings, ServiceDisabledError, ServiceError
from runtime_di.containers import InferenceRuntime, InferenceSettings, TrainingRuntime, TrainingSettings
from runtime_di.providers.kv_cache import KVCache, KVCacheSettings, open_kv_cache
from runtime_di.providers.process_groups.parallel import ParallelSettings
from runtime_di.providers.process_groups.service import open_process_groups
from runtime_di.providers.process_groups.settings import DistributedSettings
from runtime_di.testing import run_ranks

# Services


def test_no_training_service_exists() -> None:
    """It has neither micro batches nor timers, and its checkpointer cannot save."""
    with InferenceRuntime.open() as runtime:
        runtime.start()

        assert not {"microbatches", "timers"} & {*runtime.plan().services}
        assert not hasattr(runtime.checkpointer, "save")
        assert not {"batch", "timers"} & {*InferenceSettings.model_fields}
        assert "folder" not in type(runtime.settings.checkpoint).model_fields


def test_it_loads_what_training_saved(tmp_path: Path) -> None:
    """Weights and vocabulary come from the checkpoint; optimizer and seeds are not loaded."""
    state = {"model": {"weight": torch.arange(6.0)}, "optimizer": torch.ones(3), "seed": 3}
    with TrainingRuntime.open(TrainingSettings(checkpoint={"folder": tmp_path})) as training:
        saved = training.checkpointer.save(state, 5)
    loaded = {"model": {"weight": torch.zeros(6)}}

    with InferenceRuntime.open(InferenceSettings(checkpoint={"load": tmp_path})) as runtime:
        step = runtime.checkpointer.load(loaded)
        vocabulary, latest = runtime.vocabulary, runtime.checkpointer.latest

    assert (step, latest, loaded["model"]["weight"].tolist()) == (5, saved, [0, 1, 2, 3, 4, 5])
    assert (vocabulary.size, vocabulary.origin) == (258, f"checkpoint {saved}")


def test_nothing_to_load() -> None:
    """Without a checkpoint, load() returns None and there is no latest checkpoint."""
    with InferenceRuntime.open() as runtime:
        assert (runtime.checkpointer.load({"step": 0}), runtime.checkpointer.latest) == (None, None)


# Keys and values


class FakeMemorySaver:
    """Stands in for torch_memory_saver and records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool) -> Any:
        self.calls.append(f"region {tag} {enable_cpu_backup}")
        yield

    def pause(self, tag: str) -> None:
        self.calls.append(f"pause {tag}")

    def resume(self, tag: str) -> None:
        self.calls.append(f"resume {tag}")


def test_cache_is_one_tensor_for_its_model() -> None:
    """The tensor has a place for every layer, sequence, head and token; a second call returns the same one."""
    settings = InferenceSettings(cache={"sequences": 3, "length": 16})

    with InferenceRuntime.open(settings) as runtime:
        block = runtime.cache.block(num_layers=2, num_heads=4, head_width=8)

        assert block.shape == (2, 2, 3, 4, 16, 8)
        assert runtime.cache.block(2, 4, 8) is block
        with pytest.raises(ServiceError, match=r"has the shape \(2, 2, 3, 4, 16, 8\), and \(2, 2, 3, 2, 16, 8\) is"):
            runtime.cache.block(2, 2, 8)


def test_paused_cache_is_off_the_device() -> None:
    """With offload, the tensor is tagged and moved off the device once a pause; while paused, block() is an error."""
    saver = FakeMemorySaver()
    cache = KVCache(KVCacheSettings(offload=True), torch.device("cpu"), saver)
    cache.pause()
    block = cache.block(1, 1, 2)

    cache.pause()
    cache.pause()
    with pytest.raises(ServiceError, match="is paused"):
        cache.block(1, 1, 2)
    cache.resume()
    cache.resume()

    assert cache.block(1, 1, 2) is block
    assert saver.calls == ["region kv_cache True", "pause kv_cache", "resume kv_cache"]


def test_cache_without_offload_stays() -> None:
    """Without offload, a pause changes nothing."""
    cache = KVCache(KVCacheSettings(), torch.device("cpu"))
    block = cache.block(1, 1, 2)

    cache.pause()

    assert cache.block(1, 1, 2) is block


OFFLOAD: dict[str, Any] = {"cache": {"offload": True}}


def test_offload_requires_its_package_where_it_is_used() -> None:
    """B20: offload is valid anywhere; an enabled cache names the missing package before anything is built."""
    settings = InferenceSettings(**OFFLOAD)

    with pytest.raises(CapabilityError) as caught:
        InferenceRuntime.open(settings)

    assert str(caught.value).startswith(
        "This machine lacks what InferenceRuntime needs with these settings.\n"
        "  cache.offload = True (from constructor): needs the package 'torch_memory_saver', which is not installed\n"
        "    fix: pip install torch_memory_saver"
    )


def test_unused_cache_requires_no_package() -> None:
    """A cache that is disabled, or that the caller provides, needs no package."""
    provided = KVCache(KVCacheSettings(), torch.device("cpu"))
    with InferenceRuntime.open(InferenceSettings(**OFFLOAD), overrides={"cache": provided}) as runtime:
        assert runtime.cache is provided

    with InferenceRuntime.open(InferenceSettings(cache=None)) as runtime:
        runtime.start()
        with pytest.raises(ServiceDisabledError, match="set 'cache'"):
            runtime.cache


def test_offload_from_the_cpu_is_refused() -> None:
    """Offload on a rank that computes on the CPU is an error, also on a machine with a GPU and the package."""
    opened = open_kv_cache(KVCacheSettings(offload=True), torch.device("cpu"))

    with pytest.raises(ServiceError, match="can be offloaded from a GPU only, and this rank computes on 'cpu'"):
        next(opened)


# Provided by the caller


def launch_values() -> dict[str, Any]:
    """Rank and world size as values; the launch variables are removed from the environment."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name)
    local = {"local_rank": rank, "local_world_size": world_size}
    return {"rank": rank, "world_size": world_size, **local, "master_port": 1}


def reduce_with_own_store(port: int) -> tuple[float, int]:
    launch = LaunchSettings(**launch_values())
    store = TCPStore("127.0.0.1", port, is_master=launch.rank == 0, timeout=timedelta(seconds=30))
    settings = InferenceSettings(launch=launch, parallel={"tensor": 2})
    with InferenceRuntime.open(settings, overrides={"store": store}) as runtime:
        total = torch.tensor(float(launch.rank + 1))
        dist.all_reduce(total, group=runtime.process_groups.group("tp"))
        answer = total.item(), runtime.mesh["tp"].size()
    store.set(f"done {launch.rank}", "1")
    if launch.rank == 0:
        store.wait([f"done {rank}" for rank in range(launch.world_size)])
    return answer


@pytest.mark.processes
def test_rendezvous_on_a_store_of_the_caller(unused_port: int) -> None:
    """With LaunchSettings and a store from the caller, ranks need neither launch variables nor a master address."""
    assert run_ranks(reduce_with_own_store, 2, unused_port) == [(3.0, 2)] * 2


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def adopt_initialised_world(tensor: int) -> tuple[bool, bool, str]:
    dist.init_process_group("gloo")
    launch = LaunchSettings(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=dist.get_rank(),
        local_world_size=dist.get_world_size(),
    )
    settings = InferenceSettings(launch=launch, parallel={"tensor": tensor}, distributed={"timeout_s": 30})
    with InferenceRuntime.open(settings) as runtime:
        runtime.start()
        owned = runtime.process_groups.owned
    still_initialised = dist.is_initialized()
    dist.barrier()
    dist.destroy_process_group()
    return owned, still_initialised, runtime.settings.distributed.backend


@pytest.mark.processes
def test_initialised_world_is_adopted_and_never_destroyed() -> None:
    """An initialised torch.distributed is used, and still works after the runtime is closed."""
    assert run_ranks(adopt_initialised_world, 2, 2) == [(False, True, "auto")] * 2


def test_world_that_differs_is_refused() -> None:
    """An initialised torch.distributed of another size is an error that states the difference."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    launch = LaunchSettings(rank=0, world_size=2, local_world_size=2)
    try:
        with (
            InferenceRuntime.open(InferenceSettings(launch=launch)) as runtime,
            pytest.raises(ServiceError, match=r"launch\.world_size = 2: the initialised torch.distributed has 1"),
        ):
            runtime.start()

        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_embedding_rule_of_the_caller() -> None:
    """A callable from the caller decides which ranks of a pipeline have embeddings."""
    launch = LaunchSettings(rank=1, world_size=4, local_rank=1, local_world_size=4)
    settings = InferenceSettings(launch=launch, parallel={"pipeline": 4}, distributed={"backend": "fake"})

    with InferenceRuntime.open(settings, overrides={"embedding": lambda ranks: (ranks[1], ranks[2])}) as runtime:
        assert runtime.process_groups.ranks("embedding") == (1, 2)
    with InferenceRuntime.open(settings) as runtime:
        assert runtime.process_groups.ranks("embedding") == ()


def test_process_groups_of_the_caller() -> None:
    """Process groups from an override replace the runtime's, and are not destroyed by it."""
    opened = open_process_groups(DistributedSettings(), ParallelSettings(), LaunchSettings(), torch.device("cpu"))
    groups = next(opened)

    with InferenceRuntime.open(overrides={"process_groups": groups}) as runtime:
        runtime.start()
        used, mesh = runtime.process_groups, runtime.mesh
    still_initialised = dist.is_initialized()
    next(opened, None)

    assert used is groups
    assert mesh.mesh_dim_names == ("pp", "dp", "cp", "tp")
    assert (still_initialised, dist.is_initialized()) == (True, False)


def test_store_is_disabled_until_overridden() -> None:
    """Without an override, the error for the store names the default rendezvous and how to provide a store."""
    with InferenceRuntime.open() as runtime, pytest.raises(ServiceDisabledError) as caught:
        runtime.store

    assert str(caught.value) == (
        "Service 'store' is disabled.\n"
        "  store: none was provided, so ranks use the store at launch.master_addr\n"
        "    fix: pass one to open(): overrides={'store': ...}"
    )
