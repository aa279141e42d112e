"""Deterministic algorithms."""

from __future__ import annotations

import os

import pytest
import torch

from runtime_di.providers.rng.determinism import CUBLAS_VARIABLE, deterministic_algorithms


@pytest.mark.parametrize(("preset", "during"), [(None, ":4096:8"), (":16:8", ":16:8")])
def test_cublas_variable_is_set_on_cuda(monkeypatch: pytest.MonkeyPatch, preset: str | None, during: str) -> None:
    """On CUDA the variable that cuBLAS needs is set within the body, unless the user has set it."""
    monkeypatch.delenv(CUBLAS_VARIABLE, raising=False)
    if preset is not None:
        monkeypatch.setenv(CUBLAS_VARIABLE, preset)

    with deterministic_algorithms(torch.device("cuda")):
        value = os.environ[CUBLAS_VARIABLE]

    assert (value, os.environ.get(CUBLAS_VARIABLE)) == (during, preset)
