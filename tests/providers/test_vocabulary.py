"""Sizes of the vocabulary: their sources, contradictions and padding."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from runtime_di.errors import ServiceDisabledError, VocabularyError
from runtime_di.providers.checkpoint.format.snapshot import CheckpointError, Snapshot, folder_name, write_snapshot
from runtime_di.providers.tokenizer.service import open_tokenizer
from runtime_di.providers.tokenizer.settings import NullTokenizerSettings
from runtime_di.providers.vocabulary import Vocabulary, VocabularySettings, padded_size, resolve_vocabulary


@dataclass
class FakeTokenizer:
    """A tokenizer of which only the size is used."""

    size: int
    eod: int = 0
    pad: int | None = None

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: object) -> str:
        raise NotImplementedError


def saved(root: Path, size: int, rows: int, tensor_parallel: int | None = 1) -> Path:
    """Save a checkpoint of a run with this vocabulary."""
    recorded = {"size": size, "padded_size": rows, "origin": "tokenizer"}
    return checkpoint(root, recorded if tensor_parallel is None else {**recorded, "tensor_parallel": tensor_parallel})


def checkpoint(root: Path, vocabulary: dict[str, Any] | None, **values: Any) -> Path:
    folder = root / folder_name(10)
    folder.mkdir()
    write_snapshot(folder, Snapshot(step=10, settings={}, vocabulary=vocabulary, **values))
    return folder


def resolve(
    *,
    explicit: int | None = None,
    rows: int | None = None,
    load: Path | None = None,
    tokens: int | None = None,
    tensor_parallel: int = 1,
) -> Vocabulary:
    tokenizer = None if tokens is None else FakeTokenizer(tokens)
    return resolve_vocabulary(VocabularySettings(size=explicit, padded_size=rows), tensor_parallel, load, tokenizer)


@pytest.mark.parametrize(("tensor_parallel", "rows"), [(1, 50304), (2, 50432), (8, 51200)], ids=["tp1", "tp2", "tp8"])
def test_tokenizer_size_is_padded(tensor_parallel: int, rows: int):
    """B29: with no explicit size the embedding has the tokenizer's size, padded for its tensor-parallel size."""
    assert resolve(tokens=50257, tensor_parallel=tensor_parallel) == Vocabulary(
        size=50257, padded_size=rows, origin="tokenizer", dummy_rows=rows - 50257, tensor_parallel=tensor_parallel
    )


def test_null_tokenizer_has_a_row_for_its_end_of_document():
    """B31: the end of document of a null tokenizer is within the rows, even without padding."""
    tokenizer = open_tokenizer(NullTokenizerSettings(size=256))

    vocabulary = resolve_vocabulary(VocabularySettings(divisible_by=1), 1, None, tokenizer)

    assert vocabulary.padded_size == 256 == tokenizer.eod + 1


def test_every_value_read_is_declared():
    """B39: everything that the vocabulary depends on is in the factory's signature, without hidden defaults."""
    parameters = inspect.signature(resolve_vocabulary).parameters

    assert list(parameters) == ["settings", "tensor_parallel", "checkpoint", "tokenizer"]
    assert all(parameter.default is parameter.empty for parameter in parameters.values())
    assert set(VocabularySettings.model_fields) == {"size", "padded_size", "divisible_by"}


