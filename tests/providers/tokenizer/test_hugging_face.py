"""Tokenizers of the Hugging Face ``tokenizers`` library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import processors

from runtime_di.errors import SettingsError
from runtime_di.providers.tokenizer.service import open_tokenizer
from runtime_di.providers.tokenizer.settings import (
    FileTokenizerSettings,
    WordPieceTokenizerSettings,
)
from tests.support.tokenizer_files import (
    END,
    TEXT,
    byte_level_bpe,
    file_tokenizer,
    settings_of,
)


def test_file_encodes_as_the_library(files: Path):
    """A tokenizer.json gives the library's own ids, whether the file or its folder is named."""
    library = tokenizers.Tokenizer.from_file(str(files / "tokenizer.json"))

    by_folder = open_tokenizer(FileTokenizerSettings(path=files))
    by_file = open_tokenizer(FileTokenizerSettings(path=files / "tokenizer.json"))

    assert by_folder.encode(TEXT) == by_file.encode(TEXT) == library.encode(TEXT).ids
    assert by_folder.size == by_file.size == library.get_vocab_size(with_added_tokens=True)
    assert by_folder.eod == by_file.eod == library.token_to_id(END)
    assert by_folder.pad is None


@pytest.mark.parametrize(
    "sides",
    [
        {"tokenizer_config": {"eos_token": "<eos>", "pad_token": "<pad>"}},
        {"tokenizer_config": {"eos_token": {"content": "<eos>"}, "pad_token": {"content": "<pad>"}}},
        {"special_tokens_map": {"eos_token": "<eos>", "pad_token": {"content": "<pad>"}}},
        {
            "tokenizer_config": {"eos_token": "<eos>", "pad_token": None},
            "special_tokens_map": {"eos_token": END, "pad_token": "<pad>"},
        },
    ],
    ids=["names", "objects", "map alone", "config before map"],
)
def test_file_takes_eos_and_pad_from_the_files_beside_it(sides: dict[str, Any], tmp_path: Path):
    """End of document and padding are what tokenizer_config.json, then special_tokens_map.json, names."""
    tokenizer = file_tokenizer(tmp_path, lambda library: library.add_special_tokens(["<eos>", "<pad>"]), **sides)

    assert (tokenizer.eod, tokenizer.pad) == (tokenizer.size - 2, tokenizer.size - 1)


def test_file_size_counts_added_tokens(tmp_path: Path):
    """B29: tokens added to a trained vocabulary count, special or not."""
    trained = byte_level_bpe().get_vocab_size()

    tokenizer = file_tokenizer(
        tmp_path,
        lambda library: (library.add_tokens(["<plain>"]), library.add_special_tokens(["<special>"])),
        tokenizer_config={"eos_token": END},
    )

    assert tokenizer.size == trained + 2
    assert tokenizer.encode("<plain><special>") == [trained, trained + 1]


def test_file_size_covers_the_highest_id(tmp_path: Path):
    """B31: if ids are left out, the size still covers the highest id."""
    file_tokenizer(tmp_path, tokenizer_config={"eos_token": END})
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"]["hole"] = 1000
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))

    tokenizer = open_tokenizer(FileTokenizerSettings(path=tmp_path))

    assert tokenizer.size == 1001


def test_file_neither_truncates_nor_pads(tmp_path: Path):
    """Truncation and padding in a tokenizer.json are not applied."""

    def limit(library: tokenizers.Tokenizer) -> None:
        library.enable_truncation(max_length=2)
        library.enable_padding(length=50)

    tokenizer = file_tokenizer(tmp_path, limit, tokenizer_config={"eos_token": END})

    assert tokenizer.encode(TEXT) == byte_level_bpe().encode(TEXT).ids


def test_file_applies_its_template(tmp_path: Path):
    """A beginning that tokenizer.json adds to each text is part of the encoding, and decoding returns it."""
    tokenizer = file_tokenizer(
        tmp_path,
        lambda library: setattr(
            library, "post_processor", processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
        ),
        tokenizer_config={"eos_token": END},
    )

    assert tokenizer.encode(TEXT)[0] == tokenizer.eod
    assert tokenizer.decode(tokenizer.encode(TEXT)) == END + TEXT


def test_file_with_an_explicit_end_of_document(files: Path):
    """The setting of the end of a document takes precedence over the files beside tokenizer.json."""
    tokenizer = open_tokenizer(FileTokenizerSettings(path=files, eod="!"))

    assert [tokenizer.eod] == tokenizer.encode("!")


def test_gpt2_encodes_as_the_library(files: Path):
    """GPT-2's BPE gives the ids of the library's own byte-level BPE, for any bytes."""
    text = "Hello  Über-world\n\t1234 🦊 's"
    library = tokenizers.ByteLevelBPETokenizer(str(files / "vocab.json"), str(files / "merges.txt"))

    tokenizer = open_tokenizer(settings_of("gpt2_bpe", files))

    assert tokenizer.encode(text) == library.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(f"a{END}b")[1] == tokenizer.eod == library.token_to_id(END)
    assert tokenizer.size == library.get_vocab_size()


