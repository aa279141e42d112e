"""A fake tokenizer of any size, and its vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log

from runtime_di.errors import SettingsError
from runtime_di.providers.vocabulary import Vocabulary, padded_size

_NUM_BYTES = 256
_MIN_TOKENS = 4


@dataclass(frozen=True, slots=True)
class FakeTokenizer:
    """A tokenizer of any size that encodes any text. Its last two ids are end of document and padding.

    The ids are equal on all ranks. Every UTF-8 byte is one token, or several tokens if there are fewer than 258.
    """

    size: int = 100

    def __post_init__(self) -> None:
        if self.size < _MIN_TOKENS:
            raise SettingsError(f"FakeTokenizer has size {self.size}.\n  fix: use a size of at least {_MIN_TOKENS}")

    @property
    def eod(self) -> int:
        return self.size - 2

    @property
    def pad(self) -> int | None:
        return self.size - 1

    def encode(self, text: str) -> list[int]:
        return [byte // base % self.eod for byte in text.encode() for base in self._bases()]

    def decode(self, ids: Sequence[int]) -> str:
        digits, bases = [id_ for id_ in ids if id_ < self.eod], self._bases()
        chunks = [digits[start : start + len(bases)] for start in range(0, len(digits), len(bases))]
        values = [sum(digit * base for digit, base in zip(chunk, bases, strict=False)) for chunk in chunks]
        return bytes(min(value, _NUM_BYTES - 1) for value in values).decode(errors="replace")

    def _bases(self) -> list[int]:
        """The place values of the tokens of one byte, highest first."""
        num_digits = ceil(log(_NUM_BYTES) / log(self.eod) - 1e-9)
        return [self.eod**position for position in reversed(range(num_digits))]


def fake_vocabulary(size: int = 100, *, divisible_by: int = 128, tensor_parallel: int = 1) -> Vocabulary:
    """Create the vocabulary of a tokenizer with ``size`` tokens."""
    rows = padded_size(size, divisible_by, tensor_parallel)
    return Vocabulary(size, rows, "fake", rows - size, tensor_parallel)
