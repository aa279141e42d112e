"""The text of ``--help``: every setting with its flag, type, default and description."""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic_core import PydanticUndefined

from runtime_di.settings import fields

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


def render_help(settings: type[BaseModel]) -> str:
    """List every field of every section, and of every kind of a section with several kinds."""
    summary = (inspect.getdoc(settings) or settings.__name__).splitlines()[0]
    lines = [
        summary,
        "",
        "Flags override RUNTIME_DI_* variables (RUNTIME_DI_PARALLEL__TENSOR=2), these override the file named by",
        "--config, and that overrides the defaults. 'null' switches an optional section off; '{}' switches it on.",
    ]
    return "\n".join([*lines, *_section(settings, "")])


def _section(owner: type[BaseModel], prefix: str) -> list[str]:
    lines: list[str] = []
    nested: list[str] = []
    for name, field in owner.model_fields.items():
        if name == "kind" and fields.tag(owner):
            continue
        if fields.models(field.annotation):
            nested += _nested(f"{prefix}{name}", field)
        else:
            lines += _leaf(f"{prefix}{name}", field)
    return lines + nested


def _nested(path: str, field: FieldInfo) -> list[str]:
    lines = ["", f"{path}: {_doc(field) or _summary(fields.models(field.annotation)[0])}"]
    kinds = [kind for model in fields.models(field.annotation) if (kind := fields.tag(model))]
    if kinds:
        default = getattr(field.default, "kind", None)
        lines += [f"  --{path}.kind {{{','.join(kinds)}}}  (default: {_default(default)})"]
    elif field.default is None:
        lines += [f"  --{path} '{{}}'  switches it on (default: off)"]
    for model in fields.models(field.annotation):
        kind = fields.tag(model)
        lines += [f"  with {path}.kind {kind}: {_summary(model)}"] if kind else []
        lines += _section(model, f"{path}.")
    return lines


def _leaf(path: str, field: FieldInfo) -> list[str]:
    head = f"  --{path} {_type(field.annotation)}"
    value = field.get_default(call_default_factory=True)
    default = "required" if field.is_required() else f"default: {_default(value)}"
    doc = textwrap.wrap(f"{_doc(field)} ({default})".strip(), 100)
    return [head, *(f"        {line}" for line in doc)]


def _doc(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def _summary(model: type[BaseModel]) -> str:
    return (inspect.getdoc(model) or model.__name__).splitlines()[0]


def _default(value: Any) -> str:
    if isinstance(value, SecretStr):
        return fields.MASK
    return "null" if value is None or value is PydanticUndefined else str(value)


def _type(annotation: Any) -> str:
    names = []
    known = {Path: "PATH", SecretStr: "SECRET"}
    for member in fields.alternatives(annotation):
        if get_origin(member) is Literal:
            names += ["{" + ",".join(str(choice) for choice in get_args(member)) + "}"]
        elif member is type(None):
            names += ["null"]
        else:
            names += [known.get(member) or getattr(member, "__name__", str(member)).upper()]
    return "|".join(names)
