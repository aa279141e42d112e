"""The leak watch: process state that tests and services leave behind."""

from __future__ import annotations

import os
import random
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime_di import CapabilityError, Phase, Runtime, SettingsError, service
from runtime_di.testing import assert_no_effects
from runtime_di.testing.leaks import Watch
from runtime_di.testing.leaks import watch as leaks
from tests.support.paths import ROOT
from tests.support.process_leaks import LEAKS
from tests.support.small_runtimes import NOT_A_FOLDER, JobSettings, container_of, reading, runtime_of

pytest_plugins = ["pytester"]

LEAKY_TESTS = """
import pytest
from tests.support.process_leaks import LEAKS
from runtime_di import Phase, Runtime, RuntimeContainer, RuntimeSettings, service
from runtime_di.testing.leaks import watch

watch._GRACE_S = 0.2  # nothing here ends by itself

class LeakySettings(RuntimeSettings):
    leak: str

def open_leaky(leak):
    LEAKS[leak][0]()
    yield leak

class LeakyContainer(RuntimeContainer):
    leaky = service(Phase.RUNTIME, open_leaky, RuntimeContainer.settings.provided.leak)

class LeakyRuntime(Runtime, container=LeakyContainer):
    settings: LeakySettings
    leaky: str

@pytest.mark.parametrize("leak", LEAKS)
def test_leaks(leak, open_runtime, leak_watch):
    with open_runtime(LeakyRuntime, leak=leak) as runtime:
        runtime.start()
"""


@pytest.mark.processes
def test_every_kind_of_leak_is_reported_with_its_service(pytester: pytest.Pytester) -> None:
    """A test whose service leaks is an error that names the state and the service, whatever the kind."""
    pytester.makepyfile(LEAKY_TESTS)

    result = pytester.runpytest_subprocess("-p", "no:randomly", "-o", f"pythonpath={ROOT}")

    result.assert_outcomes(passed=len(LEAKS), errors=len(LEAKS))
    reports = result.outlines
    for leak, (_, report) in LEAKS.items():
        heading = next(
            number for number, line in enumerate(reports) if line.endswith(f"[{leak}] leaked process state.")
        )
        (line,) = [line for line in reports[heading + 1 : heading + 12] if report in line][:1] or [reports[heading + 1]]
        assert report in line, leak
        assert line.endswith("(changed by the service 'leaky' of LeakyRuntime)")
        assert "  built meanwhile: LeakyRuntime: leaky" in reports[heading + 1 : heading + 12]


def leaky_runtime(leak: Callable[[], object], undo: Callable[[], object] = lambda: None) -> type[Runtime]:
    def open_leaky() -> Iterator[int]:
        leak()
        yield 1
        undo()

    return runtime_of(container_of({"leaky": service(Phase.RUNTIME, open_leaky)}))


def test_what_a_service_undoes_is_not_a_leak(tmp_path: Path) -> None:
    """A service that restores the state on close leaves nothing to report."""
    runtime_class = leaky_runtime(lambda: os.environ.update(LEAKED="1"), lambda: os.environ.pop("LEAKED"))
    watch = Watch()

    with watch.running():
        with runtime_class.open() as runtime:
            runtime.start()
            open_leaks = watch.leaks()
        closed_leaks = watch.leaks()

    assert open_leaks[0] == (
        "environment: LEAKED is set, and was not there (changed by the service 'leaky' of SmallRuntime)"
    )
    assert open_leaks[1:] == ["runtime: SmallRuntime was not closed; built: leaky"]
    assert closed_leaks == []


@pytest.mark.leak_watch(ignore=["random state"])
def test_numbers_drawn_by_the_test_are_not_a_leak() -> None:
    """Only the generators that a service's build changed are compared on close."""
    import numpy as np

    watch, before = Watch(), np.random.get_state()

    with watch.running():
        with leaky_runtime(lambda: np.random.seed(7), lambda: np.random.set_state(before)).open() as runtime:
            runtime.start()
            random.random()
        kept = watch.leaks()
        with leaky_runtime(lambda: np.random.seed(7)).open() as runtime:
            runtime.start()
            random.random()
        left = watch.leaks()
    np.random.set_state(before)

    by = "(changed by the service 'leaky' of SmallRuntime)"
    assert kept == []
    assert left == [f"random state: that of numpy.random was not restored on close {by}"]


