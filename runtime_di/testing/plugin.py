"""The pytest plugin: runtimes, fakes, ranks and a watch over the state of the process."""

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
    """Opens a runtime that is closed when the test ends, or before that by ``with``."""

    def __call__(self, runtime: type[R], overrides: Mapping[Any, Any] | None = None, **settings: Any) -> R:
        """Open ``runtime`` with overrides as `Runtime.open` takes them, and these settings."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option of the ini file."""
    parser.addini(_OPTION, "fail every test that leaks state of the process", type="bool", default=False)


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line(
        "markers",
        "leak_watch(on=True, ignore=()): fail the test if it leaks state of the process, but for kinds to ignore",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Remember a success: the traceback of a failure holds what the test had open, so that leaks cannot be told."""
    item.stash[_PASSED] = call.when == "call" and call.excinfo is None
    return (yield)


@pytest.fixture(autouse=True)
def _runtime_di_leak_watch(request: pytest.FixtureRequest) -> Iterator[Watch | None]:
    """Watch the test; the first fixture of a test is the last that is taken down."""
    marker = request.node.get_closest_marker("leak_watch")
    on, ignore = _marked(*marker.args, **marker.kwargs) if marker else (request.config.getini(_OPTION), ())
    if not on and "leak_watch" not in request.fixturenames:
        yield None
        return
    from runtime_di.testing.leaks import Watch

    watch = Watch(ignore)
    with watch.running():
        yield watch
        let_go = request.node.funcargs.clear  # what fixtures without teardown made
        told = watch.leaks(let_go) if request.node.stash.get(_PASSED, False) else []
    if told:
        lines = [f"{request.node.nodeid} leaked state of the process.", *told, watch.log()]
        pytest.fail("\n  ".join(lines), pytrace=False)


def _marked(on: bool = True, ignore: tuple[str, ...] = ()) -> tuple[bool, tuple[str, ...]]:
    return on, ignore


@pytest.fixture
def leak_watch(_runtime_di_leak_watch: Watch) -> Watch:
    """Fail the test if it leaks state of the process; ``leak_watch.leaks()`` tells what it has left by now."""
    return _runtime_di_leak_watch


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Where the writers and checkpointers of `open_runtime` put their files."""
    return tmp_path / "run"


@pytest.fixture
def runtime_settings(run_folder: Path) -> Callable[..., Any]:
    """Make settings of a Runtime: ``runtime_settings(TrainingRuntime, parallel={"tensor": 2})``.

    They are of one process on the CPU and the fake backend, whatever the environment says, where the test says
    nothing else. With ``launch={"rank": 3, "world_size": 8}`` they are those of one rank of many.
    """
    from runtime_di.testing.opening import settings_for_test

    def make(runtime: type[Runtime], **settings: Any) -> Any:
        return settings_for_test(runtime, run_folder, settings)

    return make


@pytest.fixture
def open_runtime(run_folder: Path) -> Iterator[OpenRuntime]:
    """A function that opens a Runtime, with overrides as for `Runtime.open` and settings by keyword.

    Settings are as by `runtime_settings`. The writer is a `FakeWriter` unless the test overrides it or gives it
    settings. What the test leaves open is closed when it ends.
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
    """Make a mock with the interface of a service's annotated type: ``fake(TrainingRuntime, "tokenizer", size=7)``.

    A call that the type lacks, or with other arguments, fails. Keywords set attributes, and results of methods:
    ``**{"encode.return_value": [1, 2]}``.
    """
    from runtime_di.testing.autospec import autospec

    try:
        mocker = request.getfixturevalue("mocker")
    except pytest.FixtureLookupError:
        pytest.fail("The fixture 'fake' needs pytest-mock.\n  fix: pip install 'runtime-di[testing]'", pytrace=False)

    def make(runtime: type[Runtime], service: Any, **attributes: Any) -> Any:
        return autospec(mocker.create_autospec, runtime, service, attributes)

    return make


@pytest.fixture
def ranks() -> Callable[..., list[Any]]:
    """Run a function on real ranks: ``ranks(function, 2, *args)`` gives the results by rank; see `run_ranks`."""
    from runtime_di.testing.ranks import run_ranks

    return run_ranks
