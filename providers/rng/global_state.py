"""The state of the global generators of Python, numpy and torch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def global_generators(device: torch.device) -> dict[str, torch.Generator]:
    """Return torch's global generators by device type: the CPU's, then that of a CUDA device."""
    import torch

    generators = {"cpu": torch.default_generator}
    if device.type == "cuda":
        current = torch.cuda.current_device()  # initialises CUDA, which creates the generators
        generators["cuda"] = torch.cuda.default_generators[current if device.index is None else device.index]
    return generators


def global_state(generators: Mapping[str, torch.Generator]) -> dict[str, Any]:
    """Return the state of Python, numpy and ``generators``, as plain values and byte tensors."""
    import numpy as np

    numpy_state = dict(np.random.get_state(legacy=False))
    numpy_state["state"] = {
        name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in numpy_state["state"].items()
    }
    return {
        "python": random.getstate(),
        "numpy": numpy_state,
        "torch": {kind: generator.get_state() for kind, generator in generators.items()},
    }


def restore_global_state(state: Mapping[str, Any], generators: Mapping[str, torch.Generator]) -> None:
    """Restore a state of Python, numpy and ``generators``."""
    import numpy as np

    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    for kind, generator in generators.items():
        generator.set_state(state["torch"][kind])


@contextmanager
def preserved_global_state(device: torch.device) -> Iterator[None]:
    """Restore the state of the global generators when the body ends, whether it raises or not."""
    generators = global_generators(device)
    before = global_state(generators)
    try:
        yield
    finally:
        restore_global_state(before, generators)
