"""The KV cache: keys and values that attention has computed for the sequences being generated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import PositiveInt

from runtime_di.errors import Problem, ServiceError
from runtime_di.settings.capabilities import CudaDevice, Module, Requirement
from runtime_di.settings.section import Section

if TYPE_CHECKING:
    import torch

    from runtime_di.settings.launch import LaunchSettings

_TAG = "kv_cache"


class KVCacheSettings(Section):
    """Number of sequences that are generated at once, and their length."""

    sequences: PositiveInt = 8
    """Sequences for which the cache has room; further sequences are queued."""
    length: PositiveInt = 128
    """Maximum number of tokens of a sequence, its prompt included."""
    offload: bool = False
    """Whether `KVCache.pause` moves the cache from the GPU to the host; needs the package torch_memory_saver."""

    def requires(self, launch: LaunchSettings) -> Iterable[Requirement]:
        """Require the package and a GPU only if the cache is offloaded."""
        return [Module("offload", "torch_memory_saver"), CudaDevice("offload")] if self.offload else []


class MemorySaver(Protocol):
    """The interface of ``torch_memory_saver``: moves tagged allocations to the host and back to the same addresses."""

    def region(self, tag: str, enable_cpu_backup: bool) -> AbstractContextManager[None]:
        """Tag the allocations of the block."""

    def pause(self, tag: str) -> None:
        """Move tagged allocations to the host, and free their GPU memory."""

    def resume(self, tag: str) -> None:
        """Move tagged allocations back to the same addresses."""


class KVCache:
    """One tensor for the keys and values of all layers, allocated once and written in place.

    Attributes:
        sequences: sequences for which it has room.
        length: maximum number of tokens of each.
    """

    def __init__(self, settings: KVCacheSettings, device: torch.device, saver: MemorySaver | None = None) -> None:
        """Allocate nothing yet; ``saver``, if any, moves the cache off the device."""
        self.sequences, self.length = settings.sequences, settings.length
        self._device, self._saver = device, saver
        self._block: torch.Tensor | None = None
        self._paused = False

    def block(self, num_layers: int, num_heads: int, head_width: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the cache of a model: (layers, keys | values, sequences, heads of this rank, length, head width).

        The first call allocates it, filled with zeros; later calls return the same tensor.

        Raises:
            ServiceError: it already has another shape, or is paused.
        """
        import torch

        shape = (num_layers, 2, self.sequences, num_heads, self.length, head_width)
        if self._paused:
            raise _error("is paused: its memory is not on the device", fix="call resume() first")
        if self._block is None:
            with self._saver.region(tag=_TAG, enable_cpu_backup=True) if self._saver else nullcontext():
                self._block = torch.zeros(shape, dtype=dtype, device=self._device)
        if tuple(self._block.shape) != shape:
            what = f"has the shape {tuple(self._block.shape)}, and {shape} is requested"
            raise _error(what, fix="open a runtime for each model")
        return self._block

    def pause(self) -> None:
        """Free the device memory until `resume`; without offload, do nothing."""
        if self._saver and self._block is not None and not self._paused:
            self._saver.pause(_TAG)
            self._paused = True

    def resume(self) -> None:
        """Restore the cache to the device with its contents."""
        if self._saver and self._paused:
            self._saver.resume(_TAG)
            self._paused = False

    def release(self) -> None:
        """Free the memory."""
        self.resume()
        self._block = None


def open_kv_cache(settings: KVCacheSettings, device: torch.device) -> Iterator[KVCache]:
    """Create the cache of this rank; memory is allocated once a model's shape is known.

    Raises:
        ServiceError: offload is set and the device is not a GPU.
    """
    if settings.offload and device.type != "cuda":
        raise _error(f"can be offloaded from a GPU only, and this rank computes on '{device}'", fix="unset it")
    cache = KVCache(settings, device, _open_saver() if settings.offload else None)
    yield cache
    cache.release()


def _open_saver() -> MemorySaver:
    import torch_memory_saver

    saver: Any = torch_memory_saver.torch_memory_saver
    with suppress(AssertionError):  # the program has used it before and chosen its mode
        saver.hook_mode = "torch"  # the other mode works only under LD_PRELOAD
    return saver  # type: ignore[no-any-return]


def _error(what: str, fix: str) -> ServiceError:
    return ServiceError("The KV cache cannot be used:", [Problem("cache", what, fix=fix)])
