"""What a machine must offer for the settings to work on it, asked without importing or opening anything."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Requirement(Protocol):
    """One thing that a section's values need of this machine."""

    @property
    def field(self) -> str:
        """The field of the section that asks for it; ``""`` for the section as a whole."""
        ...

    def lacking(self) -> tuple[str, str] | None:
        """What is missing and how to mend it, or ``None`` if it is there."""
        ...


@dataclass(frozen=True, slots=True)
class Module:
    """An importable package that an extra of ours installs."""

    field: str
    name: str
    extra: str | None = None

    def lacking(self) -> tuple[str, str] | None:
        if importlib.util.find_spec(self.name) is not None:
            return None
        package = f"'runtime-di[{self.extra}]'" if self.extra else self.name
        return f"needs the package '{self.name}', which is not installed", f"pip install {package}"


@dataclass(frozen=True, slots=True)
class ReadableFile:
    """A file that is there and can be read."""

    field: str
    path: Path

    def lacking(self) -> tuple[str, str] | None:
        if not self.path.exists():
            return f"no such file: {self.path}{_found_instead(self.path.parent)}", "give the path of an existing file"
        if not self.path.is_file():
            return f"not a file: {self.path}", "give the path of a file"
        if not os.access(self.path, os.R_OK):
            return f"file cannot be read: {self.path}", "grant this user read permission, or give another path"
        return None


def _found_instead(folder: Path) -> str:
    """What stands where a missing file should, the first names of it; nothing where the folder cannot be listed."""
    if not folder.is_dir() or not os.access(folder, os.R_OK):
        return ""
    names = sorted(os.listdir(folder))
    return f"; found there: {', '.join(names[:8])}{' and more' if len(names) > 8 else ''}" if names else ""  # noqa: PLR2004


@dataclass(frozen=True, slots=True)
class WritableFolder:
    """A folder that exists or can be made, and in which files can be made."""

    field: str
    path: Path

    def lacking(self) -> tuple[str, str] | None:
        place = self.path.absolute()
        while not os.path.lexists(place):
            place = place.parent
        if not place.is_dir():
            return f"cannot make the folder {self.path}: {place} is not a folder", "give another path"
        if not os.access(place, os.W_OK | os.X_OK):
            return f"cannot write to {self.path}: no permission to write to {place}", "grant it, or give another path"
        return None


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A CUDA driver, recognised by its device files: nothing of CUDA is called."""

    field: str

    def lacking(self) -> tuple[str, str] | None:
        if any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")):
            return None
        return "this machine has no CUDA driver", "use device 'cpu', or run where a GPU is"
