"""The pytest plugin: fixtures for runtimes, fakes and ranks, and a leak watch."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import pytest

if TYPE_CHECKING:
    from runtime_di.runtime import Runtime
    from runtime_di.testing.leaks import Watch

R = TypeVar("R", bound="Runtime")

_OPTION = "runtime_di_leak_watch"
_PASSED = pytest.StashKey[bool]()


class OpenRuntime(Protocol):
    """Opens a runtime; it is closed at the end of its ``with`` block or of the test."""

    def __call__(self, runtime: type[R], overrides: Mapping[Any, Any] | None = None, **settings: Any) -> R:
        """Open ``runtime`` with these overrides, as for `Runtime.open`, and these settings."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the ini option."""
    parser.addini(_OPTION, "fail every test that leaks process state", type="bool", default=False)


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line(
        "markers",
        "leak_watch(on=True, ignore=()): fail the test if it leaks process state, except of the kinds in ignore",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Record whether the test passed: the traceback of a failed test keeps objects alive that look like leaks."""
    item.stash[_PASSED] = call.when == "call" and call.excinfo is None
    return (yield)


@pytest.fixture(autouse=True)
def _runtime_di_leak_watch(request: pytest.FixtureRequest) -> Iterator[Watch | None]:
    """Watch the test; this fixture is the first to be set up and the last to be torn down."""
    marker = request.node.get_closest_marker("leak_watch")
    on, ignore = _marked(*marker.args, **marker.kwargs) if marker else (request.config.getini(_OPTION), ())
    if not on and "leak_watch" not in request.fixturenames:
        yield None
        return
    from runtime_di.testing.leaks import Watch

    watch = Watch(ignore)
    with watch.running():
        yield watch
        release = request.node.funcargs.clear  # drops the values of fixtures without teardown
        leaks = watch.leaks(release) if request.node.stash.get(_PASSED, False) else []
    if leaks:
        lines = [f"{request.node.nodeid} leaked process state.", *leaks, watch.log()]
        pytest.fail("\n  ".join(lines), pytrace=False)


def _marked(on: bool = True, ignore: tuple[str, ...] = ()) -> tuple[bool, tuple[str, ...]]:
    return on, ignore


@pytest.fixture
def leak_watch(_runtime_di_leak_watch: Watch) -> Watch:
    """Fail the test if it leaks process state; ``leak_watch.leaks()`` returns the leaks so far."""
    return _runtime_di_leak_watch


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """The folder for files of the writers and checkpointers of `open_runtime`."""
    return tmp_path / "run"


@pytest.fixture
def runtime_settings(run_folder: Path) -> Callable[..., Any]:
    """A function that creates settings of a Runtime: ``runtime_settings(TrainingRuntime, parallel={"tensor": 2})``.

    What the test does not set is for one process on the CPU and the fake backend, whatever the environment contains.
    With ``launch={"rank": 3, "world_size": 8}`` they are the settings of rank 3 of 8.
    """
    from runtime_di.testing.opening import settings_for_test

    def create(runtime: type[Runtime], **settings: Any) -> Any:
        return settings_for_test(runtime, run_folder, settings)

    return create


@pytest.fixture
def open_runtime(run_folder: Path) -> Iterator[OpenRuntime]:
    """A function that opens a Runtime, with overrides as for `Runtime.open` and settings by keyword.

    Settings are completed as by `runtime_settings`. The writer is a `FakeWriter` unless the test overrides it or sets
    its settings. Runtimes that the test leaves open are closed when it ends.
    """
    from runtime_di.testing.opening import open_for_test

    with ExitStack() as stack:

        def open_one(runtime: type[R], overrides: Mapping[Any, Any] | None = None, **settings: Any) -> R:
            opened = open_for_test(runtime, run_folder, overrides, settings)
            stack.callback(opened.close)
            return opened

        yield open_one


@pytest.fixture
def fake(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """A function that mocks a service by its annotated type: ``fake(TrainingRuntime, "tokenizer", size=7)``.

    Calls of other methods, or with other arguments, fail. Keywords set attributes and results of methods:
    ``**{"encode.return_value": [1, 2]}``.
    """
    from runtime_di.testing.autospec import autospec

    try:
        mocker = request.getfixturevalue("mocker")
    except pytest.FixtureLookupError:
        pytest.fail("The fixture 'fake' needs pytest-mock.\n  fix: pip install 'runtime-di[testing]'", pytrace=False)

    def create(runtime: type[Runtime], service: Any, **attributes: Any) -> Any:
        return autospec(mocker.create_autospec, runtime, service, attributes)

    return create


@pytest.fixture
def ranks() -> Callable[..., list[Any]]:
    """`run_ranks`: ``ranks(function, 2, *args)`` calls a function on two real ranks and returns the results by rank."""
    from runtime_di.testing.ranks import run_ranks

    return run_ranks
