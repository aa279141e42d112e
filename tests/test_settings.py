"""Where settings come from, and what is told when they are wrong."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, PositiveInt, SecretStr

from runtime_di import LaunchSettings, Mark, Problem, RuntimeSettings, Section, SettingsError


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
    secret: SecretStr = SecretStr("unsaid")

    def rules(self) -> Iterable[Problem]:
        if self.launch.world_size % self.sizes.tensor:
            what = f"{self.sizes.tensor} does not divide the world size {self.launch.world_size}"
            yield Problem("sizes.tensor", what, fix="use 1", involves=("launch.world_size",))


class TunedJobSettings(JobSettings):
    """A job whose own defaults differ."""

    sizes: SizeSettings = SizeSettings(limit=9, names=("tuned",))


def told(argv: list[str], settings: type[RuntimeSettings] = JobSettings) -> str:
    with pytest.raises(SettingsError) as caught:
        settings.load(argv)
    return str(caught.value)


def test_flags_beat_environment_beats_file_beats_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each source overrides the weaker ones field by field, and explain tells all of it."""
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


def test_yaml_file_says_the_same_as_toml(tmp_path: Path) -> None:
    """YAML and TOML files are read alike, and a null in YAML switches a section off."""
    file = tmp_path / "job.yaml"
    file.write_text("seed: 7\ntext: null\nsizes:\n  limit: null\n")

    settings = JobSettings.load(["--config", str(file)])

    assert (settings.seed, settings.text, settings.sizes.limit) == (7, None, None)


@pytest.mark.parametrize(
    ("name", "content", "told_in_message"),
    [
        ("job.yaml", "a: [", "not YAML"),
        ("job.yaml", "- 1\n- 2\n", "it holds no mapping of settings"),
        ("job.toml", "a = ", "not TOML"),
        ("job.ini", "", "a settings file ends in .yaml, .yml or .toml, not '.ini'"),
        ("job.toml", None, "no such file"),
        ("job.yaml", "!!python/object/apply:os.system ['true']", "not YAML"),
    ],
)
def test_unreadable_file_is_told_with_its_path(
    tmp_path: Path, name: str, content: str | None, told_in_message: str
) -> None:
    """A settings file that is missing, malformed or of another kind is a SettingsError, and runs nothing."""
    file = tmp_path / name
    if content is not None:
        file.write_text(content)

    message = told(["--config", str(file)])

    assert told_in_message in message
    assert str(file) in message


def test_environment_null_switches_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment value null is None, for a field as for a section."""
    monkeypatch.setenv("RUNTIME_DI_TEXT", "null")
    monkeypatch.setenv("RUNTIME_DI_SIZES__LIMIT", "null")

    settings = JobSettings.load([])

    assert (settings.text, settings.sizes.limit) == (None, None)


def test_misspelt_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable with our prefix that no settings class knows is told with the closest one."""
    monkeypatch.setenv("RUNTIME_DI_SIZES__TENSR", "2")

    message = told([])

    assert message == (
        "The environment of JobSettings is wrong.\n"
        "  RUNTIME_DI_SIZES__TENSR: unknown environment variable\n"
        "    fix: did you mean RUNTIME_DI_SIZES__TENSOR?"
    )


