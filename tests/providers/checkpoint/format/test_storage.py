"""The files of tensors: exact, and harmless to load."""

from __future__ import annotations

import pickle
import random
import shutil
from pathlib import Path

import torch

from runtime_di.providers.checkpoint.format.snapshot import (
    CheckpointError,
)
from tests.support.checkpoints.saved import bits, open_for, weights

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def test_tensors_are_restored_bitwise_and_in_place(tmp_path):
    """Tensors of any dtype, shape and strides are loaded bit for bit into the tensors of the state."""
    shared = torch.randn(3, 4)
    tensors = {str(dtype): torch.randn(2, 3).to(dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 3), "nan": torch.tensor([float("nan"), -0.0])}
    tensors |= {"strided": torch.randn(4, 6).t()[::2], "tied": shared, "tied too": shared, "part": shared[1]}
    open_for(tmp_path).save({"model": tensors}, 1)
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    model = dict(targets)

    open_for(tmp_path).load({"model": model})

    assert {name: bits(tensor) for name, tensor in targets.items()} == {n: bits(t) for n, t in tensors.items()}
    assert all(model[name] is target for name, target in targets.items())


def test_files_have_a_bounded_size(tmp_path, monkeypatch):
    """Tensors are written to several files of bounded size, whole tensors under their own names."""
    from safetensors import safe_open

    monkeypatch.setattr("runtime_di.providers.checkpoint.format.storage._FILE_BYTES", 64)
    tensors = {name: torch.full((8,), float(index)) for index, name in enumerate("abcde")}

    folder = open_for(tmp_path).save({"model": tensors}, 1)

    names = [list(safe_open(file, framework="pt").keys()) for file in sorted(folder.glob("*.safetensors"))]
    assert names == [["model.a", "model.b"], ["model.c", "model.d"], ["model.e"]]


class Hostile:
    """Touches a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_no_file_of_a_checkpoint_can_execute_code(tmp_path):
    """A pickle in place of any file, or as torch's own reader expects it beside them, is never unpickled."""
    checkpoint = open_for(tmp_path).save({"w": weights(), "n": 1}, 1)
    names = sorted(path.name for path in checkpoint.iterdir())
    pickles = {"pickle": pickle.dumps(Hostile(tmp_path / "touched"))}
    torch.save(Hostile(tmp_path / "touched"), tmp_path / "saved")
    pickles["torch.save"] = (tmp_path / "saved").read_bytes()
    refused = []

    for content in pickles.values():
        for name in [*names, ".metadata", "__0_0.distcp"]:
            folder = tmp_path / "hostile"
            shutil.copytree(checkpoint, folder)
            (folder / name).write_bytes(content)
            try:
                open_for(load=folder).load({"w": weights(fill=0), "n": 0})
            except CheckpointError as error:
                refused.append((name, str(folder / name) in str(error)))
            shutil.rmtree(folder)

    assert names == ["snapshot.json", "tensors-00000-00000.safetensors", "tensors.json", "values-00000.json"]
    assert refused == [(name, True) for name in names] * 2
    assert not (tmp_path / "touched").exists()


def test_damaged_files_load_correctly_or_are_refused(tmp_path):
    """Files with bytes changed, cut or added either load or raise a CheckpointError, and never another error."""
    checkpoint = open_for(tmp_path).save({"w": weights(), "rng": torch.ones(3, dtype=torch.uint8), "t": (1, {2: 3})}, 1)
    files = sorted(checkpoint.iterdir())
    chance = random.Random(1)
    refused = 0

    for number in range(160):
        file = files[number % len(files)]
        content = file.read_bytes()
        damaged = bytearray(content)
        at = chance.randrange(len(content))
        damaged[at : at + chance.randrange(3)] = chance.randbytes(chance.randrange(3))
        file.write_bytes(damaged)
        try:
            open_for(tmp_path).load({"w": weights(fill=0), "rng": torch.zeros(3, dtype=torch.uint8), "t": 0})
        except CheckpointError:
            refused += 1
        file.write_bytes(content)

    assert 50 < refused < 160
