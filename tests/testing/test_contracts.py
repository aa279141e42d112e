"""Contract tests of services, run on the real one and on its fake, so that fakes cannot drift."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from runtime_di import LaunchSettings, ServiceError, VocabularyError
from runtime_di.containers import TrainingRuntime
from runtime_di.plan import conformance, type_hints
from runtime_di.providers.checkpoint.format.snapshot import CheckpointError
from runtime_di.providers.checkpoint.protocols import Checkpointer
from runtime_di.providers.checkpoint.service import open_checkpointer
from runtime_di.providers.checkpoint.settings import CheckpointSettings
from runtime_di.providers.process_groups.parallel import ParallelSettings
from runtime_di.providers.process_groups.service import KINDS, ProcessGroups, open_process_groups
from runtime_di.providers.process_groups.settings import DistributedSettings
from runtime_di.providers.timers import Timers
from runtime_di.providers.tokenizer.byte import ByteTokenizer
from runtime_di.providers.tokenizer.protocol import Tokenizer
from runtime_di.providers.vocabulary import Vocabulary, VocabularySettings, resolve_vocabulary
from runtime_di.providers.writer.fan_out import FanOutWriter
from runtime_di.providers.writer.jsonl import JsonLinesWriter
from runtime_di.providers.writer.protocol import Writer
from runtime_di.testing import (
    FakeCheckpointer,
    FakeClock,
    FakeTimers,
    FakeTokenizer,
    FakeWriter,
    fake_process_groups,
    fake_vocabulary,
)

FAKES = {
    "tokenizer": FakeTokenizer(),
    "vocabulary": fake_vocabulary(),
    "writer": FakeWriter(),
    "timers": FakeTimers(),
    "process_groups": fake_process_groups(),
    "checkpointer": FakeCheckpointer(),
}


@pytest.mark.parametrize("name", FAKES)
def test_fake_fits_the_annotated_type(name: str) -> None:
    """Every ready fake is what a runtime takes for the service."""
    wanted = type_hints.resolve(*TrainingRuntime.service_annotations()[name])

    assert wanted is not type_hints.UNDECIDED
    assert conformance.value_mismatches(FAKES[name], wanted) == []


tokenizers = pytest.mark.parametrize(
    "tokenizer", [ByteTokenizer(), *map(FakeTokenizer, (4, 5, 16, 18, 100, 257, 258, 300))], ids=repr
)


@tokenizers
@pytest.mark.parametrize("text", ["", "hello", "def f():\n\treturn 'naïve ☃'", "\x00\xff\U0001f600"])
def test_tokenizer_gives_back_any_text(tokenizer: Tokenizer, text: str) -> None:
    """Decoding undoes encoding, and every id is below the size; the end of document and padding have no text."""
    ids = tokenizer.encode(text)

    assert tokenizer.decode(ids) == text
    assert tokenizer.pad is not None
    assert tokenizer.decode([*ids, tokenizer.eod, tokenizer.pad]) == text
    assert all(0 <= id_ < tokenizer.size for id_ in [*ids, tokenizer.eod, tokenizer.pad])
    assert not {tokenizer.eod, tokenizer.pad} & set(ids)


@tokenizers
def test_tokenizer_is_the_same_on_every_rank(tokenizer: Tokenizer) -> None:
    """What was encoded before changes nothing, and half of a text's ids decode to something."""
    ids = tokenizer.encode("some text")

    tokenizer.encode("another")

    assert tokenizer.encode("some text") == ids
    assert all(isinstance(tokenizer.decode(ids[:length]), str) for length in range(len(ids)))
    assert isinstance(tokenizer.decode(range(tokenizer.size)), str)


@pytest.mark.parametrize(("size", "divisible_by", "tensor"), [(100, 128, 1), (50257, 128, 8), (1, 1, 3)])
def test_vocabulary_of_a_tokenizer(size: int, divisible_by: int, tensor: int) -> None:
    """The fake has the sizes that the real service derives from a tokenizer of that size."""
    fake = fake_vocabulary(size, divisible_by=divisible_by, tensor_parallel=tensor)
    settings = VocabularySettings(divisible_by=divisible_by)

    real = resolve_vocabulary(settings, tensor, None, _tokens(size))

    assert {**_sizes(fake), "origin": ""} == {**_sizes(real), "origin": ""}
    with pytest.raises(VocabularyError):
        fake_vocabulary(0)


def _tokens(size: int) -> Tokenizer:
    from runtime_di.providers.tokenizer.null import NullTokenizer

    return NullTokenizer(size)


def _sizes(vocabulary: Vocabulary) -> dict[str, Any]:
    return {name: getattr(vocabulary, name) for name in Vocabulary.__dataclass_fields__}


Written = Callable[[], dict[str, Any]]


