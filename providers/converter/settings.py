"""Settings of a conversion."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import PositiveInt

from runtime_di.settings.capabilities import Requirement, WritableFolder
from runtime_di.settings.launch import LaunchSettings
from runtime_di.settings.section import Section


class ConversionSettings(Section):
    """The form into which a checkpoint is converted."""

    folder: Path | None = None
    """Folder of the new checkpoint; it must not exist yet."""
    tensor: PositiveInt = 1
    """Tensor-parallel size for which the vocabulary rows are padded."""
    single_file: bool = False
    """Write the model's weights alone to one model.safetensors, under their own names, without optimizer state."""
    model: str = "trainer.model."
    """Prefix of the paths of the model's weights."""
    vocabulary_rows: tuple[str, ...] = ("*.embedding.weight*", "*.head.weight*")
    """Path patterns of tensors with one row a token, the optimizer's state for them included."""

    def requires(self, launch: LaunchSettings) -> Iterable[Requirement]:
        if self.folder is not None:
            yield PathIsFree("folder", self.folder)
            yield WritableFolder("folder", self.folder.parent)


@dataclass(frozen=True, slots=True)
class PathIsFree:
    """Requires that nothing exists at a path, so that nothing is overwritten."""

    field: str
    path: Path

    def lacking(self) -> tuple[str, str] | None:
        """Return the problem and its fix if something exists at the path."""
        if not self.path.exists() and not self.path.is_symlink():
            return None
        return f"{self.path} already exists and is not overwritten", "name a new folder"
