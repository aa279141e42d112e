"""The tokenizer of every kind, on real files."""

from __future__ import annotations

import base64
import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
import tokenizers
from pydantic import TypeAdapter, ValidationError
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from runtime_di.errors import SettingsError
from runtime_di.launch import LaunchSettings
from runtime_di.providers.tokenizer import (
    ByteTokenizerSettings,
    FileTokenizerSettings,
    Gpt2BpeTokenizerSettings,
    NullTokenizerSettings,
    SentencePieceTokenizerSettings,
    TiktokenTokenizerSettings,
    Tokenizer,
    TokenizerSettings,
    WordPieceTokenizerSettings,
    open_tokenizer,
)
from runtime_di.section import Section
from runtime_di.settings import RuntimeSettings

CORPUS = ["hello world", "the quick brown fox jumps over the lazy dog", "she sells sea shells", "Hello Über-world"]
TEXT = "hello quick world"
PATTERN = r"\s?\w+|\s+|[^\s\w]+"
RANKS = {bytes([value]): value for value in range(256)} | {b"he": 256, b"ll": 257, b"hell": 258, b" w": 259}
END = "<|endoftext|>"


class AnyTokenizer(RuntimeSettings):
    """An entrypoint's settings with a tokenizer."""

    tokenizer: TokenizerSettings | None = ByteTokenizerSettings()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of each kind, trained on a few sentences."""
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


def byte_level_bpe() -> tokenizers.Tokenizer:
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(CORPUS, trainer)
    return bpe


def word_pieces() -> list[str]:
    words = sorted({word for line in CORPUS for word in line.split()} | {"world", "uber", "-"})
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    return list(
        dict.fromkeys(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words, *letters, *("##" + c for c in letters)])
    )


def write_ranks(path: Path, ranks: Mapping[bytes, int]) -> None:
    lines = (base64.b64encode(token) + b" " + str(rank).encode() for token, rank in ranks.items())
    path.write_bytes(b"\n".join(lines) + b"\n")


def settings_of(kind: str, made: Path) -> Any:
    return {
        "file": FileTokenizerSettings(path=made),
        "gpt2_bpe": Gpt2BpeTokenizerSettings(vocab_file=made / "vocab.json", merges_file=made / "merges.txt"),
        "wordpiece": WordPieceTokenizerSettings(vocab_file=made / "vocab.txt"),
        "sentencepiece": SentencePieceTokenizerSettings(path=made / "spm.model"),
        "tiktoken": TiktokenTokenizerSettings(path=made / "ranks.tiktoken", pattern=PATTERN),
        "byte": ByteTokenizerSettings(),
        "null": NullTokenizerSettings(size=100),
    }[kind]


def file_tokenizer(
    folder: Path, edit: Callable[[tokenizers.Tokenizer], object] = lambda _: None, **sides: Any
) -> Tokenizer:
    """The tokenizer of a tokenizer.json as ``edit`` leaves it, with these side files beside it."""
    library = byte_level_bpe()
    edit(library)
    library.save(str(folder / "tokenizer.json"))
    for name, content in sides.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return open_tokenizer(FileTokenizerSettings(path=folder))


def problems_of(section: Section) -> list[tuple[str, str, str]]:
    found = ((need.field, need.lacking()) for need in section.requires(LaunchSettings()))
    return [(field, *lacking) for field, lacking in found if lacking is not None]


KINDS = ["file", "gpt2_bpe", "wordpiece", "sentencepiece", "tiktoken", "byte", "null"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_keeps_the_protocol(kind: str, made: Path):
    """A text comes back from its ids, and every id, also the end of a document and padding, is below the size."""
    text = "7 42 99" if kind == "null" else TEXT
    tokenizer = open_tokenizer(settings_of(kind, made))

    ids = tokenizer.encode(text)

    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tuple(ids)) == text
    assert type(ids) is list
    assert {type(value) for value in ids} == {int}
    assert all(0 <= value < tokenizer.size for value in [*ids, tokenizer.eod])
    assert tokenizer.pad is None or 0 <= tokenizer.pad < tokenizer.size


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_can_be_sent_to_a_worker(kind: str, made: Path):
    """A spawned data-loading worker can receive the tokenizer."""
    tokenizer = open_tokenizer(settings_of(kind, made))

    received = pickle.loads(pickle.dumps(tokenizer))

    assert received.encode("1 2") == tokenizer.encode("1 2")
    assert (received.size, received.eod, received.pad) == (tokenizer.size, tokenizer.eod, tokenizer.pad)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_chosen_by_its_name(kind: str, made: Path):
    """Settings that came through JSON, as from a file, choose the same section as the section's class."""
    section = settings_of(kind, made)

    chosen = TypeAdapter(TokenizerSettings).validate_json(section.model_dump_json())

    assert chosen == section
    assert type(chosen) is type(section)


