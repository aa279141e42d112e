"""The fields of a settings class by dotted path, read from its annotations and its values."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretBytes, SecretStr
from pydantic.fields import FieldInfo

from runtime_di.settings.marks import Mark

MASK = "**********"


def alternatives(annotation: Any) -> Iterator[Any]:
    """The members of a union, with nested unions and ``Annotated`` unpacked, or the annotation itself."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from alternatives(member)
    elif origin is Annotated:
        yield from alternatives(get_args(annotation)[0])
    else:
        yield annotation


def models(annotation: Any) -> list[type[BaseModel]]:
    """The section classes whose instances a field of this annotation accepts."""
    return [member for member in alternatives(annotation) if isinstance(member, type) and issubclass(member, BaseModel)]


def is_secret(field: FieldInfo) -> bool:
    """Whether the field contains a secret, whose value is never printed."""
    return any(member in (SecretStr, SecretBytes) for member in alternatives(field.annotation))


def marks(owner: type[BaseModel], name: str) -> set[Mark]:
    """The marks on a field in its class and in the base classes that declare the field."""
    declared = [base.model_fields.get(name) for base in owner.__mro__ if issubclass(base, BaseModel)]
    return {mark for field in declared if field for mark in field.metadata if isinstance(mark, Mark)}


def tag(model: type[BaseModel]) -> str | None:
    """The ``kind`` that selects this section in a discriminated union, or ``None``."""
    kind = model.model_fields.get("kind")
    choices = get_args(kind.annotation) if kind is not None and get_origin(kind.annotation) is Literal else ()
    return str(choices[0]) if len(choices) == 1 else None


def walk(owners: Iterable[type[BaseModel]], prefix: str = "") -> Iterator[tuple[str, FieldInfo, type[BaseModel]]]:
    """Every field of ``owners`` and their sections, depth first: dotted path, field, and the class that declares it."""
    for owner in owners:
        for name, field in owner.model_fields.items():
            yield prefix + name, field, owner
            yield from walk(models(field.annotation), f"{prefix}{name}.")


def find(owner: type[BaseModel], path: str) -> list[FieldInfo]:
    """The fields at a dotted path: several if the path leads through a union, none if there is no such field."""
    owners: list[type[BaseModel]] = [owner]
    found: list[FieldInfo] = []
    for name in path.split("."):
        found = [model.model_fields[name] for model in owners if name in model.model_fields]
        owners = [model for field in found for model in models(field.annotation)]
    return found


def is_open_mapping(field: FieldInfo) -> bool:
    """Whether the field accepts arbitrary keys, as a ``dict`` does."""
    return any(get_origin(member) is dict or member is dict for member in alternatives(field.annotation))


def knows(owner: type[BaseModel], path: str) -> bool:
    """Whether a dotted path names a field of ``owner``, or a key of a field that accepts arbitrary keys."""
    parts = path.split(".")
    prefixes = [".".join(parts[:size]) for size in range(1, len(parts))]
    within = [field for prefix in prefixes for field in find(owner, prefix)]
    return bool(find(owner, path)) or any(is_open_mapping(field) for field in within)


def closest(owner: type[BaseModel], path: str) -> str | None:
    """The known path closest to a misspelt one, or ``None``."""
    near = difflib.get_close_matches(path, [known for known, _, _ in walk([owner])], n=1, cutoff=0.7)
    return near[0] if near else None


def locate(owner: type[BaseModel], location: Iterable[str | int]) -> str:
    """Convert a pydantic error location to a dotted path, without the tags of unions."""
    owners: list[type[BaseModel]] = [owner]
    parts: list[str] = []
    for item in location:
        within = [model.model_fields[item] for model in owners if isinstance(item, str) and item in model.model_fields]
        tagged = [model for model in owners if tag(model) == item]
        if tagged and not within:
            owners = tagged
            continue
        parts.append(str(item))
        owners = [model for field in within for model in models(field.annotation)]
    return ".".join(parts)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value that is not itself a section."""

    path: str
    value: Any
    marks: frozenset[Mark]
    secret: bool


def leaves(model: BaseModel, prefix: str = "", inherited: frozenset[Mark] = frozenset()) -> Iterator[Leaf]:
    """Every leaf of ``model`` as a JSON value, with secrets masked; a leaf inherits the marks of its sections."""
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        found = inherited | marks(type(model), name)
        if isinstance(value, BaseModel):
            yield from leaves(value, f"{prefix}{name}.", found)
        else:
            secret = is_secret(field)
            plain = MASK if secret else model.model_dump(mode="json", include={name})[name]
            yield Leaf(prefix + name, plain, found, secret)


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert ``{"a.b": 1}`` to ``{"a": {"b": 1}}``."""
    nested: dict[str, Any] = {}
    for path, value in values.items():
        *parents, name = path.split(".")
        place = nested
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = value
    return nested
