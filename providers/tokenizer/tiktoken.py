"""The tokenizer that a tiktoken ranks file defines."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime_di.providers.tokenizer.files import reading, tokenizer_file_error

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import tiktoken

    from runtime_di.providers.tokenizer.settings import TiktokenTokenizerSettings

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")


@dataclass(frozen=True, slots=True)
class TiktokenTokenizer:
    """A tiktoken encoding; special tokens are used by id only, never recognised in a text."""

    size: int
    eod: int
    backend: tiktoken.Encoding = field(repr=False)
    pad: int | None = None

    def encode(self, text: str) -> list[int]:
        return self.backend.encode_ordinary(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self.backend.decode(ids)


def open_tiktoken(settings: TiktokenTokenizerSettings) -> TiktokenTokenizer:
    """Open a ranks file; as in Megatron, special tokens have the first ids and the ranks follow."""
    import tiktoken

    offset = settings.num_special_tokens
    ranks = _ranks(settings)
    fillers = (f"<SPECIAL_{number}>" for number in range(len(SPECIAL_TOKENS), offset))
    special = {token: number for number, token in enumerate((*SPECIAL_TOKENS, *fillers))}
    try:
        backend = tiktoken.Encoding(
            settings.path.stem,
            pat_str=settings.pattern,
            mergeable_ranks={token: rank + offset for token, rank in ranks.items()},
            special_tokens=special,
        )
    except ValueError as error:
        raise tokenizer_file_error("pattern", f"not a regular expression: {error}", "correct the pattern") from error
    return TiktokenTokenizer(offset + len(ranks), special["</s>"], backend)


def _ranks(settings: TiktokenTokenizerSettings) -> dict[bytes, int]:
    """Read the ranks to use, and check everything that would make tiktoken panic."""
    path = settings.path
    with reading("path", path):
        ranks = _read_ranks(path)
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise tokenizer_file_error("path", f"the ranks in {path} are not 0, 1, 2 and so on, each once")
    if settings.size is not None:
        num_ranks = settings.size - settings.num_special_tokens
        if num_ranks > len(ranks):
            most = settings.num_special_tokens + len(ranks)
            what = f"{settings.size} tokens are more than the {most} of {path} and the special tokens together"
            raise tokenizer_file_error(
                "size", what, f"lower it to {most}; vocabulary.padded_size sets a larger embedding"
            )
        ranks = {token: rank for token, rank in ranks.items() if rank < num_ranks}
    if missing := sum(bytes([value]) not in ranks for value in range(256)):
        what = f"{missing} of the 256 single bytes are not among the {len(ranks)} ranks taken from {path}"
        raise tokenizer_file_error("path", what, "name a complete ranks file, and raise tokenizer.size if it is set")
    return ranks


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Read the file as ``tiktoken.load`` does, but without its cache, which would miss a change of the file."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise ValueError(f"line {number} is not a token in base64 and its rank") from error
    return ranks
