"""The sources of settings: flags, environment, file and defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime_di import RuntimeSettings
from tests.support.job_settings import ByteKind, JobSettings, SizeSettings, TunedJobSettings, error_of


def test_flags_beat_environment_beats_file_beats_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each source overrides the weaker ones field by field, and explain lists all of them."""
    file = tmp_path / "job.toml"
    file.write_text('seed = 2\n[sizes]\ntensor = 1\nlimit = 20\nnames = ["file"]\n')
    monkeypatch.setenv("RUNTIME_DI_SIZES__LIMIT", "30")
    monkeypatch.setenv("RUNTIME_DI_SEED", "3")

    settings = JobSettings.load(["--config", str(file), "--seed", "4"])

    assert (settings.seed, settings.sizes.limit, settings.sizes.names) == (4, 30, ("file",))
    assert str(settings.explain("seed")) == (
        "seed = 4 (from command line --seed)\n"
        f"  overrode 3 from environment RUNTIME_DI_SEED\n  overrode 2 from file {file}"
    )
    assert str(settings.explain("sizes.fast")) == "sizes.fast = False (from default)"


def test_yaml_file_is_read_like_toml(tmp_path: Path) -> None:
    """YAML and TOML files are read the same way, and a null in YAML switches a section off."""
    file = tmp_path / "job.yaml"
    file.write_text("seed: 7\ntext: null\nsizes:\n  limit: null\n")

    settings = JobSettings.load(["--config", str(file)])

    assert (settings.seed, settings.text, settings.sizes.limit) == (7, None, None)


@pytest.mark.parametrize(
    ("name", "content", "in_message"),
    [
        ("job.yaml", "a: [", "not YAML"),
        ("job.yaml", "- 1\n- 2\n", "it does not contain a mapping of settings"),
        ("job.toml", "a = ", "not TOML"),
        ("job.ini", "", "a settings file ends in .yaml, .yml or .toml, not '.ini'"),
        ("job.toml", None, "no such file"),
        ("job.yaml", "!!python/object/apply:os.system ['true']", "not YAML"),
    ],
)
def test_unreadable_file_is_reported_with_its_path(
    tmp_path: Path, name: str, content: str | None, in_message: str
) -> None:
    """A settings file that is missing, malformed or of another kind is a SettingsError, and runs nothing."""
    file = tmp_path / name
    if content is not None:
        file.write_text(content)

    message = error_of(["--config", str(file)])

    assert in_message in message
    assert str(file) in message


def test_environment_null_switches_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment value null is None, for a field as for a section."""
    monkeypatch.setenv("RUNTIME_DI_TEXT", "null")
    monkeypatch.setenv("RUNTIME_DI_SIZES__LIMIT", "null")

    settings = JobSettings.load([])

    assert (settings.text, settings.sizes.limit) == (None, None)


def test_misspelt_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable with our prefix that no settings class knows is an error that names the closest one."""
    monkeypatch.setenv("RUNTIME_DI_SIZES__TENSR", "2")

    message = error_of([])

    assert message == (
        "The environment of JobSettings is wrong.\n"
        "  RUNTIME_DI_SIZES__TENSR: unknown environment variable\n"
        "    fix: did you mean RUNTIME_DI_SIZES__TENSOR?"
    )


def test_variable_of_another_entrypoint_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that another settings class knows is not an error and has no effect."""

    class OtherSettings(RuntimeSettings):
        rollout: SizeSettings = SizeSettings()

    monkeypatch.setenv("RUNTIME_DI_ROLLOUT__TENSOR", "2")

    assert JobSettings.load([]) == JobSettings.load([])
    assert OtherSettings.load([]).rollout.tensor == 2


def test_unknown_flags_are_reported_together() -> None:
    """Every unknown flag is reported with the closest known one."""
    message = error_of(["--sizes.tensr", "2", "--sead=3"])

    assert message == (
        "The command line of JobSettings is wrong.\n"
        "  --sizes.tensr: unknown flag\n"
        "    fix: did you mean --sizes.tensor?\n"
        "  --sead: unknown flag\n"
        "    fix: did you mean --seed?"
    )


@pytest.mark.parametrize("argv", [["stray"], ["--seed"], ["--sizes.fast", "maybe"]])
def test_malformed_command_line_is_a_settings_error(argv: list[str]) -> None:
    """A command line on which argparse would exit is a SettingsError."""
    assert "The command line of JobSettings is wrong." in error_of(argv)


def test_flags_take_hyphens_and_switches() -> None:
    """A hyphen stands for an underscore, and a boolean is a switch."""
    settings = JobSettings.load(["--text.extra-tokens=4", "--sizes.fast"])

    assert settings.text == ByteKind(extra_tokens=4)
    assert settings.sizes.fast
    assert not JobSettings.load(["--no-sizes.fast"]).sizes.fast


def test_class_default_section_keeps_its_other_fields() -> None:
    """Setting one field of a section leaves the others at the class's own default section."""
    settings = TunedJobSettings.load(["--sizes.fast"])

    assert settings.sizes == SizeSettings(limit=9, names=("tuned",), fast=True)


@pytest.mark.parametrize("way", ["flags", "environment", "file", "constructor"])
def test_every_source_gives_equal_settings(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags, environment, file and constructor with the same values give equal settings and fingerprints."""
    file = tmp_path / "job.toml"
    file.write_text("seed = 9\n[sizes]\nlimit = 3\n")
    if way == "environment":
        monkeypatch.setenv("RUNTIME_DI_SEED", "9")
        monkeypatch.setenv("RUNTIME_DI_SIZES__LIMIT", "3")
    ways = {
        "flags": lambda: JobSettings.load(["--seed", "9", "--sizes.limit", "3"]),
        "environment": lambda: JobSettings.load([]),
        "file": lambda: JobSettings.load(["--config", str(file)]),
        "constructor": lambda: JobSettings(seed=9, sizes={"limit": 3}),
    }

    settings = ways[way]()

    assert settings.fingerprint() == JobSettings(seed=9, sizes=SizeSettings(limit=3)).fingerprint()
    assert settings.sizes.limit == 3
