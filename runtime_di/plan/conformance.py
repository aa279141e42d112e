"""Type conformance: whether a service, a fake or a factory's result fits a Runtime's annotation."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, get_origin

from typing_extensions import get_protocol_members, is_protocol, is_typeddict

from runtime_di.plan.type_hints import UNDECIDED, annotations_of, result_of
from runtime_di.settings import fields


def class_mismatches(result: Any, annotation: Any) -> list[str]:
    """Why instances of a class do not fit an annotation; empty if they fit or it cannot be decided."""
    if not isinstance(result, type) or result is Any or result is annotation:
        return []
    return _mismatches(
        annotation,
        lambda cls: [] if issubclass(result, cls) else [f"is not an instance of {cls.__name__}"],
        lambda protocol: _class_lacks(result, protocol),
    )


def value_mismatches(value: Any, annotation: Any) -> list[str]:
    """Why a value does not fit an annotation; empty if it fits or it cannot be decided."""
    return _mismatches(
        annotation,
        lambda cls: (
            _override_mismatches(value, cls) if isinstance(value, cls) else [f"is not an instance of {cls.__name__}"]
        ),
        lambda protocol: _value_lacks(value, protocol),
    )


def _mismatches(
    annotation: Any, class_mismatch: Callable[[type], list[str]], lacks: Callable[[type], list[str]]
) -> list[str]:
    found: list[str] = []
    for alternative in fields.alternatives(annotation):
        expected = type(None) if alternative is None else get_origin(alternative) or alternative
        if not isinstance(expected, type) or expected is Any or is_typeddict(expected):
            return []
        reasons = lacks(expected) if is_protocol(expected) else class_mismatch(expected)
        if not reasons:
            return []
        found += reasons
    return found


def _value_lacks(value: Any, protocol: type) -> list[str]:
    found: list[str] = []
    for name in sorted(get_protocol_members(protocol)):
        computed = isinstance(inspect.getattr_static(type(value), name, None), property)
        own = None if computed else getattr(value, name, UNDECIDED)
        if own is UNDECIDED:
            found.append(f"lacks '{name}' of {protocol.__name__}")
        elif not computed:
            found += _signature_mismatches(name, own, 0, protocol)
    return found


def _override_mismatches(value: Any, base: type) -> list[str]:
    """Why public methods that the class of ``value`` overrides do not accept the calls of the methods of ``base``."""
    found: list[str] = []
    for name in dir(base) if issubclass(type(value), base) else ():
        own, inherited = (inspect.getattr_static(owner, name, None) for owner in (type(value), base))
        if (
            not name.startswith("_")
            and own is not inherited
            and inspect.isfunction(own)
            and inspect.isfunction(inherited)
        ):
            found += _signature_mismatches(name, own, 1, base)
    return found


def _class_lacks(result: type, protocol: type) -> list[str]:
    """Protocol methods that a class lacks; attributes are not required, since ``__init__`` may set them."""
    found: list[str] = []
    if hasattr(result, "__getattr__"):
        return found
    for name in sorted(get_protocol_members(protocol) - set(annotations_of(result))):
        own = inspect.getattr_static(result, name, UNDECIDED)
        is_method = inspect.isroutine(inspect.getattr_static(protocol, name, None))
        if own is UNDECIDED:
            found += [f"lacks '{name}' of {protocol.__name__}"] if is_method else []
        elif inspect.isroutine(own) or not hasattr(own, "__get__"):
            found += _signature_mismatches(name, getattr(result, name), int(inspect.isfunction(own)), protocol)
    return found


def _signature_mismatches(name: str, own: Any, num_bound: int, protocol: type) -> list[str]:
    """Why ``own``, with its first ``num_bound`` parameters bound, does not accept the calls of a protocol's method."""
    method = inspect.getattr_static(protocol, name, None)
    if not inspect.isroutine(method):
        return []
    if not callable(own):
        return [f"{name} is not callable"]
    if kind := _conflicting_kind(own, getattr(protocol, name)):
        return [f"{name} is {kind}, and that of {protocol.__name__} is not"]
    try:
        have = inspect.Signature(list(inspect.signature(own).parameters.values())[num_bound:])
    except (TypeError, ValueError):
        return []
    bound = int(inspect.isfunction(method))
    want = list(inspect.signature(getattr(protocol, name)).parameters.values())[bound:]
    for args, kwargs in _calls(want):
        try:
            have.bind(*args, **kwargs)
        except TypeError as error:
            return [f"{name}{_bare(have)} does not take the calls of {_bare(inspect.Signature(want))}: {error}"]
    return []


def _conflicting_kind(own: Any, method: Any) -> str:
    """The kind of function of ``own`` if ``method`` is of another kind and does not declare a fitting result."""
    if type(own) not in (types.FunctionType, types.MethodType):
        return ""  # a mock claims to be of every kind
    for kind, is_of_kind, returned in _KINDS:
        if is_of_kind(own) and not is_of_kind(method):
            declared = UNDECIDED if any(is_other(method) for _, is_other, _ in _KINDS) else result_of(method)
            if declared is UNDECIDED:
                return "" if returned is types.GeneratorType else kind
            return kind if class_mismatches(returned, declared) else ""
    return ""


_KINDS: tuple[tuple[str, Callable[[Any], bool], type], ...] = (
    ("async", inspect.iscoroutinefunction, types.CoroutineType),
    ("an async generator", inspect.isasyncgenfunction, types.AsyncGeneratorType),
    ("a generator", inspect.isgeneratorfunction, types.GeneratorType),
)
"""Kinds of functions, and the type that a call returns before the body runs."""


def _calls(want: list[inspect.Parameter]) -> Iterator[tuple[list[None], dict[str, None]]]:
    """The calls that a method must accept: all by position, all by name, and only the required arguments."""
    positional = [p for p in want if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keywords = [p for p in want if p.kind is p.KEYWORD_ONLY]
    by_name = [p for p in want if p.kind is p.POSITIONAL_OR_KEYWORD]
    yield [None] * len(positional), {p.name: None for p in keywords}
    yield [None] * (len(positional) - len(by_name)), {p.name: None for p in [*by_name, *keywords]}
    yield (
        [None for p in positional if p.default is p.empty],
        {p.name: None for p in keywords if p.default is p.empty},
    )


def _bare(signature: inspect.Signature) -> str:
    return str(inspect.Signature([p.replace(annotation=p.empty) for p in signature.parameters.values()]))
