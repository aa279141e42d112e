"""The modules that importing, loading, planning and checking import, each in a fresh process."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "tokenizers", "numpy", "tensorboard", "safetensors", "sentencepiece", "tiktoken", "wandb")

OWN_RUNTIME = """
from pathlib import Path
from runtime_di import *

class ModelSettings(Section):
    size: int = 3
    def requires(self, launch):
        yield Module("size", "torch")
        yield Module("", "tensorboard")

class JobSettings(RuntimeSettings):
    model: ModelSettings = ModelSettings()

def open_model(settings: ModelSettings) -> "torch.nn.Module":
    import torch
    return torch.nn.Identity()

class JobContainer(RuntimeContainer):
    model = service(Phase.DISTRIBUTED, open_model, RuntimeContainer.settings.provided.model)

class JobRuntime(Runtime, container=JobContainer):
    settings: JobSettings
    model: "torch.nn.Module"

settings = JobSettings.load(["--model.size", "4"])
JobRuntime.plan().check()
JobRuntime.plan().text(), JobRuntime.plan().mermaid(), settings.explain("model.size"), settings.fingerprint()
JobRuntime.open(settings).close()
"""

SHIPPED_RUNTIME = """
from runtime_di.containers import TrainingRuntime
settings = TrainingRuntime.settings_class().load([])
TrainingRuntime.plan().check()
TrainingRuntime.plan().text(), settings.explain("parallel.tensor"), settings.fingerprint()
TrainingRuntime.open(settings).close()
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "script",
    ["import runtime_di", "import runtime_di.containers", OWN_RUNTIME, SHIPPED_RUNTIME],
    ids=["import", "containers", "own", "shipped"],
)
def test_nothing_heavy_is_imported(script: str) -> None:
    """Import, settings, plan, check and capability checks import no tensor or tokenizer library."""
    report = f"import sys; print([name for name in {HEAVY!r} if name in sys.modules])"

    done = subprocess.run([sys.executable, "-c", f"{script}\n{report}"], capture_output=True, text=True, check=False)

    assert (done.stdout, done.stderr) == ("[]\n", "")
