"""The example corpus: complete, reproducible, and written once."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

import prepare_corpus
from prepare_corpus import SPLITS, main, prepare

SIZE = 300


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Sixty small modules, some of which become validation documents."""
    folder = tmp_path / "sources"
    for number in range(60):
        path = folder / f"package_{number % 3}" / f"module_{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f'"""Module {number}."""\n\nvalue = "caf\u00e9"\nfor index in range({number}):\n    print(value)\n'
        )
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def texts(out: Path, split: str) -> list[str]:
    """Decode a split's documents."""
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    ids = np.memmap(out / f"{split}.bin", dtype=prepare_corpus.ID_DTYPE, mode="r")
    (ends,) = np.nonzero(ids == tokenizer.token_to_id(prepare_corpus.END_OF_DOCUMENT))
    assert ends[-1] == len(ids) - 1
    return [tokenizer.decode(part.tolist()) for part in np.split(ids, ends + 1)[:-1]]


def test_splits_have_every_document_once(sources: Path, tmp_path: Path):
    """The decoded documents of both splits are the sources, each of them once."""
    prepare(tmp_path / "corpus", sources, vocabulary_size=SIZE)

    train, validation = (texts(tmp_path / "corpus", split) for split in SPLITS)

    assert len(train) > len(validation) > 0
    assert sorted(train + validation) == sorted(path.read_text() for path in sources.rglob("*.py"))


def test_captions_are_the_numbers(sources: Path, tmp_path: Path):
    """Each number from 0000 to 9999 is a document with one token a digit."""
    prepare(tmp_path / "corpus", sources, vocabulary_size=SIZE)

    captions = texts(tmp_path / "corpus", "captions")

    assert captions == [f"{number:04}" for number in range(10_000)]
    assert (tmp_path / "corpus" / "captions.bin").stat().st_size == 10_000 * 5 * 2


def test_summary_has_the_counts_of_the_files(sources: Path, tmp_path: Path):
    """The numbers of documents and tokens in the summary are those of the files."""
    summary = prepare(tmp_path / "corpus", sources, vocabulary_size=SIZE)

    for split in SPLITS:
        assert summary[split]["documents"] == len(texts(tmp_path / "corpus", split))
        assert summary[split]["tokens"] * 2 == (tmp_path / "corpus" / f"{split}.bin").stat().st_size
    assert 257 < summary["tokenizer_size"] <= SIZE


def test_same_sources_give_the_same_bytes(sources: Path, tmp_path: Path):
    """Two preparations write identical files."""
    for name in ("first", "second"):
        prepare(tmp_path / name, sources, vocabulary_size=SIZE)

    assert contents(tmp_path / "first") == contents(tmp_path / "second")


def test_complete_corpus_is_left_alone(sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A second run prints the summary and writes nothing."""
    command = ["--out", str(tmp_path / "corpus"), "--sources", str(sources), "--vocabulary-size", str(SIZE)]
    main(command)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "corpus").iterdir()}
    output = capsys.readouterr().out

    main(command)

    assert output.startswith(f"wrote {tmp_path / 'corpus'}: a tokenizer of ")
    assert capsys.readouterr().out == output.replace("wrote", "found", 1)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "corpus").iterdir()}


def test_interruption_leaves_nothing(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An interrupted preparation leaves no folder behind, and the next one succeeds."""
    monkeypatch.setattr(json, "dumps", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path / "out" / "corpus", sources, vocabulary_size=SIZE)
    left_over = list((tmp_path / "out").iterdir())

    monkeypatch.undo()
    prepare(tmp_path / "out" / "corpus", sources, vocabulary_size=SIZE)

    assert left_over == []
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["corpus"]


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_foreign_folder_is_refused(sources: Path):
    """A folder that is not a corpus is an error that names it."""
    with pytest.raises(SystemExit, match=f"error: {sources} exists and is not a corpus"):
        main(["--out", str(sources), "--sources", str(sources)])


def test_other_request_is_refused(sources: Path, tmp_path: Path):
    """A corpus that was written with other options is an error."""
    prepare(tmp_path / "corpus", sources, vocabulary_size=SIZE)

    with pytest.raises(ValueError, match=r"'vocabulary_size': 300.*not for.*'vocabulary_size': 310"):
        prepare(tmp_path / "corpus", sources, vocabulary_size=310)


@pytest.mark.parametrize("vocabulary_size", [256, 65537])
def test_vocabulary_fits_bytes_and_uint16(sources: Path, tmp_path: Path, vocabulary_size: int):
    """A vocabulary that lacks bytes, or exceeds uint16, is an error before anything is written."""
    with pytest.raises(ValueError, match=f"--vocabulary-size is {vocabulary_size}"):
        prepare(tmp_path / "corpus", sources, vocabulary_size=vocabulary_size)

    assert not (tmp_path / "corpus").exists()


def test_unfit_files_are_left_out(sources: Path, tmp_path: Path):
    """Tests, installed packages, other encodings, other file types and empty files are left out."""
    prepare(tmp_path / "expected", sources, vocabulary_size=SIZE)
    for folder in ("test", "site-packages"):
        (sources / folder).mkdir()
        (sources / folder / "module.py").write_text("x = 1\n")
    (sources / "latin.py").write_bytes("café = 1\n".encode("latin-1"))
    (sources / "notes.txt").write_text("x = 1\n")
    (sources / "empty.py").touch()

    prepare(tmp_path / "corpus", sources, vocabulary_size=SIZE)

    assert contents(tmp_path / "corpus") == contents(tmp_path / "expected")


def test_text_is_capped(tmp_path: Path):
    """At most ``max_bytes`` of the standard library are read."""
    sources = Path(sysconfig.get_path("stdlib"))

    prepare(tmp_path / "corpus", sources, vocabulary_size=SIZE, max_bytes=300_000)

    used = sum(len(text.encode()) for split in SPLITS for text in texts(tmp_path / "corpus", split))
    assert 250_000 < used <= 300_000


def test_too_few_sources_are_refused(tmp_path: Path):
    """Sources that leave a split empty are an error that names their folder."""
    with pytest.raises(ValueError, match=f"no train document among the sources in {tmp_path}"):
        prepare(tmp_path / "corpus", tmp_path)