def test_file_encodes_as_the_library(made: Path):
    """A tokenizer.json gives the library's own ids, whether the file or its folder is named."""
    library = tokenizers.Tokenizer.from_file(str(made / "tokenizer.json"))

    by_folder = open_tokenizer(FileTokenizerSettings(path=made))
    by_file = open_tokenizer(FileTokenizerSettings(path=made / "tokenizer.json"))

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
    """B31: where ids are left out, the size still has a row for the highest one."""
    file_tokenizer(tmp_path, tokenizer_config={"eos_token": END})
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"]["hole"] = 1000
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))

    tokenizer = open_tokenizer(FileTokenizerSettings(path=tmp_path))

    assert tokenizer.size == 1001


def test_file_neither_truncates_nor_pads(tmp_path: Path):
    """Truncation and padding that a tokenizer.json carries for its model do not touch our texts."""

    def limit(library: tokenizers.Tokenizer) -> None:
        library.enable_truncation(max_length=2)
        library.enable_padding(length=50)

    tokenizer = file_tokenizer(tmp_path, limit, tokenizer_config={"eos_token": END})

    assert tokenizer.encode(TEXT) == byte_level_bpe().encode(TEXT).ids


def test_file_adds_what_its_template_says(tmp_path: Path):
    """A beginning that tokenizer.json puts before each text is part of the encoding, and shown by decoding."""
    tokenizer = file_tokenizer(
        tmp_path,
        lambda library: setattr(
            library, "post_processor", processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
        ),
        tokenizer_config={"eos_token": END},
    )

    assert tokenizer.encode(TEXT)[0] == tokenizer.eod
    assert tokenizer.decode(tokenizer.encode(TEXT)) == END + TEXT


def test_file_with_an_explicit_end_of_document(made: Path):
    """The setting names the end of a document before the files beside tokenizer.json do."""
    tokenizer = open_tokenizer(FileTokenizerSettings(path=made, eod="!"))

    assert [tokenizer.eod] == tokenizer.encode("!")


def test_gpt2_encodes_as_the_library(made: Path):
    """GPT-2's BPE gives the ids of the library's own byte-level BPE, for any bytes."""
    text = "Hello  Über-world\n\t1234 🦊 's"
    library = tokenizers.ByteLevelBPETokenizer(str(made / "vocab.json"), str(made / "merges.txt"))

    tokenizer = open_tokenizer(settings_of("gpt2_bpe", made))

    assert tokenizer.encode(text) == library.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(f"a{END}b")[1] == tokenizer.eod == library.token_to_id(END)
    assert tokenizer.size == library.get_vocab_size()


@pytest.mark.parametrize("lowercase", [True, False])
def test_wordpiece_encodes_as_the_library(lowercase: bool, made: Path):
    """WordPiece gives the ids of the library's own BERT tokenizer, lower-case or cased, without [CLS] and [SEP]."""
    text = "Hello Über-world, quickly!"
    library = tokenizers.BertWordPieceTokenizer(str(made / "vocab.txt"), lowercase=lowercase)

    tokenizer = open_tokenizer(WordPieceTokenizerSettings(vocab_file=made / "vocab.txt", lowercase=lowercase))

    assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode("[CLS][SEP][PAD]") == [library.token_to_id(name) for name in ("[CLS]", "[SEP]", "[PAD]")]
    assert (tokenizer.eod, tokenizer.pad) == (library.token_to_id("[SEP]"), library.token_to_id("[PAD]"))
    assert tokenizer.size == library.get_vocab_size()


def test_sentencepiece_encodes_as_the_library(made: Path):
    """A SentencePiece model gives the library's ids, its end of sentence and its padding."""
    library = sentencepiece.SentencePieceProcessor(model_file=str(made / "spm.model"))

    tokenizer = open_tokenizer(settings_of("sentencepiece", made))

    assert tokenizer.encode(TEXT) == library.encode(TEXT)
    assert (tokenizer.size, tokenizer.eod, tokenizer.pad) == (library.get_piece_size(), library.eos_id(), 3)


