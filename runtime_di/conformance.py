"""Whether a service, a fake or a factory's result fits a Runtime's annotation, as far as that can be decided."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args, get_origin

from typing_extensions import get_protocol_members, is_protocol

from runtime_di import fields

UNDECIDED: Any = object()
"""What stands for an annotation that cannot be resolved without importing something."""

_GENERATORS = {"Iterator", "Generator", "Iterable"}


class _Names(dict[str, Any]):
    """Names of a module as its annotations see them: ``TYPE_CHECKING`` imports too, of modules already imported."""

    def __init__(self, module: str) -> None:
        super().__init__(vars(sys.modules[module]) if module in sys.modules else {})
        self._module = module
        self._hidden: Mapping[str, tuple[str, str | None]] | None = None

    def __missing__(self, name: str) -> Any:
        if self._hidden is None:
            self._hidden = dict(_type_checking_imports(self._module))
        module, attribute = self._hidden[name]
        found = sys.modules[module]
        return found if attribute is None else getattr(found, attribute)


def _type_checking_imports(module: str) -> Iterator[tuple[str, tuple[str, str | None]]]:
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):
        return
    for block in ast.walk(tree):
        if isinstance(block, ast.If) and ast.unparse(block.test).endswith("TYPE_CHECKING"):
            for statement in block.body:
                if isinstance(statement, ast.Import):
                    for alias in statement.names:
                        yield alias.asname or alias.name.split(".")[0], (alias.name.split(".")[0], None)
                if isinstance(statement, ast.ImportFrom) and statement.module:
                    for alias in statement.names:
                        yield alias.asname or alias.name, (statement.module, alias.name)


def resolve(annotation: Any, module: str) -> Any:
    """The type that an annotation written in ``module`` means, or `UNDECIDED`."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, {}, _Names(module))  # noqa: S307 - the program's own annotations
    except (LookupError, NameError, AttributeError, TypeError, SyntaxError):
        return UNDECIDED


def annotations_of(owner: type) -> dict[str, tuple[Any, str]]:
    """Name to annotation and the module it was written in, subclasses over their bases."""
    found: dict[str, tuple[Any, str]] = {}
    for base in reversed(owner.__mro__):
        for name, annotation in inspect.get_annotations(base).items():
            found[name] = (annotation, base.__module__)
    return found


def result_of(factory: Callable[..., Any]) -> Any:
    """The type of what a factory makes; for a generator function, of what it yields."""
    if isinstance(factory, type):
        return factory
    function = inspect.unwrap(getattr(factory, "func", factory))
    annotation = getattr(function, "__annotations__", {}).get("return", UNDECIDED)
    result = resolve(annotation, getattr(function, "__module__", ""))
    if inspect.isgeneratorfunction(function):
        return get_args(result)[0] if get_args(result) else UNDECIDED
    return result


def accepts_none(parameter: inspect.Parameter, factory: Callable[..., Any]) -> bool:
    """Whether a factory's parameter takes ``None``: by its annotation, else by its default."""
    if parameter.annotation is inspect.Parameter.empty:
        return parameter.default is None
    function = inspect.unwrap(getattr(factory, "func", factory))
    annotation = resolve(parameter.annotation, getattr(function, "__module__", ""))
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
    return _misfits(annotation, lambda cls: issubclass(result, cls), lambda name: getattr(result, name, UNDECIDED), result)


def value_misfits(value: Any, annotation: Any) -> list[str]:
    """Why a value does not fit an annotation; empty if it does or it cannot be decided."""
    return _misfits(annotation, lambda cls: isinstance(value, cls), lambda name: getattr(value, name, UNDECIDED), None)


def _misfits(
    annotation: Any, is_a: Callable[[type], bool], member: Callable[[str], Any], result: type | None
) -> list[str]:
    told: list[str] = []
    for expected in fields.alternatives(annotation):
        expected = get_origin(expected) or expected  # noqa: PLW2901
        if expected is None:
            expected = type(None)  # noqa: PLW2901
        if not isinstance(expected, type) or expected is Any:
            return []
        found = _protocol_misfits(expected, member, result) if is_protocol(expected) else None
        if found is None:
            found = [] if is_a(expected) else [f"is not a {expected.__name__}"]
        if not found:
            return []
        told += found
    return told


def _protocol_misfits(protocol: type, member: Callable[[str], Any], result: type | None) -> list[str]:
    told = []
    declared = set() if result is None else set(annotations_of(result))
    for name in sorted(get_protocol_members(protocol)):
        own, wanted = member(name), inspect.getattr_static(protocol, name, None)
        if own is UNDECIDED:
            instance_only = result is not None and (name in declared or not callable(wanted))
            told += [] if instance_only else [f"lacks {name!r} of {protocol.__name__}"]
        elif callable(wanted) and not isinstance(wanted, property):
            told += [f"{name}{difference}" for difference in _signature_misfits(own, wanted, result is not None)]
    return told


def _signature_misfits(own: Any, wanted: Callable[..., Any], unbound: bool) -> list[str]:
    if not callable(own):
        return [" is not callable"]
    try:
        have = list(inspect.signature(own).parameters.values())
    except (TypeError, ValueError):
        return []
    want = list(inspect.signature(wanted).parameters.values())[1:]
    own_signature = inspect.Signature(have[1:] if unbound else have)
    positional = [p for p in want if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keywords = [p for p in want if p.kind is p.KEYWORD_ONLY]
    by_name = [p for p in want if p.kind is p.POSITIONAL_OR_KEYWORD]
    calls = [
        ([None] * len(positional), {p.name: None for p in keywords}),
        ([None] * (len(positional) - len(by_name)), {p.name: None for p in [*by_name, *keywords]}),
        (
            [None for p in positional if p.default is p.empty],
            {p.name: None for p in keywords if p.default is p.empty},
        ),
    ]
    for args, kwargs in calls:
        try:
            own_signature.bind(*args, **kwargs)
        except TypeError as error:
            expected = inspect.Signature([p.replace(annotation=p.empty) for p in want])
            return [f"{_bare(own_signature)} does not take the calls of {expected}: {error}"]
    return []


def _bare(signature: inspect.Signature) -> str:
    return str(inspect.Signature([p.replace(annotation=p.empty) for p in signature.parameters.values()]))


def attribute_types(owners: list[Any], name: str) -> list[Any] | None:
    """The types that attribute ``name`` of any of ``owners`` may have; ``None`` if no owner has it."""
    found: list[Any] = []
    known = False
    for owner in owners:
        if owner is UNDECIDED or not isinstance(owner, type):
            return [UNDECIDED]
        model_field = getattr(owner, "model_fields", {}).get(name)
        if model_field is not None:
            found += fields.alternatives(model_field.annotation)
            known = True
        elif hasattr(owner, name) or name in annotations_of(owner):
            getter = getattr(inspect.getattr_static(owner, name, None), "fget", None)
            found.append(result_of(getter) if getter else UNDECIDED)
            known = True
    return [member for member in found if member is not type(None)] if known else None

