"""Tokenizers of every kind, on real files."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from runtime_di.providers.tokenizer.service import open_tokenizer
from tests.support.tokenizer_files import (
    KINDS,
    TEXT,
    settings_of,
)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_fulfils_the_protocol(kind: str, files: Path):
    """Decoding the ids of a text returns the text; all ids, also end of document and padding, are below the size."""
    text = "7 42 99" if kind == "null" else TEXT
    tokenizer = open_tokenizer(settings_of(kind, files))

    ids = tokenizer.encode(text)

    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tuple(ids)) == text
    assert type(ids) is list
    assert {type(value) for value in ids} == {int}
    assert all(0 <= value < tokenizer.size for value in [*ids, tokenizer.eod])
    assert tokenizer.pad is None or 0 <= tokenizer.pad < tokenizer.size


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_can_be_pickled_to_a_worker(kind: str, files: Path):
    """A spawned data-loading worker can receive the tokenizer."""
    tokenizer = open_tokenizer(settings_of(kind, files))

    received = pickle.loads(pickle.dumps(tokenizer))

    assert received.encode("1 2") == tokenizer.encode("1 2")
    assert (received.size, received.eod, received.pad) == (tokenizer.size, tokenizer.eod, tokenizer.pad)


@pytest.mark.processes
def test_importing_imports_no_library():
    """Importing sections and factories imports neither a tokenizer library nor torch."""
    program = (
        "import sys, runtime_di.providers.tokenizer.service, runtime_di.providers.vocabulary\n"
        "print(*{'tokenizers', 'sentencepiece', 'tiktoken', 'torch', 'numpy'} & set(sys.modules))"
    )

    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)

    assert run.stdout == "\n"
