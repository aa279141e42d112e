"""Converts checkpoints in folders; imports torch, so it is imported when opened."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load

from runtime_di.errors import Problem
from runtime_di.providers.checkpoint.format.folder import created_folder, publish, sync
from runtime_di.providers.checkpoint.format.index import Entry, Index, Piece, read_index, write_index
from runtime_di.providers.checkpoint.format.snapshot import (
    FORMAT,
    SNAPSHOT_FILE,
    CheckpointError,
    Snapshot,
    find_checkpoint,
    read_snapshot,
)
from runtime_di.providers.checkpoint.format.storage import TensorReader, write_tensors
from runtime_di.providers.checkpoint.format.values import write_values
from runtime_di.providers.checkpoint.rank_sync import RankSync

if TYPE_CHECKING:
    from runtime_di.providers.converter.settings import ConversionSettings
    from runtime_di.providers.converter.tokenizer_files import TokenizerFiles
    from runtime_di.providers.vocabulary import Vocabulary

_HEADING = "The checkpoint was not converted; nothing was written."
_CUT = ".cut_rows"
_FILE_BYTES = 2**30
Tensors = Iterator[tuple[str, torch.Tensor]]


class FolderConverter:
    """A `Converter` that keeps about one file's tensors in memory at a time."""

    def __init__(
        self,
        load: Path,
        folder: Path,
        settings: ConversionSettings,
        vocabulary: Vocabulary | None,
        tokenizer: TokenizerFiles | None,
        *,
        divisible_by: int,
    ) -> None:
        self._load, self._folder, self._settings = load, folder, settings
        self._vocabulary, self._divisible_by, self._tokenizer = vocabulary, divisible_by, tokenizer
        self._tokenizer_files = [*tokenizer.named.values(), *tokenizer.beside] if tokenizer else []

    def convert(self) -> Path:
        """See `Converter.convert`."""
        source = find_checkpoint(self._load) or self._load
        snapshot = read_snapshot(source)
        index = read_index(source)
        if problems := [*self._problems(index, snapshot)]:
            raise CheckpointError(_HEADING, problems)
        try:
            with created_folder(self._folder.parent) as parent:
                return self._write(parent, source, index, snapshot)
        except OSError as error:
            fix = "name a conversion.folder that can be created, on a disk with room for the checkpoint"
            problem = Problem(str(error.filename or self._folder), error.strerror or str(error), fix=fix)
            raise CheckpointError(_HEADING, [problem]) from error

    def _write(self, parent: Path, source: Path, index: Index, snapshot: Snapshot) -> Path:
        """Write the new checkpoint to a temporary folder, then rename it."""
        with TemporaryDirectory(dir=parent, prefix=f".{self._folder.name}-") as scratch:
            partial = Path(scratch, self._folder.name)
            partial.mkdir()
            write_index(partial, self._write_tensors(partial, self._converted(source, index)))
            self._write_values(partial, source)
            for file in self._tokenizer_files:
                _copy(file, partial)
            return publish(partial, self._folder, self._new_snapshot(snapshot))

    def _problems(self, index: Index, snapshot: Snapshot) -> Iterator[Problem]:
        if self._folder.exists():
            yield Problem("conversion.folder", f"{self._folder} already exists", fix="name a new folder")
        for file in self._tokenizer_files:
            if not file.is_file():
                yield Problem("tokenizer", f"no such file: {file}", fix="name the tokenizer's files, or set it to null")
        if self._settings.single_file and not any(path.startswith(self._settings.model) for path in index):
            what = f"the path of no tensor begins with {self._settings.model!r}"
            first = f", such as {next(iter(index))}" if index else "; this checkpoint contains none"
            yield Problem("conversion.model", what, fix=f"set it to the prefix of the model's tensors{first}")
        num_tokens = (snapshot.vocabulary or {}).get("size", 0)
        if self._vocabulary is not None and self._vocabulary.size < num_tokens:
            what = f"room for {self._vocabulary.size} tokens, while the checkpoint has {num_tokens}"
            yield Problem("vocabulary.size", what, fix="raise it, or leave it out")
        for what in self._row_problems(index, snapshot):
            fix = "set it to the patterns of the tensors with one row a token"
            yield Problem("conversion.vocabulary_rows", what, fix=fix)

    def _row_problems(self, index: Index, snapshot: Snapshot) -> Iterator[str]:
        """Yield the tensors whose rows differ from the checkpoint's vocabulary, or else from the first tensor."""
        if self._vocabulary is None:
            return
        rows = {path: index[path].size[0] for path in index if self._has_vocabulary_rows(path) and index[path].size}
        expected = {"the checkpoint's vocabulary": snapshot.vocabulary["padded_size"]} if snapshot.vocabulary else rows
        owner, num_rows = next(iter(expected.items()), ("", 0))
        for path, own_rows in rows.items():
            if own_rows != num_rows:
                yield f"{path} has {own_rows} rows, and {owner} {num_rows}"
        if not rows and self._vocabulary.padded_size != num_rows:
            patterns = ", ".join(self._settings.vocabulary_rows)
            yield f"no tensor of the checkpoint matches {patterns}, and {self._vocabulary.padded_size} rows are needed"

    def _has_vocabulary_rows(self, path: str) -> bool:
        named = any(fnmatch(path, pattern) for pattern in self._settings.vocabulary_rows)
        return named and not path.endswith(_CUT) and self._vocabulary is not None

    def _converted(self, source: Path, index: Index) -> Tensors:
        for path, entry in index.items():
            if path.endswith(_CUT) and self._has_vocabulary_rows(path.removesuffix(_CUT)):
                continue  # read together with the rows from which it was cut
            if self._settings.single_file and not path.startswith(self._settings.model):
                continue
            tensor = _read(source, path, entry)
            if self._vocabulary is None or not tensor.dim() or not self._has_vocabulary_rows(path):
                yield path, tensor
                continue
            cut = path + _CUT
            blocks = [tensor, _read(source, cut, index[cut])] if cut in index else [tensor]
            yield from self._repadded(path, torch.cat(blocks), self._vocabulary)

    def _repadded(self, path: str, rows: torch.Tensor, vocabulary: Vocabulary) -> Tensors:
        size, num_rows = vocabulary.size, vocabulary.padded_size
        padded = _padded(rows, size, num_rows)
        yield path, padded
        if len(rows) > num_rows and not self._settings.single_file:
            restored = _padded(padded, size, len(rows))
            if not torch.equal(restored.view(torch.uint8), rows.view(torch.uint8)):
                yield path + _CUT, rows[num_rows:]

    def _write_tensors(self, folder: Path, tensors: Tensors) -> Index:
        index: Index = {}
        for number, batch in enumerate([dict(tensors)] if self._settings.single_file else _batches(tensors)):
            file = "model.safetensors" if self._settings.single_file else f"tensors-00000-{number:05d}.safetensors"
            names = {path: self._name(path) for path in batch}
            write_tensors(folder / file, {names[path]: batch[path].contiguous() for path in batch})
            for path, tensor in batch.items():
                size = list(tensor.shape)
                piece = Piece([0] * len(size), size, file, names[path])
                index[path] = Entry(str(tensor.dtype).removeprefix("torch."), size, [piece])
        return index

    def _name(self, path: str) -> str:
        return path.removeprefix(self._settings.model) if self._settings.single_file else path

    def _write_values(self, folder: Path, source: Path) -> None:
        """Copy each rank's values unchanged; a checkpoint of the weights alone has none."""
        if self._settings.single_file:
            write_values(folder, 0, {})
            return
        for file in source.glob("values-*.json"):
            _copy(file, folder)

    def _new_snapshot(self, old: Snapshot) -> Snapshot:
        """The snapshot of the new checkpoint: the old layout, or the layout of one rank for the weights alone."""
        if self._settings.single_file:
            old = replace(old, world_size=1, grids={}, weights=self._settings.model)
        settings = {name: section for name, section in old.settings.items() if name not in old.files}
        if self._vocabulary is not None:
            settings["vocabulary"] = {**settings.get("vocabulary", {}), "divisible_by": self._divisible_by}
        files: dict[str, dict[str, str]] = {}
        if self._tokenizer is not None:
            settings["tokenizer"] = self._tokenizer.rest
            named = {name: file.name for name, file in self._tokenizer.named.items()}
            files = {"tokenizer": named} if named else {}
        vocabulary = self._new_vocabulary(old.vocabulary)
        return replace(old, settings=settings, files=files, vocabulary=vocabulary, format=FORMAT)

    def _new_vocabulary(self, old: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        new = self._vocabulary
        if new is None:
            return old
        if old is None:
            return asdict(new)
        dummy_rows = old.get("dummy_rows", 0) + new.padded_size - old["padded_size"]
        sizes = {"size": new.size, "padded_size": new.padded_size, "tensor_parallel": new.tensor_parallel}
        return {**old, **sizes, "dummy_rows": dummy_rows}


def _padded(rows: torch.Tensor, num_tokens: int, num_rows: int) -> torch.Tensor:
    """Cut rows off, or add some: copies of the last row if no token has it, because training lowers its probability."""
    missing = num_rows - len(rows)
    if missing <= 0:
        return rows[:num_rows]
    added = rows[-1:] if len(rows) > num_tokens else torch.zeros_like(rows[-1:])
    return torch.cat([rows, added.expand(missing, *rows.shape[1:])])


def _read(folder: Path, path: str, entry: Entry) -> torch.Tensor:
    tensor = torch.empty(entry.size, dtype=getattr(torch, entry.dtype))
    reader, planner = TensorReader(folder, {path: entry}), DefaultLoadPlanner(flatten_state_dict=False)
    with RankSync(0, 1).translate_failures(_HEADING):
        load({path: tensor}, storage_reader=reader, planner=planner, no_dist=True)
    return tensor


def _batches(tensors: Tensors) -> Iterator[dict[str, torch.Tensor]]:
    batch: dict[str, torch.Tensor] = {}
    for path, tensor in tensors:
        if batch and sum(queued.nbytes for queued in batch.values()) + tensor.nbytes > _FILE_BYTES:
            yield batch
            batch = {}
        batch[path] = tensor
    if batch:
        yield batch


def _copy(file: Path, folder: Path) -> None:
    copy = folder / file.name
    if copy.exists() or copy.name == SNAPSHOT_FILE:
        problem = Problem(str(file), "has the name of another file of the checkpoint", fix="rename it")
        raise CheckpointError(_HEADING, [problem])
    shutil.copyfile(file, copy)
    sync(copy)