def test_variable_of_another_entrypoint_is_let_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that another settings class knows is no error and has no effect."""

    class OtherSettings(RuntimeSettings):
        rollout: SizeSettings = SizeSettings()

    monkeypatch.setenv("RUNTIME_DI_ROLLOUT__TENSOR", "2")

    assert JobSettings.load([]) == JobSettings.load([])
    assert OtherSettings.load([]).rollout.tensor == 2


def test_unknown_flags_are_told_together() -> None:
    """Every unknown flag is told, with the closest known one."""
    message = told(["--sizes.tensr", "2", "--sead=3"])

    assert message == (
        "The command line of JobSettings is wrong.\n"
        "  --sizes.tensr: unknown flag\n"
        "    fix: did you mean --sizes.tensor?\n"
        "  --sead: unknown flag\n"
        "    fix: did you mean --seed?"
    )


@pytest.mark.parametrize("argv", [["stray"], ["--seed"], ["--sizes.fast", "maybe"]])
def test_malformed_command_line_is_a_settings_error(argv: list[str]) -> None:
    """What argparse would exit on is told as an error of ours."""
    assert "The command line of JobSettings is wrong." in told(argv)


def test_flags_take_hyphens_and_switches() -> None:
    """A hyphen stands for an underscore, and a boolean is a switch."""
    settings = JobSettings.load(["--text.extra-tokens=4", "--sizes.fast"])

    assert settings.text == ByteKind(extra_tokens=4)
    assert settings.sizes.fast
    assert not JobSettings.load(["--no-sizes.fast"]).sizes.fast


def test_all_problems_are_told_together() -> None:
    """Invalid fields and broken rules of the others come in one message, each with value, source and rule."""
    message = told(["--seed", "-1", "--sizes.tensor", "3", "--text.extra_tokens", "x"])

    assert message == (
        "JobSettings cannot be used as given: 3 problems.\n"
        "  text.extra_tokens = x (from command line --text.extra_tokens): input should be a valid integer, unable to "
        "parse string as an integer\n"
        "  seed = -1 (from command line --seed): input should be greater than 0\n"
        "  sizes.tensor = 3 (from command line --sizes.tensor): 3 does not divide the world size 1\n"
        "    fix: use 1"
    )


def test_rule_that_reads_an_invalid_field_is_not_told() -> None:
    """A rule is silent where one of the values it reads is invalid by itself."""
    message = told(["--launch.world_size", "0", "--sizes.tensor", "3"])

    assert "launch.world_size = 0" in message
    assert "does not divide" not in message


def test_stronger_kind_replaces_the_whole_section(tmp_path: Path) -> None:
    """A source that sets another kind drops what weaker sources say of the section."""
    file = tmp_path / "job.toml"
    file.write_text('[text]\nkind = "file"\npath = "/some/file"\n')

    replaced = JobSettings.load(["--config", str(file), "--text.kind", "byte"])
    kept = JobSettings.load(["--config", str(file)])

    assert replaced.text == ByteKind()
    assert kept.text == FileKind(path=Path("/some/file"))


def test_class_default_section_keeps_its_other_fields() -> None:
    """Setting one field of a section leaves the others at the class's own default section."""
    settings = TunedJobSettings.load(["--sizes.fast"])

    assert settings.sizes == SizeSettings(limit=9, names=("tuned",), fast=True)


@pytest.mark.parametrize("way", ["flags", "environment", "file", "constructor"])
def test_every_source_gives_equal_settings(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags, environment, file and constructor that say the same make equal settings and fingerprints."""
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


def test_constructor_reads_the_launcher_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The constructor takes rank and world from the launcher, and no variable of ours."""
    monkeypatch.setenv("RUNTIME_DI_SEED", "77")
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)

    settings = JobSettings()

    assert (settings.seed, settings.launch.rank, settings.launch.world_size) == (1234, 3, 4)
    assert settings.explain("launch.rank").source == "environment RANK"


