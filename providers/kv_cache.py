"""The cache of keys and values: what attention has already worked out for the sequences being generated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import PositiveInt

from runtime_di.capabilities import CudaDevice, Module, Requirement
from runtime_di.errors import Problem, ServiceError
from runtime_di.section import Section

if TYPE_CHECKING:
    import torch

    from runtime_di.launch import LaunchSettings

_TAG = "kv_cache"


class KVCacheSettings(Section):
    """How many sequences are generated at once, and how long they get."""

    sequences: PositiveInt = 8
    """Sequences that the cache has room for; further ones wait for their turn."""
    length: PositiveInt = 128
    """Most tokens of a sequence, its prompt included."""
    offload: bool = False
    """Let `KVCache.pause` move the cache from the GPU to the host; needs the package torch_memory_saver."""

    def requires(self, launch: LaunchSettings) -> Iterable[Requirement]:
        """Need the package, and a GPU to free, only where the cache is to be moved."""
        return [Module("offload", "torch_memory_saver"), CudaDevice("offload")] if self.offload else []


class MemorySaver(Protocol):
    """What we use of ``torch_memory_saver``: allocations under a tag, which leave the GPU and come back in place."""

    def region(self, tag: str, enable_cpu_backup: bool) -> AbstractContextManager[None]:
        """Tag what is allocated in the block."""

    def pause(self, tag: str) -> None:
        """Move what is tagged to the host, and give its GPU memory back."""

    def resume(self, tag: str) -> None:
        """Move it back, to the same addresses."""


class KVCache:
    """One tensor for the keys and values of all layers, allocated once and written in place.

    Attributes:
        sequences: sequences that it has room for.
        length: most tokens of each.
    """

    def __init__(self, settings: KVCacheSettings, device: torch.device, saver: MemorySaver | None = None) -> None:
        """Allocate nothing yet; ``saver`` is what moves the cache off the device, if anything does."""
        self.sequences, self.length = settings.sequences, settings.length
        self._device, self._saver = device, saver
        self._block: torch.Tensor | None = None
        self._paused = False

    def block(self, num_layers: int, num_heads: int, head_width: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The cache of a model: (layers, keys | values, sequences, heads of this rank, length, head width).

        The first call allocates it, of zeros; later ones give the same tensor.

        Raises:
            ServiceError: it has another shape already, or is paused.
        """
        import torch

        shape = (num_layers, 2, self.sequences, num_heads, self.length, head_width)
        if self._paused:
            raise _error("is paused: its memory is not on the device", fix="call resume() first")
        if self._block is None:
            with self._saver.region(tag=_TAG, enable_cpu_backup=True) if self._saver else nullcontext():
                self._block = torch.zeros(shape, dtype=dtype, device=self._device)
        if tuple(self._block.shape) != shape:
            what = f"has the shape {tuple(self._block.shape)}, and {shape} is asked for"
            raise _error(what, fix="open a runtime for each model")
        return self._block

    def pause(self) -> None:
        """Give the device's memory back until `resume`; nothing where offload is off."""
        if self._saver and self._block is not None and not self._paused:
            self._saver.pause(_TAG)
            self._paused = True

    def resume(self) -> None:
        """Bring the cache back as it was."""
        if self._saver and self._paused:
            self._saver.resume(_TAG)
            self._paused = False

    def release(self) -> None:
        """Let go of the memory."""
        self.resume()
        self._block = None


def open_kv_cache(settings: KVCacheSettings, device: torch.device) -> Iterator[KVCache]:
    """Make the cache of this rank; memory is taken once a model's shape is known.

    Raises:
        ServiceError: the cache is to be moved off a device that is no GPU.
    """
    if settings.offload and device.type != "cuda":
        raise _error(f"can be offloaded from a GPU only, and this rank computes on '{device}'", fix="unset it")
    cache = KVCache(settings, device, _open_saver() if settings.offload else None)
    yield cache
    cache.release()


def _open_saver() -> MemorySaver:
    import torch_memory_saver

    saver: Any = torch_memory_saver.torch_memory_saver
    with suppress(AssertionError):  # a program that has used it before us has chosen its mode
        saver.hook_mode = "torch"  # the other mode works only under LD_PRELOAD
    return saver  # type: ignore[no-any-return]


def _error(what: str, fix: str) -> ServiceError:
    return ServiceError("The KV cache cannot be used:", [Problem("cache", what, fix=fix)])
