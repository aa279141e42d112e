"""Ready fakes of the services that tests replace most often; none of them imports torch when it is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log
from typing import TYPE_CHECKING, Any

from runtime_di.errors import SettingsError
from runtime_di.providers.process_groups import ProcessGroups, RankGrid
from runtime_di.providers.timers import Report, Timers
from runtime_di.providers.vocabulary import Vocabulary, padded_size

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_NUM_BYTES = 256
_LEAST_TOKENS = 4


@dataclass(frozen=True, slots=True)
class FakeTokenizer:
    """A tokenizer of any size that reads any text, alike on all ranks; its last two ids end a document, and pad.

    A text is its UTF-8 bytes, each one token, or several where there are fewer tokens than bytes.
    """

    size: int = 100

    def __post_init__(self) -> None:
        if self.size < _LEAST_TOKENS:
            raise SettingsError(f"FakeTokenizer has size {self.size}.\n  fix: give it at least {_LEAST_TOKENS} tokens")

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
        """What each token of a byte counts, the highest first."""
        num_digits = ceil(log(_NUM_BYTES) / log(self.eod) - 1e-9)
        return [self.eod**place for place in reversed(range(num_digits))]


class FakeWriter:
    """A writer that remembers.

    Attributes:
        scalars: name to pairs of step and value, in the order of writing.
        texts: name to pairs of step and text.
        settings_written: the settings of the run, as often as they were written.
        num_flushes: how often it was flushed.
    """

    def __init__(self) -> None:
        self.scalars: dict[str, list[tuple[int, float]]] = {}
        self.texts: dict[str, list[tuple[int, str]]] = {}
        self.settings_written: list[Mapping[str, Any]] = []
        self.num_flushes = 0

    def scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.setdefault(name, []).append((step, float(value)))

    def text(self, name: str, text: str, step: int) -> None:
        self.texts.setdefault(name, []).append((step, text))

    def settings(self, values: Mapping[str, Any]) -> None:
        self.settings_written.append(dict(values))

    def flush(self) -> None:
        self.num_flushes += 1


def fake_vocabulary(size: int = 100, *, divisible_by: int = 128, tensor_parallel: int = 1) -> Vocabulary:
    """The vocabulary that a tokenizer of ``size`` tokens gives."""
    rows = padded_size(size, divisible_by, tensor_parallel)
    return Vocabulary(size, rows, "fake", rows - size, tensor_parallel)


def fake_process_groups(rank: int = 0, world_size: int = 1, **sizes: Any) -> ProcessGroups:
    """The groups of a world of one, or those that ``rank`` of a larger world would have.

    Ranks, sizes and indices are the real ones; there is nothing to communicate with.

    Args:
        rank: to be.
        world_size: ranks of the pretended world.
        sizes: of the axes, as `RankGrid` takes them: ``tp=2``.
    """
    return ProcessGroups.pretend(RankGrid(world_size=world_size, **sizes), rank)


class FakeClock:
    """Seconds that pass when a test says so."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


class FakeTimers(Timers):
    """Timers of one rank by a clock that is moved by hand: ``timers.clock.advance(1.5)``."""

    def __init__(self, level: int = 2, report: Report = "max") -> None:
        self.clock = FakeClock()
        super().__init__(self.clock, level, report)

    def reduce(self, group: ProcessGroup | None = None, reset: bool = True) -> dict[str, tuple[float, ...]]:
        """Tell the report of this rank as that of a group of one."""
        report = self.report(reset)
        return {name: self._reduced(name, [report]) for name in sorted(report)}
