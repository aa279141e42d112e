"""The fields of a settings class by dotted path, read from its types and from its values."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretBytes, SecretStr
from pydantic.fields import FieldInfo

from runtime_di.section import Mark

MASK = "**********"


def alternatives(annotation: Any) -> Iterator[Any]:
    """The members of a union, nested unions and ``Annotated`` opened; any other annotation is its own."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from alternatives(member)
    elif origin is Annotated:
        yield from alternatives(get_args(annotation)[0])
    else:
        yield annotation


def models(annotation: Any) -> list[type[BaseModel]]:
    """The settings sections that a field of this annotation may hold."""
    return [member for member in alternatives(annotation) if isinstance(member, type) and issubclass(member, BaseModel)]


def is_secret(field: FieldInfo) -> bool:
    """Whether the field holds a secret, so that its value is never shown."""
    return any(member in (SecretStr, SecretBytes) for member in alternatives(field.annotation))


def marks(owner: type[BaseModel], name: str) -> set[Mark]:
    """What is particular about a field itself, as its class says or one that this extends and the field is from."""
    declared = [base.model_fields.get(name) for base in owner.__mro__ if issubclass(base, BaseModel)]
    return {mark for field in declared if field for mark in field.metadata if isinstance(mark, Mark)}


def tag(model: type[BaseModel]) -> str | None:
    """The one ``kind`` by which a discriminated union tells this section from others, or ``None``."""
    kind = model.model_fields.get("kind")
    choices = get_args(kind.annotation) if kind is not None and get_origin(kind.annotation) is Literal else ()
    return str(choices[0]) if len(choices) == 1 else None


def walk(owners: Iterable[type[BaseModel]], prefix: str = "") -> Iterator[tuple[str, FieldInfo, type[BaseModel]]]:
    """Every field below ``owners``, depth first: dotted path, field, and the class that declares it."""
    for owner in owners:
        for name, field in owner.model_fields.items():
            yield prefix + name, field, owner
            yield from walk(models(field.annotation), f"{prefix}{name}.")


def find(owner: type[BaseModel], path: str) -> list[FieldInfo]:
    """The fields that a dotted path names; several where it leads through a union, none where nothing has it."""
    owners: list[type[BaseModel]] = [owner]
    found: list[FieldInfo] = []
    for name in path.split("."):
        found = [model.model_fields[name] for model in owners if name in model.model_fields]
        owners = [model for field in found for model in models(field.annotation)]
    return found


def is_open_mapping(field: FieldInfo) -> bool:
    """Whether the field takes keys of the user's own, as a ``dict`` does."""
    return any(get_origin(member) is dict or member is dict for member in alternatives(field.annotation))


def knows(owner: type[BaseModel], path: str) -> bool:
    """Whether a dotted path names a field of ``owner``, or a key within one that takes any key."""
    parts = path.split(".")
    prefixes = [".".join(parts[:size]) for size in range(1, len(parts))]
    within = [field for prefix in prefixes for field in find(owner, prefix)]
    return bool(find(owner, path)) or any(is_open_mapping(field) for field in within)


def closest(owner: type[BaseModel], path: str) -> str | None:
    """The known path most like a misspelt one."""
    near = difflib.get_close_matches(path, [known for known, _, _ in walk([owner])], n=1, cutoff=0.7)
    return near[0] if near else None


def locate(owner: type[BaseModel], location: Iterable[str | int]) -> str:
    """Turn pydantic's error location into a dotted path, without the tags of unions."""
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
    """A value that holds no further section."""

    path: str
    value: Any
    marks: frozenset[Mark]
    secret: bool


def leaves(model: BaseModel, prefix: str = "", inherited: frozenset[Mark] = frozenset()) -> Iterator[Leaf]:
    """Every leaf below ``model`` as JSON-able values; a leaf has its sections' marks too, and a secret is masked."""
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        found = inherited | marks(type(model), name)
        if isinstance(value, BaseModel):
            yield from leaves(value, f"{prefix}{name}.", found)
        else:
            secret = is_secret(field)
            shown = MASK if secret else model.model_dump(mode="json", include={name})[name]
            yield Leaf(prefix + name, shown, found, secret)


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn ``{"a.b": 1}`` into ``{"a": {"b": 1}}``."""
    nested: dict[str, Any] = {}
    for path, value in values.items():
        *parents, name = path.split(".")
        place = nested
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = value
    return nested
