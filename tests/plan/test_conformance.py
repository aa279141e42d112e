"""Which services, fakes and factories fit an annotation; what cannot be decided passes."""

from __future__ import annotations

import collections
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Literal, NewType, Protocol, TypedDict, TypeVar
from unittest import mock

import pytest

from runtime_di.plan import conformance, type_hints
from runtime_di.plan.type_hints import UNDECIDED

if TYPE_CHECKING:
    from collections import OrderedDict as Hidden

    import nowhere

T = TypeVar("T")
Size = NewType("Size", int)


class Shape(TypedDict):
    width: int


class Tokenizer(Protocol):
    name: str

    @property
    def size(self) -> int: ...

    def encode(self, text: str, *, special: bool = False) -> list[int]: ...


class Sink(Protocol):
    def write(self, key: str, value: float) -> None: ...


class Stack(Protocol[T]):
    def push(self, item: T) -> None: ...


class Full:
    name = "full"
    size = 3

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return []


class ByWrite:
    def __init__(self, write: Any) -> None:
        self.write = write


class Loose(Protocol):
    def run(self): ...  # type: ignore[no-untyped-def]

    def rows(self) -> Iterator[int]: ...

    def fetch(self) -> Awaitable[int]: ...

    async def later(self) -> int: ...


class Fetching:
    def run(self) -> Iterator[int]:
        yield 1

    def rows(self) -> Iterator[int]:
        yield 1

    async def fetch(self) -> int:
        return 1

    async def later(self) -> int:
        return 1


async def write_async(key: str, value: float) -> None: ...


def write_lazily(key: str, value: float) -> Iterator[None]:
    yield


async def write_rows(key: str, value: float) -> AsyncIterator[None]:
    yield


class RunsAsync(Fetching):
    async def run(self) -> None: ...  # type: ignore[override]


class Base:
    def write(self, key: str, value: float) -> None: ...


class Derived(Base): ...


class Narrower(Derived):
    def write(self) -> None: ...  # type: ignore[override]


class Asynchronous(Base):
    async def write(self, key: str, value: float) -> None: ...  # type: ignore[override]


class Wider(Base):
    def write(self, key: str, value: float, more: int = 1) -> None: ...

    def close(self) -> None: ...


def static(function: Any, kind: Any = staticmethod) -> type:
    """A class whose ``write`` is a static or class method."""
    return type("Static", (), {"write": kind(function)})


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (Full(), Tokenizer),
        (Full(), "Tokenizer"),
        (None, "Tokenizer | None"),
        (None, None),
        (3, "int | str"),
        (3, "Optional[int]"),
        (Derived(), Base),
        (ByWrite(lambda key, value: None), Sink),
        (ByWrite(lambda *args, **kwargs: None), Sink),
        (ByWrite(lambda key, value, more=1: None), Sink),
        (Wider(), Base),
        (Fetching(), Loose),
        (mock.Mock(spec=Derived), Base),
        (mock.Mock(), Sink),
        (static(lambda key, value: None)(), Sink),
        (static(lambda cls, key, value: None, classmethod)(), Sink),
        ({}, "Hidden | dict[str, int]"),
        (3, Size),
        ("a", Literal["a"]),
        ({"width": 1}, Shape),
        (len, Callable[[Any], int]),
        (3, Any),
        (3, "nowhere.Anything"),
        (3, T),
    ],
)
def test_value_that_fits_or_cannot_be_decided_passes(value: Any, annotation: Any) -> None:
    """Classes, unions, protocols and hidden imports are decided; anything else passes."""
    wanted = type_hints.resolve(annotation, __name__)

    mismatches = [] if wanted is UNDECIDED else conformance.value_mismatches(value, wanted)

    assert mismatches == []


@pytest.mark.parametrize(
    ("value", "annotation", "mismatches"),
    [
        (3, str, ["is not an instance of str"]),
        (None, Tokenizer, ["lacks 'encode' of Tokenizer", "lacks 'name' of Tokenizer", "lacks 'size' of Tokenizer"]),
        (3, "str | list[int]", ["is not an instance of str", "is not an instance of list"]),
        (Base(), Derived, ["is not an instance of Derived"]),
        ({}, "Hidden", ["is not an instance of OrderedDict"]),
        (ByWrite(3), Sink, ["write is not callable"]),
        (ByWrite(write_async), Sink, ["write is async, and that of Sink is not"]),
        (ByWrite(write_rows), Sink, ["write is an async generator, and that of Sink is not"]),
        (ByWrite(write_lazily), Sink, ["write is a generator, and that of Sink is not"]),
        (RunsAsync(), Loose, ["run is async, and that of Loose is not"]),
        (Asynchronous(), Base, ["write is async, and that of Base is not"]),
        (
            Narrower(),
            Base,
            ["write() does not take the calls of (key, value): too many positional arguments"],
        ),
        (
            ByWrite(lambda key: None),
            Sink,
            ["write(key) does not take the calls of (key, value): too many positional arguments"],
        ),
        (
            ByWrite(lambda key, number: None),
            Sink,
            ["write(key, number) does not take the calls of (key, value): missing a required argument: 'number'"],
        ),
        (
            ByWrite(lambda key, value, step: None),
            Sink,
            ["write(key, value, step) does not take the calls of (key, value): missing a required argument: 'step'"],
        ),
        (
            ByWrite(lambda *, key, value: None),
            Sink,
            ["write(*, key, value) does not take the calls of (key, value): too many positional arguments"],
        ),
        (object(), Stack[int], ["lacks 'push' of Stack"]),
    ],
)
def test_value_that_does_not_fit_is_refused_with_a_reason(value: Any, annotation: Any, mismatches: list[str]) -> None:
    """A mismatch names what is missing, or both signatures."""
    wanted = type_hints.resolve(annotation, __name__)

    assert conformance.value_mismatches(value, wanted) == mismatches