def test_unknown_kinds_are_refused() -> None:
    """A misspelt kind to ignore is refused, and the message lists the known kinds."""
    with pytest.raises(
        SettingsError, match=r"threads: is not a kind of state\n.*environment, .*thread, .*random state"
    ):
        Watch(["threads"])


def test_folders_are_read_once_before_and_once_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of a service does not walk the folders, which may be large."""
    walks: list[Path] = []
    monkeypatch.setattr(leaks, "files", lambda *folders: walks.extend(folders) or ())

    with assert_no_effects(tmp_path), leaky_runtime(lambda: None).open() as runtime:
        runtime.start()

    assert walks == [tmp_path, tmp_path]


def test_refused_opening_leaves_no_open_runtime() -> None:
    """A failed open() leaves no open runtime, even while its error is alive."""
    runtime_class, watch = runtime_of(reading([], "writer"), settings=JobSettings), Watch()

    with watch.running():
        with pytest.raises(CapabilityError) as kept:
            runtime_class.open(JobSettings(writer={"folder": NOT_A_FOLDER}))
        found = watch.leaks()

    assert kept.value.problems
    assert found == []


def test_changed_and_deleted_variables_are_reported_without_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value may be a secret, so the message has none."""
    monkeypatch.setenv("CHANGED", "password1")
    monkeypatch.setenv("DELETED", "password2")
    watch = Watch()

    with watch.running():
        os.environ["CHANGED"] = "password3"
        del os.environ["DELETED"]
        found = watch.leaks()

    assert found == ["environment: CHANGED has another value", "environment: DELETED is gone"]


@pytest.mark.processes
def test_what_is_about_to_end_is_waited_for() -> None:
    """Threads and processes that end by themselves within a moment are no leak."""
    watch, stop = Watch(), threading.Event()

    with watch.running():
        threading.Timer(0.1, stop.set).start()
        threading.Thread(target=stop.wait).start()
        child = subprocess.Popen(["sleep", "0.1"])
        threading.Thread(target=child.wait).start()
        found = watch.leaks()

    assert found == []


@pytest.mark.processes
def test_ignored_kinds_are_not_reported(pytester: pytest.Pytester) -> None:
    """A marker switches the watch on for a module, leaves kinds out, or switches it off for one test."""
    pytester.makeini("[pytest]\nruntime_di_leak_watch = true\n")
    pytester.makepyfile(
        """
        import os, pytest
        from tests.support.process_leaks import LEAKS

        def test_watched(): LEAKS["environment"][0]()

        @pytest.mark.leak_watch(ignore=["environment"])
        def test_ignored(): os.environ.pop("LEAKED")

        @pytest.mark.leak_watch(False)
        def test_unwatched(): LEAKS["thread"][0]()

        def test_failed():
            LEAKS["environment"][0]()
            assert 0
        """
    )

    result = pytester.runpytest_subprocess("-p", "no:randomly", "-o", f"pythonpath={ROOT}")

    result.assert_outcomes(passed=3, failed=1, errors=1)
    result.stdout.fnmatch_lines(
        ["*::test_watched leaked process state.", "  environment: LEAKED is set, and was not there"]
    )


def test_effects_are_reported_with_the_build_log(tmp_path: Path) -> None:
    """assert_no_effects names every file that was created, changed or deleted, and what was built."""
    old, changed, new = tmp_path / "old", tmp_path / "changed", tmp_path / "folder" / "new"
    old.touch()
    changed.touch()

    def leak() -> None:
        old.unlink()
        changed.write_text("!")
        new.parent.mkdir()
        new.touch()

    with pytest.raises(AssertionError) as caught, assert_no_effects(tmp_path), leaky_runtime(leak).open() as runtime:
        runtime.start()

    assert sorted(str(caught.value).splitlines()) == sorted(
        [
            "There were side effects.",
            f"  file: {changed} is 1 bytes instead of 0 bytes",
            f"  file: {old} is gone",
            f"  file: {new.parent} is there, and was not there",
            f"  file: {new} is 0 bytes, and was not there",
            "  built meanwhile: SmallRuntime: leaky",
        ]
    )


def test_opening_has_no_effects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An open runtime without built services has changed nothing, and nothing in the working directory."""
    from runtime_di.containers import TrainingRuntime, TrainingSettings

    monkeypatch.chdir(tmp_path)

    with assert_no_effects():
        runtime = TrainingRuntime.open(TrainingSettings(writer={"folder": tmp_path / "run"}))
    runtime.close()
