"""The files of small tokenizers of every kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sentencepiece

from tests.support.tokenizer_files import (
    CORPUS,
    END,
    RANKS,
    byte_level_bpe,
    word_pieces,
    write_ranks,
)


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of every kind, trained on a few sentences."""
    folder = tmp_path_factory.mktemp("tokenizers")
    bpe = byte_level_bpe()
    bpe.save(str(folder / "tokenizer.json"))
    bpe.model.save(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    (folder / "vocab.txt").write_text("\n".join(word_pieces()) + "\n")
    (folder / "corpus.txt").write_text("\n".join(CORPUS * 10))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "spm"),
        vocab_size=80,
        hard_vocab_limit=False,
        pad_id=3,
        minloglevel=2,
    )
    write_ranks(folder / "ranks.tiktoken", RANKS)
    return folder