@pytest.mark.parametrize("lowercase", [True, False])
def test_wordpiece_encodes_as_the_library(lowercase: bool, files: Path):
    """WordPiece gives the ids of the library's own BERT tokenizer, lower-case or cased, without [CLS] and [SEP]."""
    text = "Hello Über-world, quickly!"
    library = tokenizers.BertWordPieceTokenizer(str(files / "vocab.txt"), lowercase=lowercase)

    tokenizer = open_tokenizer(WordPieceTokenizerSettings(vocab_file=files / "vocab.txt", lowercase=lowercase))

    assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode("[CLS][SEP][PAD]") == [library.token_to_id(name) for name in ("[CLS]", "[SEP]", "[PAD]")]
    assert (tokenizer.eod, tokenizer.pad) == (library.token_to_id("[SEP]"), library.token_to_id("[PAD]"))
    assert tokenizer.size == library.get_vocab_size()


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"{", "EOF while parsing an object"),
        (b"[]", "invalid type: sequence"),
        (b"{}", "Model missing"),
        (b"\xff\xfe", "stream did not contain valid UTF-8"),
    ],
    ids=["cut off", "a list", "empty", "binary"],
)
def test_malformed_tokenizer_json_is_reported(content: bytes, what: str, tmp_path: Path):
    """A malformed tokenizer.json is an error that names the setting, the file and the fault."""
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content)

    with pytest.raises(SettingsError) as caught:
        open_tokenizer(FileTokenizerSettings(path=file))

    assert str(caught.value).startswith(
        f"The tokenizer cannot be opened.\n  tokenizer.path: {file} cannot be read: {what}"
    )
    assert str(caught.value).endswith("\n    fix: correct the file, or name another one")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "nothing beside {json} names an eos_token, so the end of a document is unknown\n"
               "    fix: set tokenizer.eod to a token of tokenizer.json, such as <|endoftext|>"),
        ("[]", "{config} contains a JSON list, not an object\n    fix: correct the file, or name another one"),
        ('{"eos_token": 7}', "{config} names the eos_token 7, which is not a token of {json}\n"
                             "    fix: correct tokenizer_config.json, or add the token to tokenizer.json"),
        ('{"eos_token": "</s>"}', "{config} names the eos_token '</s>', which is not a token of {json}\n"
                                  "    fix: correct tokenizer_config.json, or add the token to tokenizer.json"),
        ('{"eos_token": "<|endoftext|>", "pad_token": "<pad>"}',
         "{config} names the pad_token '<pad>', which is not a token of {json}\n"
         "    fix: correct tokenizer_config.json, or add the token to tokenizer.json"),
    ],
    ids=["no file", "a list", "no name", "unknown eos", "unknown pad"],
)  # fmt: skip
def test_invalid_side_files_are_reported(config: str | None, message: str, tmp_path: Path):
    """Without valid names for end of document and padding, opening fails; nothing is guessed."""
    byte_level_bpe().save(str(tmp_path / "tokenizer.json"))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(config)
    paths = {"json": tmp_path / "tokenizer.json", "config": tmp_path / "tokenizer_config.json"}

    with pytest.raises(SettingsError) as caught:
        open_tokenizer(FileTokenizerSettings(path=tmp_path))

    assert str(caught.value) == f"The tokenizer cannot be opened.\n  tokenizer.path: {message.format(**paths)}"


def test_unknown_explicit_end_of_document_is_reported(files: Path):
    """The error for an unknown end of document suggests the special tokens of the file."""
    with pytest.raises(SettingsError) as caught:
        open_tokenizer(FileTokenizerSettings(path=files, eod="</s>"))

    assert str(caught.value) == (
        "The tokenizer cannot be opened.\n"
        f"  tokenizer.eod: {files / 'tokenizer.json'} has no token '</s>'\n"
        "    fix: set tokenizer.eod to a token of tokenizer.json, such as <|endoftext|>"
    )


FORK = """
import os, sys
from pathlib import Path
from runtime_di.providers.tokenizer.settings import FileTokenizerSettings
from runtime_di.providers.tokenizer.service import open_tokenizer

def threads():
    return len(os.listdir("/proc/self/task"))

tokenizer = open_tokenizer(FileTokenizerSettings(path=Path(sys.argv[1])))
ids = [tokenizer.encode("hello quick world") for _ in range(100)]
assert tokenizer.decode(ids[0]) == "hello quick world"
before = dict(os.environ)
assert threads() == 1, threads()
child = os.fork()
if not child:
    os._exit(0 if [tokenizer.encode("hello quick world") for _ in range(100)] == ids else 3)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert dict(os.environ) == before
sys.exit(status)
"""


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_tokenizer_survives_a_fork(files: Path):
    """B68: encoding starts no threads, so a forked worker encodes the same ids without warnings or set variables."""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORK, str(files)], capture_output=True, text=True, timeout=60, check=False
    )

    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
