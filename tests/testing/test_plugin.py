"""The pytest plugin, as a project that installs the package sees it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from runtime_di import LaunchSettings, Phase, SettingsError
from runtime_di.containers import TrainingContainer, TrainingRuntime
from runtime_di.errors import OverrideError
from runtime_di.providers.writer.null import NullWriter
from runtime_di.testing import FakeTokenizer, FakeWriter, RanksError, assert_order
from tests.support.paths import ROOT

pytest_plugins = ["pytester"]


def test_the_written_example(open_runtime) -> None:
    """A fake tokenizer is used, and the writer remembers what a step writes."""
    with open_runtime(TrainingRuntime, overrides={"tokenizer": FakeTokenizer(size=100)}) as runtime:
        runtime.writer.scalar("loss", 0.5, step=1)

        assert runtime.writer.scalars["loss"]
        assert (runtime.tokenizer.size, runtime.vocabulary.size) == (100, 100)


def test_opened_runtime_is_of_one_process_on_the_fake_backend(open_runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever launched the tests, a runtime is alone, on the CPU, and starts whole without other ranks."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)

    with open_runtime(TrainingRuntime) as runtime:
        runtime.start()

        assert runtime.settings.launch == LaunchSettings()
        assert (runtime.process_groups.backend, runtime.device.type) == ("fake", "cpu")
        assert runtime.mesh.size() == 1
        assert_order(runtime, *(name for name in runtime.plan().order if name not in runtime.disabled))


def test_settings_by_keyword_make_one_rank_of_many(open_runtime) -> None:
    """A test is rank r of N by its settings, with the seeds, groups and sizes of that rank."""
    parallel, launch = {"tensor": 2}, {"rank": 5, "world_size": 8}

    with open_runtime(TrainingRuntime, launch=launch, parallel=parallel, rng={"seed": 7}) as runtime:
        assert runtime.process_groups.ranks("tp") == (4, 5)
        assert runtime.vocabulary.padded_size % 256 == 0
        assert runtime.settings.rng.seed == 7


def test_what_the_test_sets_stays(open_runtime, runtime_settings, run_folder: Path, tmp_path: Path) -> None:
    """A section with a folder, or set as an object, is used as it is; one without gets a folder of the test's."""
    settings = runtime_settings(
        TrainingRuntime, writer={"rank": 0}, checkpoint={"folder": tmp_path}, distributed={"backend": "gloo"}
    )

    assert settings.writer.folder == run_folder / "writer"
    assert settings.checkpoint.folder == tmp_path
    assert settings.distributed.backend == "gloo"
    assert runtime_settings(TrainingRuntime).checkpoint.folder is None
    with open_runtime(TrainingRuntime, writer={}) as runtime:
        runtime.writer.scalar("loss", 1.0, 1)
    assert (run_folder / "writer" / "metrics.jsonl").exists()
    with open_runtime(TrainingRuntime, overrides={TrainingContainer.writer: NullWriter()}) as runtime:
        assert isinstance(runtime.writer, NullWriter)
    with TrainingRuntime.overriding(writer=NullWriter()), open_runtime(TrainingRuntime) as runtime:
        assert isinstance(runtime.writer, NullWriter)


def test_wrong_settings_are_refused_as_ever(open_runtime) -> None:
    """The fixture's settings are validated, and its overrides checked."""
    with pytest.raises(SettingsError, match="unknown setting"):
        open_runtime(TrainingRuntime, parallell={})
    with pytest.raises(OverrideError, match="tokeniser: is not a service"):
        open_runtime(TrainingRuntime, {"tokeniser": FakeTokenizer()})


def test_runtime_without_any_of_these_sections_opens(open_runtime) -> None:
    """A runtime needs neither a writer nor a backend."""
    from tests.support.small_runtimes import declare, runtime_of

    with open_runtime(runtime_of(declare([], {"writer": Phase.RUNTIME}))) as runtime:
        assert isinstance(runtime.writer, FakeWriter)
    with open_runtime(runtime_of(declare([], {"other": Phase.RUNTIME}))) as runtime:
        assert runtime.other.name == "other"


