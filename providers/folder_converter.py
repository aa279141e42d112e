"""A converter of checkpoints in folders; imports torch, so it is imported when opened."""

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
from runtime_di.providers.checkpoint_folder import made, publish, sync
from runtime_di.providers.checkpoint_index import Entry, Index, Piece, read_index, write_index
from runtime_di.providers.checkpoint_ranks import Ranks
from runtime_di.providers.checkpoint_storage import TensorReader, write_tensors
from runtime_di.providers.checkpoint_values import write_values
from runtime_di.providers.folder_loader import failures_told
from runtime_di.providers.snapshot import (
    FORMAT,
    SNAPSHOT_FILE,
    CheckpointError,
    Snapshot,
    find_checkpoint,
    read_snapshot,
)

if TYPE_CHECKING:
    from runtime_di.providers.converter import ConversionSettings, TokenizerFiles
    from runtime_di.providers.vocabulary import Vocabulary

_HEADING = "The checkpoint was not converted; nothing was written."
_CUT = ".cut_rows"
_FILE_BYTES = 2**30
Tensors = Iterator[tuple[str, torch.Tensor]]


class FolderConverter:
    """A `Converter` that holds about one file's tensors in memory at a time."""

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
        """Do what `Converter.convert` says."""
        source = find_checkpoint(self._load) or self._load
        snapshot = read_snapshot(source)
        index = read_index(source)
        if problems := [*self._problems(index, snapshot)]:
            raise CheckpointError(_HEADING, problems)
        try:
            with made(self._folder.parent) as parent:
                return self._write(parent, source, index, snapshot)
        except OSError as error:
            fix = "name a conversion.folder that can be made, on a disk with room for the checkpoint"
            problem = Problem(str(error.filename or self._folder), error.strerror or str(error), fix=fix)
            raise CheckpointError(_HEADING, [problem]) from error

    def _write(self, parent: Path, source: Path, index: Index, snapshot: Snapshot) -> Path:
        """Write the new checkpoint aside, and then give it its name."""
        with TemporaryDirectory(dir=parent, prefix=f".{self._folder.name}-") as scratch:
            partial = Path(scratch, self._folder.name)
            partial.mkdir()
            write_index(partial, self._write_tensors(partial, self._converted(source, index)))
            self._write_values(partial, source)
            for file in self._tokenizer_files:
                _copy(file, partial)
            return publish(partial, self._folder, self._told(snapshot))

    def _problems(self, index: Index, snapshot: Snapshot) -> Iterator[Problem]:
        if self._folder.exists():
            yield Problem("conversion.folder", f"there is something at {self._folder}", fix="name a new folder")
        for file in self._tokenizer_files:
            if not file.is_file():
                yield Problem("tokenizer", f"no such file: {file}", fix="name the tokenizer's files, or set it to null")
        if self._settings.single_file and not any(path.startswith(self._settings.model) for path in index):
            what = f"no tensor of the checkpoint begins with {self._settings.model!r}"
            first = next(iter(index), "in no tensor, since there is none")
            yield Problem("conversion.model", what, fix=f"give what the model's begin with, as {first}")
        num_tokens = (snapshot.vocabulary or {}).get("size", 0)
        if self._vocabulary is not None and self._vocabulary.size < num_tokens:
            what = f"room for {self._vocabulary.size} tokens, while the checkpoint has {num_tokens}"
            yield Problem("vocabulary.size", what, fix="raise it, or leave it out")
        for what in self._row_problems(index, snapshot):
            fix = "give the patterns of the tensors with a row for each token"
            yield Problem("conversion.vocabulary_rows", what, fix=fix)

    def _row_problems(self, index: Index, snapshot: Snapshot) -> Iterator[str]:
        """Tell which tensors have other rows than the checkpoint's vocabulary, or without one, than the first has."""
        if self._vocabulary is None:
            return
        rows = {path: index[path].size[0] for path in index if self._has_vocabulary_rows(path) and index[path].size}
        told = {"the checkpoint's vocabulary": snapshot.vocabulary["padded_size"]} if snapshot.vocabulary else rows
        owner, num_rows = next(iter(told.items()), ("", 0))
        for path, own_rows in rows.items():
            if own_rows != num_rows:
                yield f"{path} has {own_rows} rows, and {owner} {num_rows}"
        if not rows and self._vocabulary.padded_size != num_rows:
            patterns = ", ".join(self._settings.vocabulary_rows)
            yield f"no tensor of the checkpoint fits {patterns}, and {self._vocabulary.padded_size} rows are wanted"

    def _has_vocabulary_rows(self, path: str) -> bool:
        named = any(fnmatch(path, pattern) for pattern in self._settings.vocabulary_rows)
        return named and not path.endswith(_CUT) and self._vocabulary is not None

    def _converted(self, source: Path, index: Index) -> Tensors:
        for path, entry in index.items():
            if path.endswith(_CUT) and self._has_vocabulary_rows(path.removesuffix(_CUT)):
                continue  # read with the rows that it was cut from
            if self._settings.single_file and not path.startswith(self._settings.model):
                continue
            tensor = _read(source, path, entry)
            if self._vocabulary is None or not tensor.dim() or not self._has_vocabulary_rows(path):
                yield path, tensor
                continue
            cut = path + _CUT
            kept = [tensor, _read(source, cut, index[cut])] if cut in index else [tensor]
            yield from self._repadded(path, torch.cat(kept), self._vocabulary)

    def _repadded(self, path: str, rows: torch.Tensor, vocabulary: Vocabulary) -> Tensors:
        size, num_rows = vocabulary.size, vocabulary.padded_size
        padded = _padded(rows, size, num_rows)
        yield path, padded
        if len(rows) > num_rows and not self._settings.single_file:
            again = _padded(padded, size, len(rows))
            if not torch.equal(again.view(torch.uint8), rows.view(torch.uint8)):
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
        """Each rank's values as they are; of the weights alone there are none."""
        if self._settings.single_file:
            write_values(folder, 0, {})
            return
        for file in source.glob("values-*.json"):
            _copy(file, folder)

    def _told(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot of the new checkpoint: of the ranks that wrote the old one, or of one for the weights alone."""
        if self._settings.single_file:
            snapshot = replace(snapshot, world_size=1, grids={}, weights=self._settings.model)
        settings = {name: section for name, section in snapshot.settings.items() if name not in snapshot.files}
        if self._vocabulary is not None:
            settings["vocabulary"] = {**settings.get("vocabulary", {}), "divisible_by": self._divisible_by}
        files: dict[str, dict[str, str]] = {}
        if self._tokenizer is not None:
            settings["tokenizer"] = self._tokenizer.rest
            named = {name: file.name for name, file in self._tokenizer.named.items()}
            files = {"tokenizer": named} if named else {}
        vocabulary = self._told_vocabulary(snapshot.vocabulary)
        return replace(snapshot, settings=settings, files=files, vocabulary=vocabulary, format=FORMAT)

    def _told_vocabulary(self, old: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        new = self._vocabulary
        if new is None:
            return old
        if old is None:
            return asdict(new)
        dummy_rows = old.get("dummy_rows", 0) + new.padded_size - old["padded_size"]
        sizes = {"size": new.size, "padded_size": new.padded_size, "tensor_parallel": new.tensor_parallel}
        return {**old, **sizes, "dummy_rows": dummy_rows}


def _padded(rows: torch.Tensor, num_tokens: int, num_rows: int) -> torch.Tensor:
    """Cut rows off, or add some: like the last one if no token has it, since training has made that one improbable."""
    missing = num_rows - len(rows)
    if missing <= 0:
        return rows[:num_rows]
    like = rows[-1:] if len(rows) > num_tokens else torch.zeros_like(rows[-1:])
    return torch.cat([rows, like.expand(missing, *rows.shape[1:])])


def _read(folder: Path, path: str, entry: Entry) -> torch.Tensor:
    tensor = torch.empty(entry.size, dtype=getattr(torch, entry.dtype))
    reader, planner = TensorReader(folder, {path: entry}), DefaultLoadPlanner(flatten_state_dict=False)
    with failures_told(Ranks(0, 1), _HEADING):
        load({path: tensor}, storage_reader=reader, planner=planner, no_dist=True)
    return tensor


def _batches(tensors: Tensors) -> Iterator[dict[str, torch.Tensor]]:
    batch: dict[str, torch.Tensor] = {}
    for path, tensor in tensors:
        if batch and sum(held.nbytes for held in batch.values()) + tensor.nbytes > _FILE_BYTES:
            yield batch
            batch = {}
        batch[path] = tensor
    if batch:
        yield batch


def _copy(file: Path, folder: Path) -> None:
    copy = folder / file.name
    if copy.exists() or copy.name == SNAPSHOT_FILE:
        problem = Problem(str(file), "has the name of another file of the checkpoint", fix="give it another name")
        raise CheckpointError(_HEADING, [problem])
    shutil.copyfile(file, copy)
    sync(copy)
