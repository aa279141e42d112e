"""Settings of a small job, with a section of two kinds, marks and a secret."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, PositiveInt, SecretStr

from runtime_di import Mark, Problem, RuntimeSettings, Section, SettingsError


class SizeSettings(Section):
    """Sizes."""

    tensor: PositiveInt = 1
    """Ranks that share a tensor."""
    names: tuple[str, ...] = ()
    fast: bool = False
    limit: int | None = 5


class FileKind(Section):
    """A file."""

    kind: Literal["file"] = "file"
    path: Path


class ByteKind(Section):
    """Bytes."""

    kind: Literal["byte"] = "byte"
    extra_tokens: int = 3


class OutputSettings(Section):
    folder: Path = Path("out")
    token: SecretStr | None = None


class JobSettings(RuntimeSettings):
    """Settings of a job."""

    sizes: SizeSettings = SizeSettings()
    text: Annotated[FileKind | ByteKind, Field(discriminator="kind")] | None = ByteKind()
    output: Annotated[OutputSettings, Mark.NOT_PORTABLE] = OutputSettings()
    optional: OutputSettings | None = None
    seed: PositiveInt = 1234
    """Seed of the job."""
    node: Annotated[str, Mark.PER_RANK] = "here"
    secret: SecretStr = SecretStr("default")

    def rules(self) -> Iterable[Problem]:
        if self.launch.world_size % self.sizes.tensor:
            what = f"{self.sizes.tensor} does not divide the world size {self.launch.world_size}"
            yield Problem("sizes.tensor", what, fix="use 1", involves=("launch.world_size",))


class TunedJobSettings(JobSettings):
    """A job whose own defaults differ."""

    sizes: SizeSettings = SizeSettings(limit=9, names=("tuned",))


def error_of(argv: list[str], settings: type[RuntimeSettings] = JobSettings) -> str:
    with pytest.raises(SettingsError) as caught:
        settings.load(argv)
    return str(caught.value)
