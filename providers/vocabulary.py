"""The vocabulary: its size, the number of embedding rows, and the source of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import PositiveInt, model_validator

from runtime_di.errors import Problem, ServiceDisabledError, VocabularyError
from runtime_di.providers.checkpoint.format.snapshot import read_snapshot
from runtime_di.settings.marks import Mark
from runtime_di.settings.section import Section

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from runtime_di.providers.tokenizer.protocol import Tokenizer


class VocabularySettings(Section):
    """Sizes of the vocabulary; by default those of the loaded checkpoint, or else of the tokenizer."""

    size: Annotated[PositiveInt | None, Mark.NOT_PORTABLE] = None
    """Tokens before padding; with a smaller tokenizer, some rows are unused."""
    padded_size: Annotated[PositiveInt | None, Mark.NOT_PORTABLE] = None
    """Embedding rows; takes precedence over every other size."""
    divisible_by: PositiveInt = 128
    """Each tensor-parallel rank has a multiple of this many rows."""

    @model_validator(mode="after")
    def _padding_only_adds(self) -> Self:
        if self.size is not None and self.padded_size is not None and self.padded_size < self.size:
            raise ValueError(
                f"padded_size {self.padded_size} must be at least size {self.size}: raise it, or leave one of them out"
            )
        return self


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Resolved sizes of the vocabulary.

    Attributes:
        size: tokens before padding.
        padded_size: embedding rows over all tensor-parallel ranks.
        origin: the setting, checkpoint or service that determines the size.
        dummy_rows: embedding rows without a token of the tokenizer, or beyond ``size`` if there is no tokenizer.
        tensor_parallel: ranks that share the embedding.
        overruled: an explicit ``vocabulary.size`` over which the checkpoint's takes precedence.
    """

    size: int
    padded_size: int
    origin: str
    dummy_rows: int = 0
    tensor_parallel: int = 1
    overruled: int | None = None

    def __str__(self) -> str:
        rows = f"{self.padded_size} embedding rows, {self.dummy_rows} of them without a token"
        if self.overruled is not None:
            rows += f"; vocabulary.size {self.overruled} is not used, because the checkpoint takes precedence"
        return f"vocabulary of {self.size} tokens (from {self.origin}): {rows}"


@dataclass(frozen=True, slots=True)
class _SourceSize:
    """The size that a source states; ``padded_size`` only if it must not change."""

    origin: str
    size: int
    padded_size: int | None = None