def test_tiktoken_puts_special_tokens_before_the_ranks(made: Path):
    """Ids are tiktoken's own, shifted behind the special tokens, which a text cannot spell."""
    library = tiktoken.Encoding("plain", pat_str=PATTERN, mergeable_ranks=RANKS, special_tokens={})
    text = f"{TEXT} </s>"

    tokenizer = open_tokenizer(settings_of("tiktoken", made))

    assert tokenizer.encode(text) == [1000 + value for value in library.encode(text)]
    assert tokenizer.decode([0, 1, 2, 3, 999]) == "<unk><s></s><SPECIAL_3><SPECIAL_999>"
    assert (tokenizer.size, tokenizer.eod, tokenizer.pad) == (1000 + len(RANKS), 2, None)


def test_tiktoken_cuts_the_ranks_to_the_size(made: Path):
    """An explicit size keeps the first ranks only."""
    tokenizer = open_tokenizer(
        TiktokenTokenizerSettings(path=made / "ranks.tiktoken", pattern=PATTERN, num_special_tokens=3, size=260)
    )

    assert tokenizer.size == 260
    assert tokenizer.encode("hell") == [3 + 256, 3 + ord("l"), 3 + ord("l")]


def test_tiktoken_reads_the_file_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No cache, which would outlive a change of the file, stands between the ranks file and us."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
    section = TiktokenTokenizerSettings(path=tmp_path / "ranks", pattern=PATTERN)
    write_ranks(section.path, RANKS)
    before = open_tokenizer(section).size

    write_ranks(section.path, {**RANKS, b"new": len(RANKS)})
    after = open_tokenizer(section).size

    assert after == before + 1
    assert not cache.exists()


def test_byte_needs_no_file():
    """Bytes are their own ids; end of document and padding follow, and have no text."""
    tokenizer = open_tokenizer(ByteTokenizerSettings())

    assert tokenizer.encode("aé") == [0x61, 0xC3, 0xA9]
    assert (tokenizer.size, tokenizer.eod, tokenizer.pad) == (258, 256, 257)
    assert tokenizer.decode([0x61, 256, 0xC3, 257]) == "a\N{REPLACEMENT CHARACTER}"


def test_null_size_includes_the_end_of_document():
    """B31: the null tokenizer's size counts its end of document, which is the last id; nothing pads."""
    tokenizer = open_tokenizer(NullTokenizerSettings(size=100))

    assert (tokenizer.size, tokenizer.eod, tokenizer.pad) == (100, 99, None)
    assert tokenizer.encode("0 99") == [0, 99]


@pytest.mark.parametrize("text", ["100", "-1", "fox", "1.5"])
def test_null_refuses_what_is_no_id(text: str):
    """The null tokenizer reads ids below its size and nothing else."""
    tokenizer = open_tokenizer(NullTokenizerSettings(size=100))

    with pytest.raises(ValueError, match=f"reads numbers below 100 between spaces, not '{text}'"):
        tokenizer.encode(f"1 {text}")


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
def test_malformed_tokenizer_json_is_told(content: bytes, what: str, tmp_path: Path):
    """A file that is no tokenizer.json is an error that names the setting, the file and the fault."""
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content)

    with pytest.raises(SettingsError) as caught:
        open_tokenizer(FileTokenizerSettings(path=file))

    assert str(caught.value).startswith(
        f"The tokenizer cannot be opened.\n  tokenizer.path: {file} cannot be read: {what}"
    )
    assert str(caught.value).endswith("\n    fix: mend the file, or name another")


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (None, "nothing beside {json} names an eos_token, so the end of a document is unknown\n"
               "    fix: set tokenizer.eod to a token of tokenizer.json, such as <|endoftext|>"),
        ("[]", "{config} holds a JSON list, not an object\n    fix: mend the file, or name another"),
        ('{"eos_token": 7}', "{config} names the eos_token 7, which is no token of {json}\n"
                             "    fix: correct tokenizer_config.json, or add the token to tokenizer.json"),
        ('{"eos_token": "</s>"}', "{config} names the eos_token '</s>', which is no token of {json}\n"
                                  "    fix: correct tokenizer_config.json, or add the token to tokenizer.json"),
        ('{"eos_token": "<|endoftext|>", "pad_token": "<pad>"}',
         "{config} names the pad_token '<pad>', which is no token of {json}\n"
         "    fix: correct tokenizer_config.json, or add the token to tokenizer.json"),
    ],
    ids=["no file", "a list", "no name", "unknown eos", "unknown pad"],
)  # fmt: skip
def test_unusable_side_files_are_told(config: str | None, told: str, tmp_path: Path):
    """Without a sound name for the end of a document and for padding nothing is guessed."""
    byte_level_bpe().save(str(tmp_path / "tokenizer.json"))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(config)
    files = {"json": tmp_path / "tokenizer.json", "config": tmp_path / "tokenizer_config.json"}

    with pytest.raises(SettingsError) as caught:
        open_tokenizer(FileTokenizerSettings(path=tmp_path))

    assert str(caught.value) == f"The tokenizer cannot be opened.\n  tokenizer.path: {told.format(**files)}"


