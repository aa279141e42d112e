"""The script behind `make train`: losses, resuming, conversions, wrong settings and interruptions."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pretrain_gpt import PretrainSettings
from runtime_di import RuntimeSettings
from runtime_di.containers import ConverterRuntime, ConverterSettings
from runtime_di.providers.checkpoint.format.snapshot import Snapshot, write_snapshot
from runtime_di.testing import run_ranks
from tests.support.paths import ROOT
from tests.support.tiny_training import losses, tiny_argv, tiny_corpus, train_in_process
from train_mimo import CaptionSettings

SCRIPT = str(ROOT / "examples" / "pretrain_gpt.py")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_corpus(tmp_path_factory.mktemp("tiny") / "corpus")


@pytest.fixture(scope="module")
def uninterrupted(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of six steps on two data-parallel ranks."""
    run = tmp_path_factory.mktemp("uninterrupted")
    run_ranks(train_in_process, 2, tiny_argv(corpus, run))
    return run


@pytest.mark.processes
def test_loss_falls_and_is_written(uninterrupted: Path) -> None:
    """The loss starts near ln of the vocabulary size and falls; losses and checkpoints are on disk."""
    written = losses(uninterrupted)

    assert sorted(written) == [1, 2, 3, 4, 5, 6]
    assert abs(written[1] - math.log(512)) < 0.5
    assert written[6] < written[1]
    assert sorted(losses(uninterrupted, "validation/loss")) == [3, 6]
    assert sorted(path.name for path in (uninterrupted / "checkpoints").iterdir()) == [
        "step-00000002",
        "step-00000004",
        "step-00000006",
    ]


@pytest.mark.processes
def test_resumed_run_has_bitwise_the_same_losses(corpus: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """A run that stops after a checkpoint and is started again has the losses of an uninterrupted run."""
    run_ranks(train_in_process, 2, tiny_argv(corpus, tmp_path))
    for step in (4, 6):
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()

    run_ranks(train_in_process, 2, tiny_argv(corpus, tmp_path))

    assert losses(tmp_path) == losses(uninterrupted)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) > len(losses(tmp_path)) + 4


@pytest.mark.processes
@pytest.mark.parametrize(("ranks", "flags"), [(1, []), (4, []), (2, ["--parallel.tensor", "2"])])
def test_run_resumes_at_other_parallel_sizes(
    corpus: Path, uninterrupted: Path, tmp_path: Path, ranks: int, flags: list[str]
) -> None:
    """Resumed at another data- or tensor-parallel size, losses stay within 1e-4 of the uninterrupted run's."""
    start = ["--checkpoint.load", str(uninterrupted / "checkpoints" / "step-00000004")]

    run_ranks(train_in_process, ranks, tiny_argv(corpus, tmp_path, *start, *flags))

    resumed = losses(tmp_path)
    assert sorted(resumed) == [5, 6]
    assert resumed == pytest.approx({step: losses(uninterrupted)[step] for step in resumed}, abs=1e-4)


def convert(start: Path, folder: Path, **conversion: Any) -> Path:
    settings = ConverterSettings(checkpoint={"load": start}, conversion={"folder": folder, **conversion})
    with ConverterRuntime.open(settings) as runtime:
        return runtime.converter.convert()