def test_launch_settings_from_a_caller_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller's own LaunchSettings take the place of the launcher's variables."""
    monkeypatch.setenv("WORLD_SIZE", "4")

    assert JobSettings(launch=LaunchSettings(rank=2, world_size=8)).launch.rank == 2


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2"}, "launch.rank: WORLD_SIZE is set, but RANK is not"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "launch.rank = 2 (from environment RANK): rank 2 must be below the world"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "launch.rank = one (from environment RANK): input should be a valid"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"},
            "launch.local_rank = 1 (from environment LOCAL_RANK): local rank 1 must be below",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "4"},
            "launch.local_world_size = 4 (from environment LOCAL_WORLD_SIZE): local world size 4 must not be above",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "0"},
            "launch.master_port = 0 (from environment MASTER_PORT): 2 ranks cannot meet on port 0",
        ),
    ],
)
def test_contradictory_launch_variables_are_told(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B3: launch variables that contradict each other are a SettingsError that names them."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert message in told([])


def test_secrets_are_masked_everywhere() -> None:
    """A secret shows in no dump, explanation, error, snapshot or help."""
    settings = JobSettings.load(["--secret", "hunter2", "--output.token", "hunter2"])
    with pytest.raises(SettingsError) as caught:
        JobSettings(secret=["hunter2"], output={"token": 2})

    shown = [
        repr(settings),
        str(settings),
        settings.model_dump_json(),
        str(settings.shown),
        str(settings.portable),
        str(settings.agreed()),
        str(settings.explain("secret")),
        str(settings.explain("output")),
        str(caught.value),
    ]

    assert not any("hunter2" in text for text in shown)


def test_fingerprint_leaves_out_what_may_differ() -> None:
    """Per-rank fields and secrets do not change the fingerprint; every other field does."""
    base = JobSettings()

    assert JobSettings(node="there", secret="s").fingerprint() == base.fingerprint()
    assert (
        JobSettings(launch={"rank": 1, "world_size": 2}).fingerprint()
        == JobSettings(launch={"rank": 0, "world_size": 2}).fingerprint()
    )
    assert JobSettings(output={"folder": "elsewhere"}).fingerprint() != base.fingerprint()


def test_a_section_of_another_default_belongs_to_this_run_still() -> None:
    """A mark of a field need not be said again where a subclass gives it another type or default."""

    class OtherSettings(JobSettings):
        output: OutputSettings = OutputSettings()

    assert OtherSettings().portable == JobSettings().portable


def test_portable_settings_leave_out_what_belongs_to_this_run() -> None:
    """A checkpoint carries neither launch, per-rank nor not-portable settings."""
    portable = JobSettings(seed=5).portable

    assert portable == {
        "sizes": {"tensor": 1, "names": [], "fast": False, "limit": 5},
        "text": {"kind": "byte", "extra_tokens": 3},
        "optional": None,
        "seed": 5,
    }


def test_settings_are_frozen_and_forbid_unknown_names() -> None:
    """No field can be set, and no unknown one given."""
    settings = JobSettings()

    with pytest.raises(ValueError, match="frozen"):
        settings.seed = 2
    with pytest.raises(SettingsError, match=r"sizes.tensr = 2 \(from constructor\): unknown setting"):
        JobSettings(sizes={"tensr": 2})


def test_copies_are_validated() -> None:
    """model_copy refuses what the constructor refuses, in settings and in sections."""
    settings = JobSettings(seed=5)

    with pytest.raises(SettingsError, match="greater than 0"):
        settings.model_copy(update={"seed": 0})
    with pytest.raises(ValueError, match="greater than 0"):
        settings.sizes.model_copy(update={"tensor": 0})
    assert settings.model_copy(update={"node": "x"}).seed == 5


def test_unvalidated_settings_are_found_out() -> None:
    """B34, B87: validating again changes nothing, and finds values that model_construct let pass."""
    settings = JobSettings(seed=5)

    assert settings.revalidated() is settings
    with pytest.raises(SettingsError, match="seed = -1"):
        JobSettings.model_construct(**{**dict(settings), "seed": -1}).revalidated()
    raw = JobSettings.model_construct(**{**dict(settings), "sizes": {"tensor": 1}})
    assert raw.revalidated().sizes == SizeSettings()


def test_settings_travel_between_processes() -> None:
    """Settings pickle with their provenance."""
    settings = JobSettings.load(["--seed", "6"])

    copy = pickle.loads(pickle.dumps(settings))

    assert copy == settings
    assert copy.explain("seed").source == "command line --seed"


def test_help_documents_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    """--help lists every field of every kind with its default, and exits with 0."""
    with pytest.raises(SystemExit) as caught:
        JobSettings.load(["--help"])

    printed = capsys.readouterr().out
    assert caught.value.code == 0
    assert "--sizes.tensor INT\n        Ranks that share a tensor. (default: 1)" in printed
    assert "--text.kind {file,byte}  (default: byte)" in printed
    assert "--text.path PATH\n        (required)" in printed
    assert "--text.extra_tokens INT\n        (default: 3)" in printed
    assert "--secret SECRET\n        (default: **********)" in printed


def test_explaining_an_unknown_setting_names_the_closest() -> None:
    """explain of a misspelt path is a SettingsError."""
    with pytest.raises(SettingsError, match=r"did you mean sizes\.tensor\?"):
        JobSettings().explain("sizes.tenso")


class DeviceSection(Section):
    kind: Literal["auto", "cpu"] = "auto"
    """Where to compute."""
    index: int = 0


class DeviceJobSettings(RuntimeSettings):
    device: DeviceSection = DeviceSection()


def test_field_that_happens_to_be_named_kind_is_a_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A section that is no member of a union keeps its other values when its kind is set; --help lists all."""
    file = tmp_path / "job.toml"
    file.write_text('[device]\nkind = "auto"\nindex = 5\n')

    settings = DeviceJobSettings.load(["--config", str(file), "--device.kind", "cpu"])
    with pytest.raises(SystemExit):
        DeviceJobSettings.load(["--help"])

    assert settings.device == DeviceSection(kind="cpu", index=5)
    assert "--device.kind {auto,cpu}\n        Where to compute. (default: auto)" in capsys.readouterr().out


def test_replaced_section_is_no_source(tmp_path: Path) -> None:
    """What a weaker source said of a section of another kind is neither explained nor blamed."""
    file = tmp_path / "job.toml"
    file.write_text('[text]\nkind = "byte"\nextra_tokens = 7\n')

    message = told(["--config", str(file), "--text.kind", "file"])
    settings = JobSettings.load(["--config", str(file), "--text.kind", "file", "--text.path", "x"])

    assert message.endswith("  text.path: field required")
    assert settings.explain("text.extra_tokens").source == "default"


def test_json_variable_is_named_as_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """A section said as JSON is blamed on the variable or flag that said it."""
    monkeypatch.setenv("RUNTIME_DI_SIZES", '{"tensr": 4}')

    assert "sizes.tensr = 4 (from environment RUNTIME_DI_SIZES): unknown setting" in told([])
    assert "(from command line --sizes)" in told(["--sizes", '{"tensor": "x"}'])
