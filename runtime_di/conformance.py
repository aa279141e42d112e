"""Whether a service, a fake or a factory's result fits a Runtime's annotation, as far as that can be decided."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any, ClassVar, get_args, get_origin

from typing_extensions import get_protocol_members, is_protocol, is_typeddict

from runtime_di import fields

UNDECIDED: Any = object()
"""What stands for an annotation that cannot be resolved without importing something."""


class _Names(dict[str, Any]):
    """Names of a module as its annotations see them: ``TYPE_CHECKING`` imports too, of modules already imported."""

    def __init__(self, module: str) -> None:
        super().__init__(vars(sys.modules[module]) if module in sys.modules else {})
        self._module = module
        self._hidden: Mapping[str, tuple[str, str | None]] | None = None

    def __missing__(self, name: str) -> Any:
        if self._hidden is None:
            self._hidden = type_checking_imports(self._module)
        module, attribute = self._hidden[name]
        found = sys.modules[module]
        return found if attribute is None else getattr(found, attribute)


@cache
def type_checking_imports(module: str) -> Mapping[str, tuple[str, str | None]]:
    """Name to the module, and the attribute of it, that a ``TYPE_CHECKING`` block of ``module`` imports."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):
        return {}
    found: dict[str, tuple[str, str | None]] = {}
    for block in ast.walk(tree):
        if isinstance(block, ast.If) and ast.unparse(block.test).endswith("TYPE_CHECKING"):
            for statement in block.body:
                if isinstance(statement, ast.Import):
                    names = [(alias.asname, alias.name, alias.name.split(".")[0]) for alias in statement.names]
                    found.update({known or top: (whole if known else top, None) for known, whole, top in names})
                if isinstance(statement, ast.ImportFrom) and statement.module:
                    found.update(
                        {alias.asname or alias.name: (statement.module, alias.name) for alias in statement.names}
                    )
    return found


def resolve(annotation: Any, module: str) -> Any:
    """The type that an annotation written in ``module`` means, or `UNDECIDED`."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, {}, _Names(module))  # noqa: S307 - the program's own annotations
    except (LookupError, NameError, AttributeError, TypeError, SyntaxError):
        return UNDECIDED


def resolve_importing(annotation: Any, module: str) -> Any:
    """The same, once what the annotation names and ``module`` imports for type checkers alone is imported."""
    for name, (hidden, _) in type_checking_imports(module).items():
        if re.search(rf"\b{name}\b", str(annotation)):
            importlib.import_module(hidden)
    return resolve(annotation, module)


def annotations_of(owner: type) -> dict[str, tuple[Any, str]]:
    """Name to annotation and the module it was written in, subclasses over their bases."""
    found: dict[str, tuple[Any, str]] = {}
    for base in reversed(owner.__mro__):
        for name, annotation in inspect.get_annotations(base).items():
            found[name] = (annotation, base.__module__)
    return found


def is_class_variable(annotation: Any, module: str) -> bool:
    """Whether an annotation written in ``module`` is a ``ClassVar``."""
    resolved = resolve(annotation, module)
    return resolved is ClassVar or get_origin(resolved) is ClassVar


def function_of(factory: Callable[..., Any]) -> Callable[..., Any]:
    """The function, or class, that a factory comes to: without partials, decorators and callable objects."""
    factory = inspect.unwrap(factory.func if isinstance(factory, partial) else factory)
    return factory if inspect.isroutine(factory) or isinstance(factory, type) else type(factory).__call__


def result_of(factory: Callable[..., Any]) -> Any:
    """The type of what a factory makes; for a generator function, of what it yields."""
    function = function_of(factory)
    if isinstance(function, type):
        return function
    annotation = getattr(function, "__annotations__", {}).get("return", UNDECIDED)
    result = resolve(annotation, getattr(function, "__module__", ""))
    if inspect.isgeneratorfunction(function):
        return get_args(result)[0] if get_args(result) else UNDECIDED
    return type(None) if result is None else result


def accepts_none(parameter: inspect.Parameter, factory: Callable[..., Any]) -> bool:
    """Whether a factory's parameter takes ``None``: by its annotation, else by its default."""
    if parameter.annotation is inspect.Parameter.empty:
        return parameter.default is None
    annotation = resolve(parameter.annotation, getattr(function_of(factory), "__module__", ""))
    if annotation is UNDECIDED:
        return _spelled_optional(parameter.annotation)
    return any(member in (None, type(None), Any, object) for member in fields.alternatives(annotation))


def _spelled_optional(annotation: str) -> bool:
    def spelled(node: ast.expr) -> bool:
        if isinstance(node, ast.BinOp):
            return spelled(node.left) or spelled(node.right)
        if isinstance(node, ast.Subscript):
            return ast.unparse(node.value).endswith("Optional")
        return isinstance(node, ast.Constant) and node.value is None

    return spelled(ast.parse(annotation, mode="eval").body)


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


def attribute_types(owners: list[Any], name: str) -> tuple[list[Any], list[type]]:
    """The types, but for ``None``, that attribute ``name`` of ``owners`` may have, and the owners that lack it."""
    found: list[Any] = []
    lacking: list[type] = []
    for owner in owners:
        model_field = getattr(owner, "model_fields", {}).get(name)
        if not isinstance(owner, type):
            found.append(UNDECIDED)
        elif model_field is not None:
            found += fields.alternatives(model_field.annotation)
        elif hasattr(owner, name) or name in annotations_of(owner):
            getter = getattr(inspect.getattr_static(owner, name, None), "fget", None)
            found.append(result_of(getter) if getter else UNDECIDED)
        else:
            lacking.append(owner)
    return [member for member in found if member is not type(None)], lacking
