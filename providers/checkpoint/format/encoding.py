"""Encodes plain values as JSON without loss: tuples, bytes, byte tensors and keys of any type included."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import torch


def is_byte_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Whether this has the form of a generator's state, which is a value of this rank rather than a weight."""
    return type(value) is torch.Tensor and value.dtype is torch.uint8 and value.dim() == 1


def encode(value: Any) -> Any:  # noqa: PLR0911 - one return a type
    """Encode a plain value as JSON types.

    Raises:
        TypeError: a part of it cannot be encoded without loss; the message is that part's type.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(item) for key, item in value.items()}
        return {"$dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if type(value) is tuple:
        return {"$tuple": [encode(item) for item in value]}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if is_byte_tensor(value):
        return {"$byte_tensor": base64.b64encode(value.cpu().numpy().tobytes()).decode()}
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__}")


def decode(value: Any) -> Any:
    """Decode the result of `encode`.

    Raises:
        ValueError, TypeError, KeyError: it is not a result of `encode`.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and (kind := next(iter(value))).startswith("$"):
        return _DECODERS[kind](value[kind])
    return {key: decode(item) for key, item in value.items()}


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _byte_tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(_bytes(text)), dtype=torch.uint8)


_DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "$dict": lambda items: {decode(key): decode(item) for key, item in items},
    "$tuple": lambda items: tuple(decode(item) for item in items),
    "$bytes": _bytes,
    "$byte_tensor": _byte_tensor,
}
