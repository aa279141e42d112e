"""The merge of layers: sections of another kind, and the source that an explanation names."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from runtime_di import RuntimeSettings, Section
from tests.support.job_settings import ByteKind, FileKind, JobSettings, error_of


def test_stronger_kind_replaces_the_whole_section(tmp_path: Path) -> None:
    """A source that sets another kind drops the section's values of weaker sources."""
    file = tmp_path / "job.toml"
    file.write_text('[text]\nkind = "file"\npath = "/some/file"\n')

    replaced = JobSettings.load(["--config", str(file), "--text.kind", "byte"])
    kept = JobSettings.load(["--config", str(file)])

    assert replaced.text == ByteKind()
    assert kept.text == FileKind(path=Path("/some/file"))


class DeviceSection(Section):
    kind: Literal["auto", "cpu"] = "auto"
    """Where to compute."""
    index: int = 0


class DeviceJobSettings(RuntimeSettings):
    device: DeviceSection = DeviceSection()


def test_field_that_happens_to_be_named_kind_is_a_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A section outside a union keeps its other values when its kind is set; --help lists every field."""
    file = tmp_path / "job.toml"
    file.write_text('[device]\nkind = "auto"\nindex = 5\n')

    settings = DeviceJobSettings.load(["--config", str(file), "--device.kind", "cpu"])
    with pytest.raises(SystemExit):
        DeviceJobSettings.load(["--help"])

    assert settings.device == DeviceSection(kind="cpu", index=5)
    assert "--device.kind {auto,cpu}\n        Where to compute. (default: auto)" in capsys.readouterr().out


def test_replaced_section_is_not_a_source(tmp_path: Path) -> None:
    """A weaker source's section of another kind appears in no explanation and no error."""
    file = tmp_path / "job.toml"
    file.write_text('[text]\nkind = "byte"\nextra_tokens = 7\n')

    message = error_of(["--config", str(file), "--text.kind", "file"])
    settings = JobSettings.load(["--config", str(file), "--text.kind", "file", "--text.path", "x"])

    assert message.endswith("  text.path: field required")
    assert settings.explain("text.extra_tokens").source == "default"


def test_json_variable_is_named_as_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors in a section that is set as JSON name the variable or flag that set it."""
    monkeypatch.setenv("RUNTIME_DI_SIZES", '{"tensr": 4}')

    assert "sizes.tensr = 4 (from environment RUNTIME_DI_SIZES): unknown setting" in error_of([])
    assert "(from command line --sizes)" in error_of(["--sizes", '{"tensor": "x"}'])
