"""Deterministic algorithms in torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
"""Variable that makes cuBLAS matrix products deterministic; a value set by the user is kept."""


@contextmanager
def deterministic_algorithms(device: torch.device) -> Iterator[None]:
    """Switch torch and its compiler to deterministic algorithms, and restore all flags when the body ends."""
    import torch
    from torch._inductor import config as inductor

    enabled, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    benchmark, compiler = torch.backends.cudnn.benchmark, getattr(inductor, "deterministic", None)
    sets_variable = device.type == "cuda" and CUBLAS_VARIABLE not in os.environ
    try:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        if sets_variable:
            os.environ[CUBLAS_VARIABLE] = ":4096:8"
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark
        if compiler is not None:  # older versions of torch have no such flag
            inductor.deterministic = compiler
        if sets_variable:
            os.environ.pop(CUBLAS_VARIABLE, None)