Stated = tuple[int | None, int | None, tuple[int, int] | None, int | None]
SAVED = (1000, 1024)
PRECEDENCE = [
    # (explicit size, explicit padded size, checkpoint, tokenizer) -> (size, rows, dummy rows), decided by
    ((None, 2048, None, None), (2048, 2048, 0), "vocabulary.padded_size"),
    ((1500, 2048, None, None), (1500, 2048, 548), "vocabulary.padded_size"),
    ((None, 2048, SAVED, None), (1000, 2048, 1048), "vocabulary.padded_size"),
    ((None, 2048, None, 900), (900, 2048, 1148), "vocabulary.padded_size"),
    ((None, 2048, SAVED, 900), (1000, 2048, 1148), "vocabulary.padded_size"),
    ((None, 2048, SAVED, 1100), (1100, 2048, 948), "vocabulary.padded_size"),
    ((1500, 2048, SAVED, 900), (1500, 2048, 1148), "vocabulary.padded_size"),
    ((700, 768, SAVED, None), (700, 768, 68), "vocabulary.padded_size"),
    ((None, None, SAVED, None), (1000, 1024, 24), "checkpoint"),
    ((None, None, SAVED, 1000), (1000, 1024, 24), "checkpoint"),
    ((None, None, SAVED, 900), (1000, 1024, 124), "checkpoint"),
    ((1500, None, SAVED, None), (1000, 1024, 24), "checkpoint"),
    ((1500, None, SAVED, 900), (1000, 1024, 124), "checkpoint"),
    ((None, None, None, 900), (900, 1024, 124), "tokenizer"),
    ((900, None, None, 900), (900, 1024, 124), "tokenizer"),
    ((1500, None, None, 900), (1500, 1536, 636), "vocabulary.size"),
    ((1500, None, None, None), (1500, 1536, 36), "vocabulary.size"),
]


@pytest.mark.parametrize(("stated", "sizes", "origin"), PRECEDENCE)
def test_precedence(stated: Stated, sizes: tuple[int, int, int], origin: str, tmp_path: Path):
    """B29, B32: explicit rows take precedence, then the checkpoint, then the larger of tokenizer and explicit size."""
    explicit, rows, load, tokens = stated
    path = None if load is None else saved(tmp_path, *load)

    vocabulary = resolve(explicit=explicit, rows=rows, load=path, tokens=tokens)

    assert (vocabulary.size, vocabulary.padded_size, vocabulary.dummy_rows) == sizes
    assert vocabulary.origin == (f"checkpoint {path}" if origin == "checkpoint" else origin)


@pytest.mark.parametrize(("explicit", "overruled"), [(None, ""), (1000, ""), (1500, "1500"), (900, "900")])
def test_size_overruled_by_the_checkpoint_is_reported(explicit: int | None, overruled: str, tmp_path: Path):
    """If the checkpoint overrules an explicit size, the vocabulary's text says so."""
    vocabulary = resolve(explicit=explicit, load=saved(tmp_path, *SAVED))

    assert str(vocabulary) == (
        f"vocabulary of 1000 tokens (from checkpoint {tmp_path}/step-00000010): "
        "1024 embedding rows, 24 of them without a token"
        + (f"; vocabulary.size {overruled} is not used, because the checkpoint takes precedence" if overruled else "")
    )


CONTRADICTIONS = [
    # (explicit size, explicit padded size, checkpoint, tokenizer) -> what each problem says
    ((1000, None, None, 1001), ["vocabulary.size: room for 1000 tokens, while the tokenizer has 1001"]),
    ((1000, 2048, None, 1001), ["vocabulary.size: room for 1000 tokens, while the tokenizer has 1001"]),
    ((None, 1024, None, 1025), ["vocabulary.padded_size: room for 1024 tokens, while the tokenizer has 1025"]),
    ((None, 512, SAVED, None), ["vocabulary.padded_size: room for 512 tokens, while the checkpoint {path} has 1000"]),
    ((None, None, SAVED, 1001), ["checkpoint {path}: room for 1000 tokens, while the tokenizer has 1001"]),
    (
        (None, 512, SAVED, 600),
        [
            "vocabulary.padded_size: room for 512 tokens, while the checkpoint {path} has 1000",
            "vocabulary.padded_size: room for 512 tokens, while the tokenizer has 600",
        ],
    ),
    (
        (900, None, SAVED, 1001),
        [
            "vocabulary.size: room for 900 tokens, while the tokenizer has 1001",
            "checkpoint {path}: room for 1000 tokens, while the tokenizer has 1001",
        ],
    ),
]