LEFT_OPEN = """
from runtime_di.containers import TrainingRuntime

opened = []

def test_leaves_open(open_runtime, leak_watch):
    opened.append(open_runtime(TrainingRuntime).start())
    opened.append(open_runtime(TrainingRuntime))

def test_was_closed():
    import torch.distributed
    assert not torch.distributed.is_initialized()
    for runtime in opened:
        try:
            runtime.start()
        except Exception as error:
            assert type(error).__name__ == "ClosedError"
        else:
            assert 0, "open"
"""


@pytest.mark.processes
def test_what_a_test_leaves_open_is_closed(pytester: pytest.Pytester) -> None:
    """Without a with block the fixture closes, so that neither the test nor the next one sees anything of it."""
    pytester.makepyfile(LEFT_OPEN)

    pytester.runpytest_subprocess("-p", "no:randomly").assert_outcomes(passed=2)


def test_fake_has_the_interface_and_no_more(fake, open_runtime) -> None:
    """A mock of the annotated type takes its calls, refuses others, and fits where it is injected."""
    writer = fake(TrainingRuntime, "writer")
    tokenizer = fake(TrainingRuntime, TrainingContainer.tokenizer, size=7, **{"encode.return_value": [1, 2]})

    with open_runtime(TrainingRuntime, {"writer": writer, "tokenizer": tokenizer}) as runtime:
        runtime.writer.scalar("loss", value=0.5, step=1)

        assert (runtime.vocabulary.size, runtime.tokenizer.encode("x")) == (7, [1, 2])
    writer.scalar.assert_called_once_with("loss", 0.5, 1)
    with pytest.raises(TypeError, match="missing a required argument: 'step'"):
        writer.scalar("loss", 0.5)
    with pytest.raises(AttributeError, match="scalars"):
        writer.scalars("loss")


@pytest.mark.parametrize("service", TrainingRuntime.plan().order)
def test_every_service_can_be_faked(fake, service: str) -> None:
    """The annotations of all shipped services are classes that can be mocked, torch's included."""
    mock = fake(TrainingRuntime, service)

    TrainingRuntime.open(overrides={service: mock}).close()


@pytest.mark.parametrize(
    ("service", "attributes"),
    [
        ("process_groups", ["grid", "rank", "backend", "world", "cpu_collectives"]),
        ("vocabulary", ["size", "padded_size"]),
        ("timers", ["synchronize"]),
        ("microbatches", ["micro_size", "data_parallel"]),
        ("rng", ["seeds"]),
    ],
)
def test_fake_has_the_attributes_that_are_set_on_instances(fake, service: str, attributes: list[str]) -> None:
    """Fields of a dataclass and annotated attributes are there, and can be set."""
    mock, changed = fake(TrainingRuntime, service), fake(TrainingRuntime, service, **{attributes[0]: "changed"})

    assert [name for name in attributes if not hasattr(mock, name)] == []
    assert getattr(changed, attributes[0]) == "changed"
    assert not hasattr(mock, "anything_else")


def test_fake_of_no_service_is_refused(fake) -> None:
    """A misspelt name is refused, and the message lists the known names."""
    with pytest.raises(
        OverrideError, match=r"tokeniser: is not a service of TrainingRuntime\n.*fake one of tokenizer, "
    ):
        fake(TrainingRuntime, "tokeniser")


def rank_of_world(settings: Any) -> tuple[int, int]:
    with TrainingRuntime.open(TrainingRuntime.settings_class()(**settings)) as runtime:
        return runtime.start().process_groups.rank, runtime.process_groups.size("tp")


def fail_on_rank_1() -> None:
    assert os.environ["RANK"] != "1", "as expected"