@contextmanager
def json_lines(tmp_path: Path) -> Iterator[tuple[Writer, Written]]:
    """The real writer, and how to read what it wrote."""
    path = tmp_path / "metrics.jsonl"

    def read() -> dict[str, Any]:
        found: dict[str, Any] = {"scalars": {}, "texts": {}, "settings": []}
        for line in map(json.loads, path.read_text().splitlines()):
            if "settings" in line:
                found["settings"].append(line["settings"])
            elif "value" in line:
                found["scalars"].setdefault(line["name"], []).append((line["step"], float(line["value"])))
            else:
                found["texts"].setdefault(line["name"], []).append((line["step"], line["text"]))
        return found

    with closing(JsonLinesWriter(path)) as backend:
        yield FanOutWriter([backend]), read


@contextmanager
def remembered(_: Path) -> Iterator[tuple[Writer, Written]]:
    writer = FakeWriter()
    yield (
        writer,
        lambda: {"scalars": writer.scalars, "texts": writer.texts, "settings": writer.settings_written},
    )


@pytest.mark.parametrize("opened", [json_lines, remembered])
def test_writer_keeps_what_is_written(opened: Any, tmp_path: Path) -> None:
    """Numbers of any kind, infinities, texts and settings are there by name, in order, once flushed."""
    import numpy as np
    import torch

    with opened(tmp_path) as (writer, written):
        writer.settings({"seed": 1})
        for step, value in enumerate((0.5, 2, np.float32(0.25), torch.tensor(4.0), math.inf)):
            writer.scalar("loss", value, step)
        writer.text("sample", "é\n", step=3)
        writer.flush()

        assert written() == {
            "scalars": {"loss": [(0, 0.5), (1, 2.0), (2, 0.25), (3, 4.0), (4, math.inf)]},
            "texts": {"sample": [(3, "é\n")]},
            "settings": [{"seed": 1}],
        }


@pytest.mark.parametrize("opened", [json_lines, remembered])
def test_writer_refuses_what_is_no_number(opened: Any, tmp_path: Path) -> None:
    """A value that float() does not take is the caller's error."""
    with opened(tmp_path) as (writer, _), pytest.raises((TypeError, ValueError)):
        writer.scalar("loss", "much", 1)


@contextmanager
def real_groups(rank: int, world_size: int, **sizes: Any) -> Iterator[ProcessGroups]:
    import torch

    names = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}
    parallel = ParallelSettings(**{names[axis]: size for axis, size in sizes.items()})
    launch = LaunchSettings(rank=rank, world_size=world_size)
    distributed = DistributedSettings(backend="fake")
    opened = contextmanager(open_process_groups)(distributed, parallel, launch, torch.device("cpu"))
    with opened as groups:
        yield groups


@contextmanager
def pretended_groups(rank: int, world_size: int, **sizes: Any) -> Iterator[ProcessGroups]:
    yield fake_process_groups(rank, world_size, **sizes)


@pytest.mark.parametrize("opened", [real_groups, pretended_groups])
@pytest.mark.parametrize(
    ("rank", "world_size", "sizes"), [(0, 1, {}), (5, 8, {"tp": 2, "pp": 2}), (6, 16, {"tp": 2, "pp": 4, "cp": 2})]
)
def test_groups_have_the_ranks_of_the_grid(opened: Any, rank: int, world_size: int, sizes: dict[str, int]) -> None:
    """Ranks, sizes and places are those of the grid, whether the groups can communicate or not."""
    with opened(rank, world_size, **sizes) as groups:
        assert (groups.rank, groups.world_size) == (rank, world_size)
        for kind in KINDS:
            ranks = groups.grid.group_of(rank, kind)
            assert (groups.ranks(kind), groups.size(kind)) == (ranks, len(ranks))
            assert groups.is_member(kind) == bool(ranks)
            if ranks:
                assert groups.index(kind) == ranks.index(rank)
            else:
                with pytest.raises(ServiceError, match=f"rank {rank} is in no {kind} group"):
                    groups.index(kind)
        with pytest.raises(ServiceError, match="no kind of group named 'data'"):
            groups.ranks("data")  # type: ignore[arg-type]


def real_timers() -> tuple[Timers, FakeClock]:
    clock = FakeClock()
    return Timers(clock, level=2), clock


def fake_timers() -> tuple[Timers, FakeClock]:
    timers = FakeTimers()
    return timers, timers.clock


@pytest.mark.parametrize("make", [real_timers, fake_timers])
def test_timers_add_up_what_the_clock_says(make: Callable[[], tuple[Timers, FakeClock]]) -> None:
    """Seconds pass as the clock is moved; unpaired calls are refused."""
    timers, clock = make()

    for seconds in (1.0, 0.5):
        with timers("forward"):
            clock.advance(seconds)
    timers.start("step", level=2)
    clock.advance(2.0)
    timers.stop("step")

    assert timers.report(reset=False) == {"forward": 1.5, "step": 2.0}
    with pytest.raises(ServiceError, match="not running"):
        timers.stop("step")