def test_unknown_explicit_end_of_document_is_told(made: Path):
    """A misnamed end of document is told with tokens that could be meant."""
    with pytest.raises(SettingsError) as caught:
        open_tokenizer(FileTokenizerSettings(path=made, eod="</s>"))

    assert str(caught.value) == (
        "The tokenizer cannot be opened.\n"
        f"  tokenizer.eod: {made / 'tokenizer.json'} has no token '</s>'\n"
        "    fix: set tokenizer.eod to a token of tokenizer.json, such as <|endoftext|>"
    )


@pytest.mark.parametrize(
    ("source", "content", "told"),
    [
        (("gpt2_bpe", "vocab.json"), b"[]", "vocab_file: .*holds a JSON list, not an object"),
        (("gpt2_bpe", "vocab.json"), b"{", "vocab_file: .*cannot be read"),
        (("gpt2_bpe", "vocab.json"), b'{"a": 0}', r"vocab_file: .*has no <\|endoftext\|>"),
        (("gpt2_bpe", "vocab.json"), b'{"<|endoftext|>": "0"}', "vocab_file: .*cannot be read"),
        (("gpt2_bpe", "merges.txt"), b"one two three", "merges_file: .*cannot be read.* invalid at line 1"),
        (("gpt2_bpe", "merges.txt"), b"#version: 0.2\nzz qq\n", "merges_file: .*Token `zz` out of vocabulary"),
        (("wordpiece", "vocab.txt"), b"\xff\xfe", "vocab_file: .*cannot be read"),
        (("wordpiece", "vocab.txt"), b"a\nb\n", r"vocab_file: .*has no \[UNK\] and no \[SEP\]"),
        (("sentencepiece", "spm.model"), b"no model", "path: .*cannot be read.*could not parse ModelProto"),
        (("tiktoken", "ranks.tiktoken"), b"YQ== 0\nYg==\n", "path: .*line 2 is not a token in base64 and its rank"),
        (("tiktoken", "ranks.tiktoken"), b"YQ== 1\n", "path: .*are not 0, 1, 2 and so on, each once"),
        (("tiktoken", "ranks.tiktoken"), b"YQ== 0\n", "path: .*255 of the 256 single bytes are not among the 1 ranks"),
        (("tiktoken", "ranks.tiktoken"), b"", "path: .*256 of the 256 single bytes are not among the 0 ranks"),
    ],
)
def test_malformed_files_are_told(source: tuple[str, str], content: bytes, told: str, made: Path, tmp_path: Path):
    """A malformed file of any kind is an error that names the setting, and never a crash of a library."""
    kind, file = source
    for good in made.iterdir():
        (tmp_path / good.name).write_bytes(content if good.name == file else good.read_bytes())

    with pytest.raises(SettingsError, match=f"tokenizer.{told}") as caught:
        open_tokenizer(settings_of(kind, tmp_path))

    assert str(tmp_path / file) in str(caught.value)


def test_sentencepiece_without_an_end_of_sentence_is_told(tmp_path: Path, made: Path):
    """A model trained without an end of sentence cannot end a document."""
    sentencepiece.SentencePieceTrainer.train(
        input=str(made / "corpus.txt"),
        model_prefix=str(tmp_path / "spm"),
        vocab_size=80,
        hard_vocab_limit=False,
        eos_id=-1,
        minloglevel=2,
    )

    with pytest.raises(SettingsError, match=r"tokenizer\.path: .*spm\.model has no end-of-sentence piece"):
        open_tokenizer(SentencePieceTokenizerSettings(path=tmp_path / "spm.model"))