@pytest.mark.parametrize(("stated", "expected"), CONTRADICTIONS)
def test_sizes_too_small_for_the_tokens_are_reported(stated: Stated, expected: list[str], tmp_path: Path):
    """The error names every size with too few rows for the tokens, and both origins."""
    explicit, rows, load, tokens = stated
    path = None if load is None else saved(tmp_path, *load)

    with pytest.raises(VocabularyError) as caught:
        resolve(explicit=explicit, rows=rows, load=path, tokens=tokens)

    found = [f"{problem.where}: {problem.what}" for problem in caught.value.problems]
    assert found == [line.format(path=path) for line in expected]


def test_tokenizer_larger_than_its_checkpoint_is_refused(tmp_path: Path):
    """B32: the error names the size that is too small, the size it needs, and both fixes."""
    path = saved(tmp_path, 32000, 32000)

    with pytest.raises(VocabularyError) as caught:
        resolve(load=path, tokens=262144)

    assert str(caught.value) == (
        "The sizes of the vocabulary contradict each other.\n"
        f"  checkpoint {path}: room for 32000 tokens, while the tokenizer has 262144\n"
        "    fix: use the checkpoint's own tokenizer, or set vocabulary.padded_size to enlarge the embedding"
    )


def test_smaller_tokenizer_keeps_the_checkpoint_rows(tmp_path: Path):
    """B32: a checkpoint of 262144 rows keeps them with a tokenizer of 32000 tokens; the rest are dummy rows."""
    vocabulary = resolve(load=saved(tmp_path, 262144, 262144), tokens=32000)

    assert (vocabulary.padded_size, vocabulary.dummy_rows) == (262144, 230144)


@pytest.mark.parametrize(
    ("written_with", "tensor_parallel", "rows"),
    [(1, 1, 50304), (2, 2, 50304), (1, 2, 50432), (8, 1, 50304), (1, 8, 51200), (None, 2, 50432)],
)
def test_checkpoint_is_padded_anew_for_another_tensor_parallel_size(
    written_with: int | None, tensor_parallel: int, rows: int, tmp_path: Path
):
    """The checkpoint's rows stay at its tensor-parallel size; at another, or an unknown one, they are padded anew."""
    load = saved(tmp_path, 50257, 50304, tensor_parallel=written_with)

    vocabulary = resolve(load=load, tensor_parallel=tensor_parallel)

    assert (vocabulary.size, vocabulary.padded_size) == (50257, rows)


def test_checkpoint_keeps_rows_that_were_set_by_hand(tmp_path: Path):
    """At its own tensor-parallel size a checkpoint's rows stay, even if the current settings would pad differently."""
    load = saved(tmp_path, 1000, 5000, tensor_parallel=2)

    vocabulary = resolve_vocabulary(VocabularySettings(divisible_by=64), 2, load, None)

    assert vocabulary.padded_size == 5000


def test_tensor_parallel_size_may_come_from_the_layout(tmp_path: Path):
    """If the vocabulary in a snapshot lacks its tensor-parallel size, that of the layout is used."""
    recorded = {"size": 1000, "padded_size": 5000, "origin": "vocabulary.padded_size"}
    load = checkpoint(tmp_path, recorded, parallel={"tp": 2})

    assert resolve(load=load, tensor_parallel=2).padded_size == 5000
    assert resolve(load=load, tensor_parallel=1).padded_size == 1024


def test_latest_checkpoint_of_a_folder_is_used(tmp_path: Path):
    """A folder that contains checkpoints may be named in place of one."""
    saved(tmp_path, *SAVED)

    assert resolve(load=tmp_path).origin == f"checkpoint {tmp_path}"


def test_checkpoint_without_vocabulary_is_ignored(tmp_path: Path):
    """A checkpoint of a run without a vocabulary does not determine the sizes."""
    load = checkpoint(tmp_path, None)

    assert resolve(load=load, tokens=900).origin == "tokenizer"


def test_missing_checkpoint_is_refused(tmp_path: Path):
    """A missing checkpoint is an error; no other source replaces it."""
    with pytest.raises(CheckpointError, match="contains no complete checkpoint"):
        resolve(load=tmp_path / "nowhere", tokens=900)