def padded_size(size: int, divisible_by: int, tensor_parallel: int) -> int:
    """Round a vocabulary up so that every tensor-parallel rank has an equal shard.

    Args:
        size: tokens, added tokens included; at least 1.
        divisible_by: rows of a shard are a multiple of this; at least 1.
        tensor_parallel: ranks that share the embedding; at least 1.

    Returns:
        Embedding rows, a multiple of ``divisible_by * tensor_parallel``.

    Raises:
        VocabularyError: an argument is below 1.
    """
    arguments = {"size": size, "divisible_by": divisible_by, "tensor_parallel": tensor_parallel}
    if wrong := [
        Problem(name, "must be at least 1", value=str(value)) for name, value in arguments.items() if value < 1
    ]:
        raise VocabularyError("A vocabulary cannot be padded.", wrong)
    multiple = divisible_by * tensor_parallel
    return -(-size // multiple) * multiple


def resolve_vocabulary(
    settings: VocabularySettings, tensor_parallel: int, checkpoint: Path | None, tokenizer: Tokenizer | None
) -> Vocabulary:
    """Resolve the vocabulary: an explicit padded size, else the checkpoint, else the larger of tokenizer and ``size``.

    Args:
        settings: the explicit sizes.
        tensor_parallel: ranks that share the embedding.
        checkpoint: the checkpoint to load, or a folder of checkpoints; its weights have its vocabulary.
        tokenizer: the source of token ids; no other size may be smaller than its size.

    Raises:
        VocabularyError: the tokenizer is larger than another size, or the rows cannot be divided evenly.
        CheckpointError: the checkpoint's snapshot cannot be read.
        ServiceDisabledError: no source states a size.
    """
    saved = None if checkpoint is None else _saved(checkpoint, tensor_parallel)
    encoded = None if tokenizer is None else _SourceSize("tokenizer", tokenizer.size)
    chosen = _chosen(settings, saved, encoded)
    rows = chosen.padded_size or padded_size(chosen.size, settings.divisible_by, tensor_parallel)
    problems = [*_shortfalls(settings, saved, encoded), *_uneven(chosen.origin, rows, tensor_parallel)]
    if problems:
        raise VocabularyError("The sizes of the vocabulary contradict each other.", problems)
    overruled = None if settings.size == chosen.size else settings.size
    return Vocabulary(chosen.size, rows, chosen.origin, rows - (encoded or chosen).size, tensor_parallel, overruled)


def _saved(checkpoint: Path, tensor_parallel: int) -> _SourceSize | None:
    """Read the size in a checkpoint; its padded size applies only to the tensor-parallel size that saved it."""
    snapshot = read_snapshot(checkpoint)
    if snapshot.vocabulary is None:
        return None
    size, rows = (snapshot.vocabulary.get(name) for name in ("size", "padded_size"))
    if type(size) is not int or type(rows) is not int or not 1 <= size <= rows:
        what = f"its vocabulary has size {size!r} and padded_size {rows!r}, which are not valid sizes"
        raise VocabularyError("The vocabulary of a checkpoint is malformed.", [Problem(str(checkpoint), what)])
    written_with = snapshot.vocabulary.get("tensor_parallel", snapshot.parallel.get("tp"))
    return _SourceSize(f"checkpoint {checkpoint}", size, rows if written_with == tensor_parallel else None)


def _chosen(settings: VocabularySettings, saved: _SourceSize | None, encoded: _SourceSize | None) -> _SourceSize:
    """Choose the source; between tokenizer and explicit size the larger, which has rows for both."""
    if settings.padded_size is not None:
        sizes = [source.size for source in (saved, encoded) if source is not None]
        size = settings.size or max(sizes, default=settings.padded_size)
        return _SourceSize("vocabulary.padded_size", size, settings.padded_size)
    if saved is not None:
        return saved
    explicit = None if settings.size is None else _SourceSize("vocabulary.size", settings.size)
    candidates = [source for source in (encoded, explicit) if source is not None]
    if not candidates:
        fix = "set tokenizer, vocabulary.size or vocabulary.padded_size, or load a checkpoint that has a vocabulary"
        what = "no tokenizer, no checkpoint and no setting states a size"
        raise ServiceDisabledError("The vocabulary is disabled.", [Problem("vocabulary", what, fix=fix)])
    return max(candidates, key=lambda source: source.size)


def _shortfalls(
    settings: VocabularySettings, saved: _SourceSize | None, encoded: _SourceSize | None
) -> Iterator[Problem]:
    """Yield the sizes that are too small for their tokens; an explicit padded size replaces the checkpoint's."""
    if settings.size is not None:
        fix = "raise it, leave it out, or use a smaller tokenizer"
        yield from _shortfall("vocabulary.size", settings.size, encoded, fix)
    elif settings.padded_size is not None:
        fix = "raise it, or set vocabulary.size to the required number of tokens"
        yield from _shortfall("vocabulary.padded_size", settings.padded_size, saved, fix)
        yield from _shortfall("vocabulary.padded_size", settings.padded_size, encoded, "raise it, or leave it out")
    if settings.padded_size is None and saved is not None:
        fix = "use the checkpoint's own tokenizer, or set vocabulary.padded_size to enlarge the embedding"
        yield from _shortfall(saved.origin, saved.size, encoded, fix)


def _shortfall(where: str, size: int, content: _SourceSize | None, fix: str) -> Iterator[Problem]:
    if content is not None and content.size > size:
        what = f"room for {size} tokens, while the {content.origin} has {content.size}"
        yield Problem(where, what, fix=fix)


def _uneven(where: str, rows: int, tensor_parallel: int) -> Iterator[Problem]:
    if rows % tensor_parallel:
        what = f"{rows} rows cannot be divided evenly among {tensor_parallel} tensor-parallel ranks"
        yield Problem(where, what, fix=f"make vocabulary.padded_size a multiple of {tensor_parallel}")