@pytest.mark.parametrize(
    ("values", "where", "what"),
    [
        ({"pattern": "("}, "pattern", "not a regular expression: .*parenthesis"),
        ({"size": 2000}, "size", "2000 tokens are more than the 1260 that .* give"),
        ({"size": 1100}, "path", "156 of the 256 single bytes are not among the 100 ranks"),
    ],
)
def test_unusable_tiktoken_values_are_told(values: dict[str, Any], where: str, what: str, made: Path):
    """A pattern or a size that does not go with the ranks file is an error that names the setting."""
    section = TiktokenTokenizerSettings(**{"path": made / "ranks.tiktoken", "pattern": PATTERN, **values})

    with pytest.raises(SettingsError, match=f"tokenizer.{where}: .*{what}"):
        open_tokenizer(section)


@pytest.mark.parametrize("size", [1, 1000])
def test_tiktoken_vocabulary_is_larger_than_its_special_tokens(size: int):
    """A size that leaves no room for ranks is refused before any file is read."""
    rule = f"size {size} must be larger than num_special_tokens 1000: raise size, or lower num_special_tokens"

    with pytest.raises(ValidationError, match=rule):
        TiktokenTokenizerSettings(path=Path("ranks"), pattern=PATTERN, size=size)


def test_missing_files_are_told_together(tmp_path: Path):
    """All missing files are told at once, with what stands in their place."""
    (tmp_path / "tokenizer.model").touch()
    (tmp_path / "config.json").touch()
    section = Gpt2BpeTokenizerSettings(vocab_file=tmp_path / "vocab.json", merges_file=tmp_path / "merges.txt")

    told = problems_of(section)

    found, fix = "found there: config.json, tokenizer.model", "give the path of an existing file"
    assert told == [
        ("vocab_file", f"no such file: {tmp_path / 'vocab.json'}; {found}", fix),
        ("merges_file", f"no such file: {tmp_path / 'merges.txt'}; {found}", fix),
    ]


def test_folder_without_tokenizer_json_is_told(tmp_path: Path):
    """A folder named as a tokenizer needs its tokenizer.json, and the first of its many files are told instead."""
    for number in range(10):
        (tmp_path / f"shard-{number}").touch()
    names = ", ".join(f"shard-{number}" for number in range(8))

    told = problems_of(FileTokenizerSettings(path=tmp_path))

    what = f"no such file: {tmp_path / 'tokenizer.json'}; found there: {names} and more"
    assert told == [("path", what, "give the path of an existing file")]


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_are_there_suffice(kind: str, made: Path):
    """With its files and packages at hand, no kind lacks anything."""
    assert problems_of(settings_of(kind, made)) == []


@pytest.mark.parametrize("kind", ["sentencepiece", "tiktoken"])
def test_missing_package_is_told(kind: str, made: Path, monkeypatch: pytest.MonkeyPatch):
    """B70: a missing optional package is named before anything is opened, and opening never returns nothing."""
    monkeypatch.setitem(sys.modules, kind, None)

    told = problems_of(settings_of(kind, made))

    fix = f"pip install 'runtime-di[{kind}]'"
    assert told == [("kind", f"needs the package '{kind}', which is not installed", fix)]
    with pytest.raises(ImportError, match=kind):
        open_tokenizer(settings_of(kind, made))


def test_null_kind_comes_from_flags_and_environment(monkeypatch: pytest.MonkeyPatch):
    """``null`` as a kind means the null tokenizer, while ``null`` as the whole section means none."""
    by_flag = AnyTokenizer.load(["--tokenizer.kind", "null", "--tokenizer.size", "5"]).tokenizer
    none = AnyTokenizer.load(["--tokenizer", "null"]).tokenizer
    monkeypatch.setenv("RUNTIME_DI_TOKENIZER__KIND", "null")
    monkeypatch.setenv("RUNTIME_DI_TOKENIZER__SIZE", "5")
    by_environment = AnyTokenizer.load([]).tokenizer

    assert by_flag == by_environment == NullTokenizerSettings(size=5)
    assert none is None


FORK = """
import os, sys
from pathlib import Path
from runtime_di.providers.tokenizer import FileTokenizerSettings, open_tokenizer

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


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_tokenizer_survives_a_fork(made: Path):
    """B68: encoding starts no threads, so a worker forked later encodes alike, unwarned, and no variable is set."""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORK, str(made)], capture_output=True, text=True, timeout=60, check=False
    )

    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_importing_imports_no_library():
    """Sections and factories come without any tokenizer library, and without torch."""
    program = (
        "import sys, runtime_di.providers.tokenizer, runtime_di.providers.vocabulary\n"
        "print(*{'tokenizers', 'sentencepiece', 'tiktoken', 'torch', 'numpy'} & set(sys.modules))"
    )

    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)

    assert run.stdout == "\n"