@pytest.mark.processes
def test_ranks_are_real(ranks) -> None:
    """A function runs on n processes over gloo; results come by rank, and a failure with its traceback."""
    assert ranks(rank_of_world, 2, {"parallel": {"tensor": 2}}) == [(0, 2), (1, 2)]
    with pytest.raises(RanksError, match=r"rank 1 raised AssertionError(.|\n)*in fail_on_rank_1"):
        ranks(fail_on_rank_1, 2)


SUITE = """
import pytest
from runtime_di.containers import TrainingRuntime
from runtime_di.testing import FakeTokenizer

@pytest.mark.parametrize("size", range(10, 16))
def test_vocabulary(open_runtime, size):
    with open_runtime(TrainingRuntime, {"tokenizer": FakeTokenizer(size=size)}) as runtime:
        assert runtime.vocabulary.size == size

def test_fake(fake, open_runtime):
    with open_runtime(TrainingRuntime, {"writer": fake(TrainingRuntime, "writer")}) as runtime:
        runtime.writer.flush()
"""


@pytest.mark.processes
@pytest.mark.parametrize("options", [["-n", "2"], ["-p", "randomly", "-p", "no:cacheprovider"], ["-W", "error"]])
def test_plugin_works_with_other_plugins(pytester: pytest.Pytester, options: list[str]) -> None:
    """Distributed over processes, in random order, and with warnings as errors, the watch raises no false alarm."""
    pytester.makeini("[pytest]\nruntime_di_leak_watch = true\naddopts = --strict-markers --strict-config\n")
    pytester.makepyfile(SUITE)

    pytester.runpytest_subprocess(*options).assert_outcomes(passed=7)


@pytest.mark.processes
def test_collecting_imports_no_torch(pytester: pytest.Pytester) -> None:
    """Neither the plugin nor the kit import torch, tokenizers or numpy before a test needs them."""
    pytester.makepyfile(
        "import sys\nimport runtime_di.testing\n"
        "def test_it():\n    assert not {'torch', 'tokenizers', 'numpy'} & set(sys.modules)"
    )

    pytester.runpytest_subprocess("-p", "no:randomly", "-p", "no:hypothesispytest").assert_outcomes(passed=1)


@pytest.mark.processes
def test_without_pytest_mock_only_fake_is_missing(pytester: pytest.Pytester) -> None:
    """A project without pytest-mock has everything else; a request for a fake says what to install."""
    pytester.makepyfile(SUITE)

    result = pytester.runpytest_subprocess("-p", "no:pytest_mock", "-p", "no:randomly")

    result.assert_outcomes(passed=6, errors=1)
    result.stdout.fnmatch_lines(["The fixture 'fake' needs pytest-mock.", "  fix: pip install 'runtime-di?testing?'"])


def test_extra_installs_what_the_plugin_uses() -> None:
    """The extra that the message names has pytest-mock."""
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    assert {Requirement(line).name for line in extras["testing"]} == {"pytest", "pytest-mock"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the wheel is installed, without what it depends on."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        original, copy = ROOT / name, source / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if original.is_symlink():
            copy.symlink_to(os.readlink(original))
        elif original.exists():
            copy.write_bytes(original.read_bytes())
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True, capture_output=True)
    return target


OUTSIDE = """
import runtime_di

def test_installed(open_runtime):
    assert runtime_di.__file__.startswith({target!r})
"""


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_project_that_installs_the_wheel_has_the_plugin(
    pytester: pytest.Pytester, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Away from the sources, the wheel's entry point is what provides the fixtures."""
    monkeypatch.setenv("PYTHONPATH", str(installed))
    pytester.makepyfile(SUITE + OUTSIDE.format(target=str(installed)))

    result = pytester.runpytest_subprocess("-p", "no:randomly", "-W", "error")

    result.assert_outcomes(passed=8)
    result.stdout.fnmatch_lines(["plugins:*runtime-di*"])
