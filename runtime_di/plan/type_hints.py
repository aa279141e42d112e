"""Resolution of annotations, as far as possible without importing anything."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, ClassVar, get_args, get_origin

from runtime_di.settings import fields

UNDECIDED: Any = object()
"""The result for an annotation that cannot be resolved without importing something."""


class _Names(dict[str, Any]):
    """The names that annotations of a module can use: its own, and ``TYPE_CHECKING`` imports of loaded modules."""

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
    """Name to module and attribute that a ``TYPE_CHECKING`` block of ``module`` imports under this name."""
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
    """The type of an annotation written in ``module``, or `UNDECIDED`."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, {}, _Names(module))  # noqa: S307 - the program's own annotations
    except (LookupError, NameError, AttributeError, TypeError, SyntaxError):
        return UNDECIDED


def resolve_importing(annotation: Any, module: str) -> Any:
    """Like `resolve`, after importing the ``TYPE_CHECKING`` imports of ``module`` that the annotation names."""
    for name, (hidden, _) in type_checking_imports(module).items():
        if re.search(rf"\b{name}\b", str(annotation)):
            importlib.import_module(hidden)
    return resolve(annotation, module)


def annotations_of(owner: type) -> dict[str, tuple[Any, str]]:
    """Name to annotation and the module in which it is written; subclasses override their bases."""
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
    """The function or class behind a factory: without partials, decorators and callable objects."""
    factory = inspect.unwrap(factory.func if isinstance(factory, partial) else factory)
    return factory if inspect.isroutine(factory) or isinstance(factory, type) else type(factory).__call__


def result_of(factory: Callable[..., Any]) -> Any:
    """The type of the service that a factory returns, or that a generator function yields."""
    function = function_of(factory)
    if isinstance(function, type):
        return function
    annotation = getattr(function, "__annotations__", {}).get("return", UNDECIDED)
    result = resolve(annotation, getattr(function, "__module__", ""))
    if inspect.isgeneratorfunction(function):
        return get_args(result)[0] if get_args(result) else UNDECIDED
    return type(None) if result is None else result


def accepts_none(parameter: inspect.Parameter, factory: Callable[..., Any]) -> bool:
    """Whether a factory's parameter accepts ``None``: by its annotation, otherwise by its default."""
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


def attribute_types(owners: list[Any], name: str) -> tuple[list[Any], list[type]]:
    """The possible types of attribute ``name`` of ``owners``, except ``None``, and the owners without it."""
    found: list[Any] = []
    without: list[type] = []
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
            without.append(owner)
    return [member for member in found if member is not type(None)], without