@pytest.mark.processes
def test_training_resumes_from_a_tensor_parallel_conversion(corpus: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """Two tensor-parallel ranks resume from the converted checkpoint at its step, optimizer state included."""
    wide = convert(uninterrupted / "checkpoints" / "step-00000004", tmp_path / "wide", tensor=2)

    run_ranks(
        train_in_process, 2, tiny_argv(corpus, tmp_path, "--checkpoint.load", str(wide), "--parallel.tensor", "2")
    )

    resumed = losses(tmp_path)
    assert sorted(resumed) == [5, 6]
    assert resumed == pytest.approx({step: losses(uninterrupted)[step] for step in resumed}, abs=1e-4)


@pytest.mark.processes
def test_training_starts_from_weights_alone(
    corpus: Path, uninterrupted: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From a file of weights, a run starts at step 0 with a fresh optimizer, logs that, and can be resumed."""
    weights = convert(uninterrupted / "checkpoints", tmp_path / "weights", single_file=True)
    argv = tiny_argv(corpus, tmp_path, "--checkpoint.load", str(weights))

    train_in_process([*argv, "--train.steps", "2"])
    first = losses(tmp_path)
    train_in_process([*argv, "--train.steps", "4"])

    assert sorted(first) == [1, 2]
    assert first[1] < losses(uninterrupted)[1] - 0.3
    assert [message for message in caplog.messages if "started from" in message] == [
        f"started from the weights of {weights}, with a fresh optimizer"
    ]
    assert sorted(losses(tmp_path)) == [1, 2, 3, 4]


@pytest.mark.processes
def test_tensor_and_data_parallelism_together(corpus: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """Two tensor-parallel by two data-parallel ranks have the losses of two data-parallel ranks."""
    run_ranks(train_in_process, 4, tiny_argv(corpus, tmp_path, "--parallel.tensor", "2"))

    assert losses(tmp_path) == pytest.approx(losses(uninterrupted), abs=1e-3)


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_torchrun_is_interrupted_and_started_again(corpus: Path, tmp_path: Path) -> None:
    """Under torchrun, SIGTERM ends every rank with a non-zero status, and the same command resumes afterwards."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, SCRIPT, *tiny_argv(corpus, tmp_path, "--train.steps", "100000")]
    with (tmp_path / "stderr").open("w") as stderr:
        interrupted = subprocess.Popen(command, env=environment(), stderr=stderr)
    try:
        while not (tmp_path / "checkpoints" / "step-00000004").exists():
            assert interrupted.poll() is None, (tmp_path / "stderr").read_text()
            time.sleep(0.05)
        interrupted.send_signal(signal.SIGTERM)
        interrupted.wait(timeout=60)
    finally:
        interrupted.kill()
    reached = max(losses(tmp_path))

    done = subprocess.run(
        [*torchrun, SCRIPT, *tiny_argv(corpus, tmp_path, "--train.steps", str(reached + 3))],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert interrupted.returncode != 0
    assert done.returncode == 0, done.stderr
    assert max(losses(tmp_path)) == reached + 3
    assert f"metrics in {tmp_path}, latest checkpoint {tmp_path}/checkpoints/step-" in done.stderr


@pytest.mark.parametrize(
    ("settings", "section"), [(PretrainSettings, "corpus"), (CaptionSettings, "captions")], ids=["gpt", "mimo"]
)
def test_data_folder_never_comes_from_a_checkpoint(
    settings: type[RuntimeSettings], section: str, tmp_path: Path
) -> None:
    """The folder of the corpus or the captions is never taken from a checkpoint's settings."""
    saved = {section: {"folder": "elsewhere"}, "model": {"width": 64}}
    write_snapshot(tmp_path, Snapshot(step=1, settings=saved))

    taken = settings.load(["--checkpoint.load", str(tmp_path), "--checkpoint.load_settings"])

    assert (taken.explain(f"{section}.folder").value, taken.explain("model.width").value) == ("runs/corpus", "64")
    assert section not in taken.portable


WRONG_SETTINGS = {
    "parallel size": (["--parallel.tensor", "3"], {"RANK": "0", "WORLD_SIZE": "2"}, "parallel.tensor = 3"),
    "tokenizer path": (["--tokenizer.path", "/nowhere/tokenizer.json"], {}, "tokenizer.path = /nowhere/tokenizer.json"),
    "flag": (["--train.step", "3"], {}, "did you mean --train.steps?"),
    "variable": ([], {"RUNTIME_DI_PARALLEL__TENSR": "2"}, "did you mean RUNTIME_DI_PARALLEL__TENSOR?"),
    "run folder": (["--writer.folder", "/dev/null/run"], {}, "writer.folder = /dev/null/run"),
    "model": (["--parallel.tensor", "8"], {"RANK": "0", "WORLD_SIZE": "8"}, "cannot share 4 attention heads"),
}


@pytest.mark.processes
@pytest.mark.parametrize("wrong", WRONG_SETTINGS)
def test_wrong_setting_ends_before_anything_is_touched(wrong: str, corpus: Path, tmp_path: Path) -> None:
    """A wrong setting is reported with its field and a fix, status 2 and no traceback; no file is written, and torch is
    not imported.
    """
    flags, variables, problem = WRONG_SETTINGS[wrong]
    argv = [*tiny_argv(corpus, tmp_path / "run"), *flags]

    done = subprocess.run(
        [sys.executable, "-X", "importtime", SCRIPT, *argv],
        env=environment(**variables),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    message = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == 2
    assert problem in "\n".join(message)
    assert "fix:" in "\n".join(message)
    assert "Traceback" not in done.stderr
    assert "| torch\n" not in done.stderr
    assert list(tmp_path.iterdir()) == []