@pytest.mark.parametrize("make", [real_timers, fake_timers])
def test_timers_of_one_rank_are_reduced(make: Callable[[], tuple[Timers, FakeClock]]) -> None:
    """In a world of one, reduce() returns this rank's seconds by name, and resets them."""
    timers, clock = make()
    with ExitStack() as stack:
        groups = stack.enter_context(gloo_of_one()) if make is real_timers else None
        for name in ("b", "a"):
            with timers(name):
                clock.advance(1.0)

        assert timers.reduce(groups) == {"a": (1.0,), "b": (1.0,)}
        assert timers.reduce(groups) == {}


@contextmanager
def gloo_of_one() -> Iterator[Any]:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield None
    finally:
        dist.destroy_process_group()


class Position:
    """A stateful object."""

    def __init__(self, sample: int) -> None:
        self.sample = sample

    def state_dict(self) -> dict[str, Any]:
        return {"sample": self.sample, "order": (1, 2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sample, self.order = state["sample"], state["order"]


OpenCheckpointer = Callable[[], Checkpointer]


@pytest.fixture(params=["real", "fake"])
def open_again(request: pytest.FixtureRequest, tmp_path: Path) -> OpenCheckpointer:
    """Open a checkpointer of a run that goes on from what the last one saved."""
    if request.param == "real":
        settings = CheckpointSettings(folder=tmp_path / "checkpoints", every=10)
        return lambda: open_checkpointer(settings, fake_process_groups(), fake_vocabulary(), {})
    saved: list[FakeCheckpointer] = []

    def open_fake() -> Checkpointer:
        saved.append(FakeCheckpointer(every=10, saved=saved[-1].saved if saved else None))
        return saved[-1]

    return open_fake


def state_of(number: int) -> dict[str, Any]:
    import torch

    tensors = {"weights": torch.full((2, 3), float(number)), "generator": torch.full((4,), number, dtype=torch.uint8)}
    return {
        "model": tensors,
        "position": Position(number),
        "step": number,
        "mixed": [{"a": torch.ones(2) * number}, "x"],
    }


def test_checkpoint_comes_back(open_again: OpenCheckpointer) -> None:
    """Tensors are filled in place, objects get their state, and plain values replaced; later changes are not seen."""
    first, state = open_again(), state_of(1)
    path = first.save(state, 10)
    state["model"]["weights"].fill_(9)
    state["position"].sample = 9
    resumed = state_of(0)
    weights = resumed["model"]["weights"]

    second = open_again()
    step = second.load(resumed)

    assert (step, second.latest and second.latest.name, second.weights_only) == (10, path.name, False)
    assert weights.tolist() == [[1.0] * 3] * 2
    assert resumed["model"]["weights"] is weights
    assert resumed["model"]["generator"].tolist() == [1] * 4
    assert (resumed["position"].sample, resumed["position"].order, resumed["step"]) == (1, (1, 2), 1)
    assert (resumed["mixed"][0]["a"].tolist(), resumed["mixed"][1]) == ([1.0, 1.0], "x")


def test_checkpoint_is_due_every_so_often_and_at_the_end(open_again: OpenCheckpointer) -> None:
    """Step 0 is never due, every tenth one is, and the last one too."""
    checkpointer = open_again()

    assert [step for step in range(26) if checkpointer.due(step, last=25)] == [10, 20, 25]


def test_nothing_saved_is_nothing_to_load(open_again: OpenCheckpointer) -> None:
    """A first run starts from the beginning, and its state stays as it is."""
    checkpointer, state = open_again(), {"step": 3}

    assert (checkpointer.load(state), checkpointer.latest, state) == (None, None, {"step": 3})
    assert not checkpointer.weights_only


def test_checkpoint_steps_only_grow(open_again: OpenCheckpointer) -> None:
    """The own step is not saved again, and a later run that did not resume cannot save an earlier one."""
    first = open_again()
    path = first.save({"step": 1}, 10)

    assert first.save({"step": 2}, 10) == path
    with pytest.raises(CheckpointError, match="step 5 is not after the latest"):
        open_again().save({"step": 3}, 5)
    resumed, state = open_again(), {"step": 0}
    resumed.load(state)
    resumed.save({"step": 4}, 10)
    open_again().load(state)
    assert state == {"step": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.update(more=1), "state more: .*not in the checkpoint"),
        (lambda state: state.update(step=state["model"]["weights"]), "state step: a tensor"),
        (
            lambda state: state["model"].update(weights=state["model"]["weights"][:1]),
            r"of size \[1, 3\] here, and \[2, 3\]",
        ),
    ],
)
def test_state_that_does_not_fit_is_refused(open_again: OpenCheckpointer, change: Any, message: str) -> None:
    """What the checkpoint lacks, or has in another form, is reported before anything is loaded."""
    open_again().save(state_of(1), 10)
    state = state_of(0)
    change(state)

    with pytest.raises(CheckpointError, match=message):
        open_again().load(state)


def test_value_that_cannot_be_stored_is_refused(open_again: OpenCheckpointer) -> None:
    """Only plain values are saved; the error names the path and the type of another value."""
    with pytest.raises(CheckpointError, match=r"state seen: contains a builtins\.set"):
        open_again().save({"seen": {1, 2}}, 10)
