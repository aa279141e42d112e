"""The vocabulary: how many rows the embedding has, and where that number comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import PositiveInt, model_validator

from runtime_di.errors import Problem, ServiceDisabledError, VocabularyError
from runtime_di.providers.snapshot import read_snapshot
from runtime_di.section import Mark, Section

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from runtime_di.providers.tokenizer import Tokenizer


class VocabularySettings(Section):
    """Sizes of the vocabulary; by default the tokenizer's, or that of the checkpoint that is loaded."""

    size: Annotated[PositiveInt | None, Mark.NOT_PORTABLE] = None
    """Tokens before padding; a smaller tokenizer leaves rows unused."""
    padded_size: Annotated[PositiveInt | None, Mark.NOT_PORTABLE] = None
    """Embedding rows; wins over every other size."""
    divisible_by: PositiveInt = 128
    """Rows on each tensor-parallel rank are a multiple of this."""

    @model_validator(mode="after")
    def _padding_only_adds(self) -> Self:
        if self.size is not None and self.padded_size is not None and self.padded_size < self.size:
            raise ValueError(
                f"padded_size {self.padded_size} must be at least size {self.size}: raise it, or leave one of them out"
            )
        return self


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Sizes of the vocabulary, settled.

    Attributes:
        size: tokens before padding.
        padded_size: embedding rows over all tensor-parallel ranks.
        origin: the setting, checkpoint or service that decided.
        dummy_rows: embedding rows for which the tokenizer, or ``size`` without one, has no token.
        tensor_parallel: ranks that share the embedding.
        overruled: an explicit ``vocabulary.size`` that the checkpoint's came before.
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
            rows += f"; vocabulary.size {self.overruled} is not used, since the checkpoint comes before it"
        return f"vocabulary of {self.size} tokens (from {self.origin}): {rows}"


@dataclass(frozen=True, slots=True)
class _Stated:
    """A size that somebody states; ``padded_size`` only where it is to be kept as it is."""

    origin: str
    size: int
    padded_size: int | None = None