def test_properties_of_a_fake_are_not_run() -> None:
    """Checking a fake does not compute its properties."""

    class Lazy(Full):
        @property
        def size(self) -> int:  # type: ignore[override]
            raise AssertionError

    assert conformance.value_mismatches(Lazy(), Tokenizer) == []


class WithProperty:
    name: str

    @property
    def size(self) -> int:
        return 1

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return []


class Delegating:
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class SetInInit:
    def __init__(self) -> None:
        self.name, self.size = "", 1

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return []


class ComputedWrite:
    @property
    def write(self) -> Any:
        return print


@pytest.mark.parametrize(
    ("result", "annotation", "mismatches"),
    [
        (Full, Tokenizer, []),
        (WithProperty, Tokenizer, []),
        (SetInInit, Tokenizer, []),
        (Delegating, Tokenizer, []),
        (ComputedWrite, Sink, []),
        (static(lambda key, value: None), Sink, []),
        (static(lambda cls, key, value: None, classmethod), Sink, []),
        (
            static(lambda key: None),
            Sink,
            ["write(key) does not take the calls of (key, value): too many positional arguments"],
        ),
        (Base, Sink, []),
        (Base, Tokenizer, ["lacks 'encode' of Tokenizer"]),
        (Derived, Base, []),
        (Base, Derived, ["is not an instance of Derived"]),
        (collections.OrderedDict, dict[str, int], []),
        (Any, int, []),
        (UNDECIDED, int, []),
    ],
)
def test_result_class_is_decided_like_a_value(result: Any, annotation: Any, mismatches: list[str]) -> None:
    """A factory's result class is checked without an instance; what ``__init__`` may set is not required."""
    assert conformance.class_mismatches(result, annotation) == mismatches


def plain() -> Base:
    return Base()


def yields() -> Iterator[Base]:
    yield Base()


def yields_and_receives_the_failure() -> Generator[Base, BaseException | None, None]:
    yield Base()


def returns_an_iterator() -> Iterable[Base]:
    return [Base()]


def hidden() -> Hidden:
    raise AssertionError


def unknown() -> nowhere.Thing:
    raise AssertionError


def silent():
    yield 1


class Opener:
    def __call__(self) -> Iterator[Base]:
        yield Base()

    def method(self) -> Base:
        return Base()


@wraps(yields)
def decorated(*args: Any, **kwargs: Any) -> Any:
    return yields(*args, **kwargs)


@pytest.mark.parametrize(
    ("factory", "result"),
    [
        (plain, Base),
        (yields, Base),
        (yields_and_receives_the_failure, Base),
        (returns_an_iterator, Iterable[Base]),
        (partial(yields), Base),
        (decorated, Base),
        (Base, Base),
        (Opener(), Base),
        (Opener().method, Base),
        (hidden, collections.OrderedDict),
        (unknown, UNDECIDED),
        (silent, UNDECIDED),
        (len, UNDECIDED),
    ],
)
def test_result_of_a_factory_is_the_type_of_its_service(factory: Any, result: Any) -> None:
    """A generator's result is what it yields; partials, decorators, classes and callable objects are unwrapped."""
    assert type_hints.result_of(factory) == result


@pytest.mark.parametrize(
    ("annotation", "accepts"),
    [
        ("Base | None", True),
        ("Optional[Base]", True),
        ("Any", True),
        ("object", True),
        ("None", True),
        ("Base", False),
        ("nowhere.Thing", False),
        ("nowhere.Thing | None", True),
        ("Optional[nowhere.Thing]", True),
        ("dict[str, None]", False),
        (inspect.Parameter.empty, False),
    ],
)
def test_parameter_accepts_none_by_its_annotation(annotation: Any, accepts: bool) -> None:
    """An annotation that cannot be resolved is read as it is spelled."""
    parameter = inspect.Parameter("value", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation)

    assert type_hints.accepts_none(parameter, plain) is accepts


def test_unannotated_parameter_accepts_none_by_its_default() -> None:
    """Without an annotation the default decides."""
    parameter = inspect.signature(lambda value=None: value).parameters["value"]

    assert type_hints.accepts_none(parameter, plain)
