"""Requirements that settings place on the machine, checked without importing or opening anything."""

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
        """The field of the section that needs it; ``""`` for the section as a whole."""
        ...

    def lacking(self) -> tuple[str, str] | None:
        """What is missing and how to fix it, or ``None`` if the machine has it."""
        ...


@dataclass(frozen=True, slots=True)
class Module:
    """An importable package, and the extra of runtime-di that installs it."""

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
    """A file that exists and is readable."""

    field: str
    path: Path

    def lacking(self) -> tuple[str, str] | None:
        if not self.path.exists():
            return f"no such file: {self.path}{_listing(self.path.parent)}", "set the path of an existing file"
        if not self.path.is_file():
            return f"not a file: {self.path}", "set the path of a file"
        if not os.access(self.path, os.R_OK):
            return f"file cannot be read: {self.path}", "grant this user read permission, or set another path"
        return None


def _listing(folder: Path) -> str:
    """The first names in the folder of a missing file; empty if the folder cannot be listed."""
    if not folder.is_dir() or not os.access(folder, os.R_OK):
        return ""
    names = sorted(os.listdir(folder))
    return f"; found there: {', '.join(names[:8])}{' and more' if len(names) > 8 else ''}" if names else ""  # noqa: PLR2004


@dataclass(frozen=True, slots=True)
class WritableFolder:
    """A folder that exists or can be created, and in which files can be created."""

    field: str
    path: Path

    def lacking(self) -> tuple[str, str] | None:
        place = self.path.absolute()
        while not os.path.lexists(place):
            place = place.parent
        if not place.is_dir():
            return f"cannot create the folder {self.path}: {place} is not a folder", "set another path"
        if not os.access(place, os.W_OK | os.X_OK):
            return f"cannot write to {self.path}: no permission to write to {place}", "grant it, or set another path"
        return None


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A CUDA driver, detected by its device files without calling CUDA."""

    field: str

    def lacking(self) -> tuple[str, str] | None:
        if any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")):
            return None
        return "this machine has no CUDA driver", "use device 'cpu', or run on a machine with a GPU"
