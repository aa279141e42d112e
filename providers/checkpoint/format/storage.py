"""Tensors of a checkpoint on disk, as the storage layer of torch.distributed.checkpoint.

Loading executes no code, because no file is a pickle: tensors are in safetensors files, and a JSON index, which is
checked against a schema, names the file of each piece of a tensor. Why torch's own storage layers are not used:

- ``FileSystemReader`` unpickles ``.metadata`` and byte entries. An allow-list would have to contain private classes,
  whose attributes a pickle may still set, and tensors would still go through ``torch.load``, whose list of safe globals
  any package may extend.
- ``HuggingFaceStorageWriter`` cannot write several pieces of a tensor on one rank and refuses tied weights; its reader
  opens every file on every rank, and treats the tensors of a missing file as tensors that need no reading.

Planning, deduplication and resharding are torch's, through its public interface.
"""

from __future__ import annotations

import math
import stat
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from runtime_di.providers.checkpoint.format.folder import sync
from runtime_di.providers.checkpoint.format.index import Entry, Index, Piece, write_index

_FILE_BYTES = 2**30


class TensorWriter(StorageWriter):
    """Writes this rank's pieces, and on the coordinator the index, to stable storage."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__()
        self._folder, self._rank = folder, rank

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        for number, items in enumerate(_batches(plan.items)):
            file = self._folder / f"tensors-{self._rank:05d}-{number:05d}.safetensors"
            tensors = {_name(item): _on_cpu(cast("torch.Tensor", planner.resolve_data(item))) for item in items}
            if len(tensors) < len(items):
                raise ValueError(f"two pieces share a name, among {', '.join(tensors)}")
            write_tensors(file, tensors)
            results += [WriteResult(item.index, _num_bytes(item), (file.name, _name(item))) for item in items]
        sync(self._folder)
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index: result.storage_data for of_rank in results for result in of_rank}
        index = {
            path: Entry(
                str(tensor.properties.dtype).removeprefix("torch."),
                list(tensor.size),
                [
                    Piece(list(chunk.offsets), list(chunk.sizes), *places[MetadataIndex(path, chunk.offsets)])
                    for chunk in tensor.chunks
                ],
            )
            for path, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
        }
        write_index(self._folder, index)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: a writer writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the folder exists."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, Path)


class TensorReader(StorageReader):
    """Reads the parts of an index's pieces that this rank needs."""

    def __init__(self, folder: Path, index: Index) -> None:
        super().__init__()
        self._folder, self._index = folder, index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({path: _stored(entry) for path, entry in self._index.items()})

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        places = {
            MetadataIndex(path, piece.offsets): piece for path, entry in self._index.items() for piece in entry.pieces
        }
        by_file: dict[str, list[tuple[ReadItem, str]]] = defaultdict(list)
        for item in plan.items:
            piece = places[item.storage_index]
            by_file[piece.file].append((item, piece.name))
        for name, items in by_file.items():
            try:
                self._read(self._folder / name, items, planner)
            except Exception as error:  # noqa: BLE001 - safetensors' own class cannot be pickled to other ranks
                raise OSError(f"{self._folder / name} cannot be read: {error}") from None
        return _done(None)

    @staticmethod
    def _read(path: Path, items: list[tuple[ReadItem, str]], planner: LoadPlanner) -> None:
        with safe_open(path, framework="pt", device="cpu") as file:
            for item, name in items:
                region = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
                source = file.get_slice(name)[region] if region else file.get_tensor(name)
                target = planner.resolve_tensor(item).detach()
                if source.shape != target.shape:
                    raise ValueError(f"{name} is smaller than in the index")
                target.copy_(source)
                planner.commit_tensor(item, target)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: a reader reads one checkpoint."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the index is already read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, Path)


def write_tensors(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file to stable storage, with the default mode of new files rather than safetensors' 0600.

    Raises:
        OSError: it cannot be written.
    """
    try:
        file.touch()
        mode = stat.S_IMODE(file.stat().st_mode)
        save_file(dict(tensors), file, {"format": "pt"})
        file.chmod(mode)
    except Exception as error:  # noqa: BLE001 - safetensors' own class cannot be pickled to other ranks
        raise OSError(f"{file} cannot be written: {error}") from None
    sync(file)


def _stored(entry: Entry) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        TensorProperties(dtype=getattr(torch, entry.dtype)),
        torch.Size(entry.size),
        [ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)) for piece in entry.pieces],
    )


def _batches(items: list[WriteItem]) -> Iterator[list[WriteItem]]:
    """Split items into files, so that at most one file's tensors are copied to the host at a time."""
    batch: list[WriteItem] = []
    batch_bytes = 0
    for item in items:
        if batch and batch_bytes + _num_bytes(item) > _FILE_BYTES:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(item)
        batch_bytes += _num_bytes(item)
    if batch:
        yield batch


def _num_bytes(item: WriteItem) -> int:
    """Size of the piece in bytes; torch's ``tensor_storage_size`` is that of the whole tensor."""
    tensor = cast("TensorWriteData", item.tensor_data)
    return math.prod(tensor.chunk.sizes) * tensor.properties.dtype.itemsize


def _name(item: WriteItem) -> str:
    """The path of the tensor, followed by the offsets of the piece if it is not the whole tensor."""
    tensor = cast("TensorWriteData", item.tensor_data)
    return (
        item.index.fqn
        if tensor.chunk.sizes == tensor.size
        else f"{item.index.fqn}@{','.join(map(str, item.index.offset or ()))}"
    )


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Copy to the host; safetensors refuses tensors that share memory, such as tied weights."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
