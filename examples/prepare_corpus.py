"""Write a token corpus of the sources of Python's standard library, which every machine has.

Files of the corpus folder:

- ``tokenizer.json``: a byte-level BPE; ``tokenizer_config.json`` names its end-of-document token.
- ``train.bin`` and ``validation.bin``: token ids as little-endian uint16, the end-of-document id after each document.
- ``captions.bin``: the numbers from 0000 to 9999 in the same format, one token a digit, for train_mimo.py.
- ``corpus.json``: number of documents and tokens of each split.

The folder gets its name only when it is complete, and equal sources give equal bytes.

    python examples/prepare_corpus.py --out runs/corpus
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import sysconfig
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tokenizers import Tokenizer

END_OF_DOCUMENT = "<|endoftext|>"
SPLITS = ("train", "validation")
ID_DTYPE = "<u2"
NUM_DIGITS = 4
VALIDATION_ONE_IN = 16
"""One document in so many is a validation document."""
VOCABULARY_SIZES = range(257, 2**16 + 1)
"""At least every byte and the end-of-document token; at most the ids that fit uint16."""
NOT_IN_THE_LIBRARY = {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}
TABLES_OR_PLATFORM_SPECIFIC = {"distutils", "encodings", "ensurepip", "lib2to3", "pydoc_data", "turtledemo"}
SKIPPED_FOLDERS = NOT_IN_THE_LIBRARY | TABLES_OR_PLATFORM_SPECIFIC


def source_files(root: Path) -> Iterator[Path]:
    """Walk the Python files under a folder, without the skipped folders."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def collect(root: Path, max_bytes: int) -> dict[str, list[str]]:
    """Read at most ``max_bytes`` of documents by split, in the order of their paths' hashes, which decide the split.

    Empty files, and files that are not UTF-8, are left out.

    Raises:
        ValueError: a split has no document.
    """
    documents: dict[str, list[str]] = {split: [] for split in SPLITS}
    for digest, path in sorted((_digest(path, root), path) for path in source_files(root)):
        content = path.read_bytes()
        if not content or len(content) > max_bytes or not _is_utf8(content):
            continue
        max_bytes -= len(content)
        documents[SPLITS[digest[-1] % VALIDATION_ONE_IN == 0]].append(content.decode())
    for split in SPLITS:
        if not documents[split]:
            raise ValueError(
                f"no {split} document among the sources in {root}; raise --max-bytes or name another folder"
            )
    return documents


def _digest(path: Path, root: Path) -> bytes:
    return hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def train_tokenizer(texts: Sequence[str], vocabulary_size: int) -> Tokenizer:
    """Train a byte-level BPE of at most ``vocabulary_size`` tokens, the end-of-document token included."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokens(path: Path, texts: Sequence[str], tokenizer: Tokenizer) -> int:
    """Write the token ids of documents to one file and return their number."""
    import numpy as np

    end = tokenizer.token_to_id(END_OF_DOCUMENT)
    with path.open("wb") as file:
        for text in texts:
            file.write(np.array([*tokenizer.encode(text).ids, end], dtype=ID_DTYPE).tobytes())
        return file.tell() // np.dtype(ID_DTYPE).itemsize


def write_captions(path: Path, tokenizer: Tokenizer) -> None:
    """Write each number of ``NUM_DIGITS`` digits as a document with one token a digit."""
    import numpy as np

    digits = [tokenizer.token_to_id(digit) for digit in "0123456789"]  # single bytes, each of which is a token
    end = tokenizer.token_to_id(END_OF_DOCUMENT)
    np.array([[*number, end] for number in product(digits, repeat=NUM_DIGITS)], dtype=ID_DTYPE).tofile(path)


def prepare(out: Path, sources: Path, *, vocabulary_size: int = 2048, max_bytes: int = 5_000_000) -> dict[str, Any]:
    """Write the corpus to ``out`` unless it exists, and return the contents of ``corpus.json``.

    Raises:
        ValueError: the vocabulary does not fit uint16, sources are too few, or ``out`` exists and is another corpus or
            not a corpus.
    """
    if vocabulary_size not in VOCABULARY_SIZES:
        raise ValueError(f"--vocabulary-size is {vocabulary_size}; use 257 (every byte, one special token) to 65536")
    request = {"sources": str(sources), "vocabulary_size": vocabulary_size, "max_bytes": max_bytes}
    if out.exists():
        return _read_summary(out, request)
    documents = collect(sources, max_bytes)
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        folder = Path(scratch, out.name)
        _write(folder, documents, request)
        if not out.exists():  # another process may have finished first, with the same bytes
            folder.rename(out)
    return _read_summary(out, request)


def _write(folder: Path, documents: dict[str, list[str]], request: dict[str, Any]) -> None:
    folder.mkdir()
    tokenizer = train_tokenizer(documents["train"], request["vocabulary_size"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END_OF_DOCUMENT}) + "\n")
    summary = {"request": request, "tokenizer_size": tokenizer.get_vocab_size()}
    for split, texts in documents.items():
        num_tokens = write_tokens(folder / f"{split}.bin", texts, tokenizer)
        summary[split] = {"documents": len(texts), "tokens": num_tokens}
    write_captions(folder / "captions.bin", tokenizer)
    (folder / "corpus.json").write_text(json.dumps(summary, indent=2) + "\n")


def _read_summary(out: Path, request: dict[str, Any]) -> dict[str, Any]:
    try:
        summary: dict[str, Any] = json.loads((out / "corpus.json").read_text())
    except OSError as error:
        raise ValueError(f"{out} exists and is not a corpus; choose another --out, or remove it") from error
    if summary["request"] != request:
        raise ValueError(
            f"{out} was written for {summary['request']}, not for {request}; choose another --out, or remove it"
        )
    return summary


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the corpus of the command line and print a summary."""
    parser = argparse.ArgumentParser(description="Write a token corpus of the sources of Python's standard library.")
    parser.add_argument("--out", type=Path, default=Path("runs/corpus"), help="folder to write (%(default)s)")
    parser.add_argument("--vocabulary-size", type=int, default=2048, help="tokens of the BPE (%(default)s)")
    parser.add_argument("--max-bytes", type=int, default=5_000_000, help="bytes of text to use (%(default)s)")
    parser.add_argument(
        "--sources", type=Path, default=Path(sysconfig.get_path("stdlib")), help="Python files (%(default)s)"
    )
    options = vars(parser.parse_args(arguments))
    existed = options["out"].exists()
    try:
        summary = prepare(**options)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(f"{'found' if existed else 'wrote'} {options['out']}: a tokenizer of {summary['tokenizer_size']} tokens")
    for split in SPLITS:
        print(f"  {split}.bin: {summary[split]['documents']} documents, {summary[split]['tokens']:,} tokens")


if __name__ == "__main__":
    main()