def padded_size(size: int, divisible_by: int, tensor_parallel: int) -> int:
    """Round a vocabulary up so that every tensor-parallel rank holds an equal shard.

    Args:
        size: tokens, added tokens included; at least 1.
        divisible_by: rows of a shard are a multiple of this; at least 1.
        tensor_parallel: ranks that share the embedding; at least 1.

    Returns:
        Embedding rows, a multiple of ``divisible_by * tensor_parallel``.

    Raises:
        VocabularyError: an argument is below 1.
    """
    given = {"size": size, "divisible_by": divisible_by, "tensor_parallel": tensor_parallel}
    if wrong := [Problem(name, "must be at least 1", value=str(value)) for name, value in given.items() if value < 1]:
        raise VocabularyError("A vocabulary cannot be padded.", wrong)
    multiple = divisible_by * tensor_parallel
    return -(-size // multiple) * multiple


def resolve_vocabulary(
    settings: VocabularySettings, tensor_parallel: int, checkpoint: Path | None, tokenizer: Tokenizer | None
) -> Vocabulary:
    """Settle the vocabulary; an explicit padded size wins, then the checkpoint, the tokenizer, an explicit size.

    Args:
        settings: the explicit sizes.
        tensor_parallel: ranks that share the embedding.
        checkpoint: a checkpoint, or a folder of them, whose vocabulary the weights to load have.
        tokenizer: the source of token ids, which no other size may fall short of.

    Raises:
        VocabularyError: the tokenizer is larger than another size, or the rows cannot be shared evenly.
        CheckpointError: the checkpoint's snapshot cannot be read.
        ServiceDisabledError: nothing states a size.
    """
    saved = None if checkpoint is None else _saved(checkpoint, tensor_parallel)
    encoded = None if tokenizer is None else _Stated("tokenizer", tokenizer.size)
    chosen = _chosen(settings, saved, encoded)
    rows = chosen.padded_size or padded_size(chosen.size, settings.divisible_by, tensor_parallel)
    problems = [*_shortfalls(settings, saved, encoded), *_uneven(chosen.origin, rows, tensor_parallel)]
    if problems:
        raise VocabularyError("The sizes of the vocabulary contradict each other.", problems)
    overruled = None if settings.size == chosen.size else settings.size
    return Vocabulary(chosen.size, rows, chosen.origin, rows - (encoded or chosen).size, tensor_parallel, overruled)


def _saved(checkpoint: Path, tensor_parallel: int) -> _Stated | None:
    """Read what a checkpoint states; its padding is kept for the tensor-parallel size that it was written with."""
    snapshot = read_snapshot(checkpoint)
    if snapshot.vocabulary is None:
        return None
    size, rows = (snapshot.vocabulary.get(name) for name in ("size", "padded_size"))
    if type(size) is not int or type(rows) is not int or not 1 <= size <= rows:
        what = f"its vocabulary has size {size!r} and padded_size {rows!r}, which are no sizes"
        raise VocabularyError("The vocabulary of a checkpoint is malformed.", [Problem(str(checkpoint), what)])
    written_with = snapshot.vocabulary.get("tensor_parallel", snapshot.parallel.get("tp"))
    return _Stated(f"checkpoint {checkpoint}", size, rows if written_with == tensor_parallel else None)


def _chosen(settings: VocabularySettings, saved: _Stated | None, encoded: _Stated | None) -> _Stated:
    """Pick the source that decides; between tokenizer and explicit size the larger, which has rows for both."""
    if settings.padded_size is not None:
        sizes = [source.size for source in (saved, encoded) if source is not None]
        size = settings.size or max(sizes, default=settings.padded_size)
        return _Stated("vocabulary.padded_size", size, settings.padded_size)
    if saved is not None:
        return saved
    explicit = None if settings.size is None else _Stated("vocabulary.size", settings.size)
    candidates = [source for source in (encoded, explicit) if source is not None]
    if not candidates:
        fix = "set tokenizer, vocabulary.size or vocabulary.padded_size, or load a checkpoint that has a vocabulary"
        what = "no tokenizer, no checkpoint and no setting states a size"
        raise ServiceDisabledError("The vocabulary is disabled.", [Problem("vocabulary", what, fix=fix)])
    return max(candidates, key=lambda source: source.size)


def _shortfalls(settings: VocabularySettings, saved: _Stated | None, encoded: _Stated | None) -> Iterator[Problem]:
    """Tell the sizes that are smaller than what must fit them; an explicit padded size lifts the checkpoint's limit."""
    if settings.size is not None:
        fix = "raise it, leave it out, or use a smaller tokenizer"
        yield from _shortfall("vocabulary.size", settings.size, encoded, fix)
    elif settings.padded_size is not None:
        fix = "raise it, or set vocabulary.size to the tokens that are wanted"
        yield from _shortfall("vocabulary.padded_size", settings.padded_size, saved, fix)
        yield from _shortfall("vocabulary.padded_size", settings.padded_size, encoded, "raise it, or leave it out")
    if settings.padded_size is None and saved is not None:
        fix = "use the checkpoint's own tokenizer, or set vocabulary.padded_size to enlarge the embedding"
        yield from _shortfall(saved.origin, saved.size, encoded, fix)


def _shortfall(where: str, size: int, content: _Stated | None, fix: str) -> Iterator[Problem]:
    if content is not None and content.size > size:
        what = f"room for {size} tokens, while the {content.origin} has {content.size}"
        yield Problem(where, what, fix=fix)


def _uneven(where: str, rows: int, tensor_parallel: int) -> Iterator[Problem]:
    if rows % tensor_parallel:
        what = f"{rows} rows cannot be shared evenly by {tensor_parallel} tensor-parallel ranks"
        yield Problem(where, what, fix=f"make vocabulary.padded_size a multiple of {tensor_parallel}")
