"""The sources of settings, each read into one layer: flags, environment, file, launch variables, defaults."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    TomlConfigSettingsSource,
    YamlConfigSettingsSource,
)
from pydantic_settings import SettingsError as SourceError

from runtime_di.errors import Problem, SettingsError
from runtime_di.settings import fields
from runtime_di.settings.launch import LAUNCH_VARIABLES
from runtime_di.settings.layers import ENV_PREFIX, Layer, variable_of


def default_layer(settings: type[BaseSettings]) -> Layer:
    """The values of the class's default sections, so that a stronger source can change one field of a section."""
    return Layer(
        "default",
        {
            name: _explicit_values(field.default)
            for name, field in settings.model_fields.items()
            if isinstance(field.default, BaseModel)
        },
    )


def _explicit_values(section: BaseModel) -> dict[str, Any]:
    kind = {"kind": fields.tag(type(section))} if fields.tag(type(section)) else {}
    values = {name: getattr(section, name) for name in section.model_fields_set}
    return kind | {
        name: _explicit_values(value) if isinstance(value, BaseModel) else value for name, value in values.items()
    }


def launch_layer() -> Layer:
    """The values of the launcher's variables."""
    values = {field: os.environ[name] for field, name in LAUNCH_VARIABLES.items() if os.environ.get(name)}
    return Layer("launcher", {"launch": values} if values else {})


def launch_problems(layers: Sequence[Layer]) -> Iterable[Problem]:
    """Check that a rank is set where the launcher sets a world size."""
    launcher = next(layer for layer in layers if layer.name == "launcher")
    if launcher.has("launch.world_size") and not any(layer.has("launch.rank") for layer in layers):
        yield Problem(
            "launch.rank",
            "WORLD_SIZE is set, but RANK is not",
            fix="start with torchrun, set RANK as well, or unset WORLD_SIZE",
        )


def command_line_layer(settings: type[BaseSettings], argv: Sequence[str]) -> Layer:
    """The values of the flags; an unknown flag is an error that names the closest known flag."""
    args = [_with_underscores(arg) for arg in argv]
    problems = [problem for arg in args if arg.startswith("--") for problem in _flag_problems(settings, arg)]
    if problems:
        raise SettingsError(f"The command line of {settings.__name__} is wrong.", problems)
    try:
        flags = tuple(arg.partition("=")[0].removeprefix("--") for arg in args if arg.startswith("--"))
        return Layer("command line", CliSettingsSource[Any](settings, cli_parse_args=args)(), flags)
    except SourceError as error:
        what = str(error).removeprefix("error parsing CLI: ")
        fix = "see --help; a switch takes no value: --name or --no-name"
        raise SettingsError(
            f"The command line of {settings.__name__} is wrong.", [Problem("", what, fix=fix)]
        ) from error


def _with_underscores(arg: str) -> str:
    flag, equals, value = arg.partition("=")
    no = "--no-" if flag.startswith("--no-") else "--"
    return no + flag.removeprefix(no).replace("-", "_") + equals + value if flag.startswith("--") else arg


def _flag_problems(settings: type[BaseSettings], arg: str) -> Iterable[Problem]:
    flag = arg.partition("=")[0]
    path = flag.removeprefix("--")
    if not fields.knows(settings, path) and not fields.knows(settings, path.removeprefix("no-")):
        near = fields.closest(settings, path)
        yield Problem(flag, "unknown flag", fix=f"did you mean --{near}?" if near else "see --help")


def environment_layer(settings: type[BaseSettings], known_to: Iterable[type[BaseSettings]]) -> Layer:
    """The values of the ``RUNTIME_DI_*`` variables; one that is unknown to every class in ``known_to`` is an error."""
    paths = {name: _path_of(name) for name in sorted(os.environ) if name.upper().startswith(ENV_PREFIX)}
    known_to = tuple(known_to)
    unknown = [name for name, path in paths.items() if not any(fields.knows(other, path) for other in known_to)]
    if unknown:
        problems = [
            Problem(name, "unknown environment variable", fix=_closest_variable(settings, paths[name]))
            for name in unknown
        ]
        raise SettingsError(f"The environment of {settings.__name__} is wrong.", problems)
    source = EnvSettingsSource(settings)
    ours = {name.lower() for name, path in paths.items() if fields.knows(settings, path)}
    source.env_vars = {name: value for name, value in source.env_vars.items() if name.lower() in ours}
    try:
        return Layer("environment", source(), tuple(paths.values()))
    except SourceError as error:
        what = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
        raise SettingsError(
            f"The environment of {settings.__name__} is wrong.", [Problem("", what, fix="lists and sections are JSON")]
        ) from error


def _path_of(variable: str) -> str:
    return variable.upper().removeprefix(ENV_PREFIX).lower().replace("__", ".")


def _closest_variable(settings: type[BaseSettings], path: str) -> str:
    near = fields.closest(settings, path)
    return f"did you mean {variable_of(near)}?" if near else "unset it"


def file_layer(settings: type[BaseSettings], path: Path, named_by: str) -> Layer:
    """The values of a YAML or TOML file."""
    try:
        return Layer(f"file {path}", _read(settings, path))
    except (OSError, ValueError, TypeError, ImportError) as error:
        what, fix = str(error), "correct the file, or name another"
        if isinstance(error, ImportError):
            what, fix = "reading YAML needs the package PyYAML", "pip install 'runtime-di[yaml]', or write TOML"
        raise SettingsError(
            f"The settings file of {settings.__name__} cannot be read.",
            [Problem("config", what, value=str(path), source=named_by, fix=fix)],
        ) from error


def _read(settings: type[BaseSettings], path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    if path.suffix in (".yaml", ".yml"):
        import yaml

        try:
            return YamlConfigSettingsSource(settings, yaml_file=path)()
        except yaml.YAMLError as error:
            raise ValueError(f"not YAML: {error}") from error
        except (TypeError, ValueError) as error:
            raise ValueError("it does not contain a mapping of settings") from error
    if path.suffix == ".toml":
        try:
            return TomlConfigSettingsSource(settings, toml_file=path)()
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"not TOML: {error}") from error
    raise ValueError(f"a settings file ends in .yaml, .yml or .toml, not {path.suffix or 'nothing'!r}")
