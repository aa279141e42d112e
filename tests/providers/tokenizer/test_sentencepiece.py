"""The SentencePiece tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import sentencepiece

from runtime_di.errors import SettingsError
from runtime_di.providers.tokenizer.service import open_tokenizer
from runtime_di.providers.tokenizer.settings import (
    SentencePieceTokenizerSettings,
)
from tests.support.tokenizer_files import (
    TEXT,
    settings_of,
)


def test_sentencepiece_encodes_as_the_library(files: Path):
    """A SentencePiece model gives the library's ids, its end of sentence and its padding."""
    library = sentencepiece.SentencePieceProcessor(model_file=str(files / "spm.model"))

    tokenizer = open_tokenizer(settings_of("sentencepiece", files))

    assert tokenizer.encode(TEXT) == library.encode(TEXT)
    assert (tokenizer.size, tokenizer.eod, tokenizer.pad) == (library.get_piece_size(), library.eos_id(), 3)


def test_sentencepiece_without_an_end_of_sentence_is_reported(tmp_path: Path, files: Path):
    """A model trained without an end of sentence cannot end a document."""
    sentencepiece.SentencePieceTrainer.train(
        input=str(files / "corpus.txt"),
        model_prefix=str(tmp_path / "spm"),
        vocab_size=80,
        hard_vocab_limit=False,
        eos_id=-1,
        minloglevel=2,
    )

    with pytest.raises(SettingsError, match=r"tokenizer\.path: .*spm\.model has no end-of-sentence piece"):
        open_tokenizer(SentencePieceTokenizerSettings(path=tmp_path / "spm.model"))
