"""Whether a service, a fake or a factory's result fits a Runtime's annotation, as far as that can be decided."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, get_origin

from typing_extensions import get_protocol_members, is_protocol, is_typeddict

from runtime_di import fields
from runtime_di.hints import UNDECIDED, annotations_of, result_of


def class_misfits(result: Any, annotation: Any) -> list[str]:
    """Why instances of a class do not fit an annotation; empty if they do or it cannot be decided."""
    if not isinstance(result, type) or result is Any or result is annotation:
        return []
    return _misfits(
        annotation,
        lambda cls: [] if issubclass(result, cls) else [f"is no {cls.__name__}"],
        lambda protocol: _class_lacks(result, protocol),
    )


def value_misfits(value: Any, annotation: Any) -> list[str]:
    """Why a value does not fit an annotation; empty if it does or it cannot be decided."""
    return _misfits(
        annotation,
        lambda cls: _overriding_misfits(value, cls) if isinstance(value, cls) else [f"is no {cls.__name__}"],
        lambda protocol: _value_lacks(value, protocol),
    )


def _misfits(annotation: Any, is_none_of: Callable[[type], list[str]], lacks: Callable[[type], list[str]]) -> list[str]:
    told: list[str] = []
    for alternative in fields.alternatives(annotation):
        expected = type(None) if alternative is None else get_origin(alternative) or alternative
        if not isinstance(expected, type) or expected is Any or is_typeddict(expected):
            return []
        found = lacks(expected) if is_protocol(expected) else is_none_of(expected)
        if not found:
            return []
        told += found
    return told


def _value_lacks(value: Any, protocol: type) -> list[str]:
    told: list[str] = []
    for name in sorted(get_protocol_members(protocol)):
        computed = isinstance(inspect.getattr_static(type(value), name, None), property)
        own = None if computed else getattr(value, name, UNDECIDED)
        if own is UNDECIDED:
            told.append(f"lacks '{name}' of {protocol.__name__}")
        elif not computed:
            told += _signature_misfits(name, own, 0, protocol)
    return told


def _overriding_misfits(value: Any, base: type) -> list[str]:
    """Why public methods that the class of ``value`` overrides do not take the calls of those of ``base``."""
    told: list[str] = []
    for name in dir(base) if issubclass(type(value), base) else ():
        own, inherited = (inspect.getattr_static(owner, name, None) for owner in (type(value), base))
        if (
            not name.startswith("_")
            and own is not inherited
            and inspect.isfunction(own)
            and inspect.isfunction(inherited)
        ):
            told += _signature_misfits(name, own, 1, base)
    return told


def _class_lacks(result: type, protocol: type) -> list[str]:
    """What a class lacks of a protocol's methods; attributes may be set by ``__init__``, which is not read."""
    told: list[str] = []
    if hasattr(result, "__getattr__"):
        return told
    for name in sorted(get_protocol_members(protocol) - set(annotations_of(result))):
        own = inspect.getattr_static(result, name, UNDECIDED)
        is_method = inspect.isroutine(inspect.getattr_static(protocol, name, None))
        if own is UNDECIDED:
            told += [f"lacks '{name}' of {protocol.__name__}"] if is_method else []
        elif inspect.isroutine(own) or not hasattr(own, "__get__"):
            told += _signature_misfits(name, getattr(result, name), int(inspect.isfunction(own)), protocol)
    return told


def _signature_misfits(name: str, own: Any, num_bound: int, protocol: type) -> list[str]:
    """Why ``own``, whose first ``num_bound`` parameters are bound, does not take the calls of a protocol's method."""
    method = inspect.getattr_static(protocol, name, None)
    if not inspect.isroutine(method):
        return []
    if not callable(own):
        return [f"{name} is not callable"]
    if kind := _unlike_kind(own, getattr(protocol, name)):
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


def _unlike_kind(own: Any, method: Any) -> str:
    """What kind of function ``own`` is where ``method`` is of another and does not promise what it returns."""
    if type(own) not in (types.FunctionType, types.MethodType):
        return ""  # a mock says that it is of every kind
    for kind, is_of_kind, returned in _KINDS:
        if is_of_kind(own) and not is_of_kind(method):
            promised = UNDECIDED if any(is_other(method) for _, is_other, _ in _KINDS) else result_of(method)
            if promised is UNDECIDED:
                return "" if returned is types.GeneratorType else kind
            return kind if class_misfits(returned, promised) else ""
    return ""


_KINDS: tuple[tuple[str, Callable[[Any], bool], type], ...] = (
    ("async", inspect.iscoroutinefunction, types.CoroutineType),
    ("an async generator", inspect.isasyncgenfunction, types.AsyncGeneratorType),
    ("a generator", inspect.isgeneratorfunction, types.GeneratorType),
)
"""Kinds of functions, and what a call returns before anything of it has run."""


def _calls(want: list[inspect.Parameter]) -> Iterator[tuple[list[None], dict[str, None]]]:
    """The calls that a method must take: all by position, all by name, and only what has no default."""
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
