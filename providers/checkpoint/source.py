"""A checkpoint as a source of settings: portable fields only, overridden by flags, environment and file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from runtime_di.errors import SettingsError
from runtime_di.providers.checkpoint.format.snapshot import CheckpointError, find_checkpoint, read_snapshot
from runtime_di.settings import fields
from runtime_di.settings.layers import Layer, merge_layers
from runtime_di.settings.sources import default_layer

if TYPE_CHECKING:
    from runtime_di.settings.model import RuntimeSettings


def checkpoint_layers(settings: type[RuntimeSettings], stronger: Sequence[Layer]) -> Iterable[Layer]:
    """Return the layer of the checkpoint in ``checkpoint.load``, if ``checkpoint.load_settings`` is true.

    Either field may be set by a ``stronger`` source, or by the default section of the class.

    Raises:
        SettingsError: the checkpoint cannot be read.
    """
    _, explicit = merge_layers([*stronger, default_layer(settings)], settings)
    section = explicit.get("checkpoint")
    asked = section if isinstance(section, Mapping) else {}
    if not asked.get("load") or not _is_true(asked.get("load_settings", False)):
        return []
    folder = find_checkpoint(Path(asked["load"])) or Path(asked["load"])
    try:
        snapshot = read_snapshot(folder)
    except CheckpointError as error:
        raise SettingsError(error.heading, error.problems) from error
    files = {
        section: {field: str(folder / name) for field, name in own.items()} for section, own in snapshot.files.items()
    }
    _, values = merge_layers([Layer("files", files), Layer("settings", snapshot.settings)], settings)
    return [Layer(f"checkpoint {asked['load']}", _portable([settings], values))]


def _is_true(value: object) -> bool:
    try:
        return TypeAdapter(bool).validate_python(value)
    except ValidationError:
        return False  # reported with its path and source when the settings are validated


def _portable(owners: Sequence[type[BaseModel]], values: Mapping[str, Any]) -> dict[str, Any]:
    """Keep those of a checkpoint's settings that these classes have and that are portable."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        known = {owner: owner.model_fields[name] for owner in owners if name in owner.model_fields}
        if not known or any(fields.marks(owner, name) or fields.is_secret(field) for owner, field in known.items()):
            continue
        nested = [model for field in known.values() for model in fields.models(field.annotation)]
        kept[name] = _portable(nested, value) if nested and isinstance(value, Mapping) else value
    return kept