@pytest.mark.parametrize(
    "recorded",
    [
        {},
        {"size": 1000},
        {"size": "1000", "padded_size": 1024},
        {"size": 1000.0, "padded_size": 1024},
        {"size": True, "padded_size": 1024},
        {"size": 0, "padded_size": 1024},
        {"size": 1000, "padded_size": 999},
    ],
)
def test_malformed_vocabulary_of_a_checkpoint_is_refused(recorded: dict[str, Any], tmp_path: Path):
    """Invalid sizes in a snapshot are an error that names the checkpoint."""
    load = checkpoint(tmp_path, recorded)

    with pytest.raises(VocabularyError, match=f"{load}: its vocabulary has size .*, which are not valid sizes"):
        resolve(load=load, tokens=900)


def test_rows_are_divided_evenly(tmp_path: Path):
    """Rows that cannot be divided evenly among the tensor-parallel ranks are refused, whatever their source."""
    load = saved(tmp_path, 1000, 1023, tensor_parallel=2)

    with pytest.raises(VocabularyError) as by_setting:
        resolve(rows=1002, tensor_parallel=4)
    with pytest.raises(VocabularyError) as by_checkpoint:
        resolve(load=load, tensor_parallel=2)

    assert str(by_setting.value) == (
        "The sizes of the vocabulary contradict each other.\n"
        "  vocabulary.padded_size: 1002 rows cannot be divided evenly among 4 tensor-parallel ranks\n"
        "    fix: make vocabulary.padded_size a multiple of 4"
    )
    assert f"checkpoint {load}: 1023 rows cannot be divided evenly among 2" in str(by_checkpoint.value)


def test_no_source_disables_the_vocabulary():
    """Without tokenizer, checkpoint and sizes the service is disabled, and the error names settings that enable it."""
    with pytest.raises(ServiceDisabledError) as caught:
        resolve()

    assert str(caught.value) == (
        "The vocabulary is disabled.\n"
        "  vocabulary: no tokenizer, no checkpoint and no setting states a size\n"
        "    fix: set tokenizer, vocabulary.size or vocabulary.padded_size, or load a checkpoint that has a vocabulary"
    )


@pytest.mark.parametrize("rows", [1, 99])
def test_padding_never_removes_tokens(rows: int):
    """Explicit sizes that contradict each other are refused by validation."""
    rule = f"padded_size {rows} must be at least size 100: raise it, or leave one of them out"

    with pytest.raises(ValidationError, match=rule):
        VocabularySettings(size=100, padded_size=rows)


@given(
    size=st.integers(1, 10**7),
    divisible_by=st.integers(1, 4096),
    tensor_parallel=st.integers(1, 512),
)
def test_padding_is_the_least_that_divides_evenly(size: int, divisible_by: int, tensor_parallel: int):
    """The padded size is the smallest one, not below the size, with a multiple of divisible_by on every rank."""
    rows = padded_size(size, divisible_by, tensor_parallel)

    assert size <= rows < size + divisible_by * tensor_parallel
    assert rows % tensor_parallel == 0
    assert rows // tensor_parallel % divisible_by == 0
    assert padded_size(rows, divisible_by, tensor_parallel) == rows


@pytest.mark.parametrize("arguments", [(0, 128, 1), (1, 0, 1), (1, 128, 0), (-5, 128, 1)])
def test_padding_needs_positive_arguments(arguments: tuple[int, int, int]):
    """A size, divisor or number of ranks below 1 is refused."""
    with pytest.raises(VocabularyError, match="must be at least 1"):
        padded_size(*arguments)


def test_all_invalid_arguments_of_padding_are_reported():
    """All arguments below 1 are reported together."""
    with pytest.raises(VocabularyError) as caught:
        padded_size(0, 128, -1)

    assert str(caught.value) == (
        "A vocabulary cannot be padded.\n  size = 0: must be at least 1\n  tensor_parallel = -1: must be at least 1"
    )
