"""Where settings come from: layers of values, the strongest first, merged into one."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from pydantic_settings import CliSettingsSource, EnvSettingsSource, TomlConfigSettingsSource, YamlConfigSettingsSource
from pydantic_settings import SettingsError as SourceError

from runtime_di import fields
from runtime_di.errors import Problem, SettingsError
from runtime_di.launch import LAUNCH_VARIABLES

if TYPE_CHECKING:
    from runtime_di.settings import RuntimeSettings

ENV_PREFIX = "RUNTIME_DI_"
_MISSING = object()


@dataclass(frozen=True, slots=True)
class Layer:
    """What one source says, as nested values."""

    name: str
    values: Mapping[str, Any]
    said: tuple[str, ...] = ()
    """Paths of the flags or variables that were given; one may say a whole section as JSON."""

    def get(self, path: str) -> Any:
        """The value at a dotted path, or the sentinel that `has` tests for."""
        value: Any = self.values
        for part in path.split("."):
            if isinstance(value, BaseModel):
                value = dict(value)
            if not isinstance(value, Mapping) or part not in value:
                return _MISSING
            value = value[part]
        return value

    def has(self, path: str) -> bool:
        return self.get(path) is not _MISSING

    def origin(self, path: str) -> str:
        """How the user set ``path`` here, such as ``environment RUNTIME_DI_PARALLEL__TENSOR``."""
        given = max((said for said in self.said if f"{path}.".startswith(f"{said}.")), key=len, default=path)
        if self.name == "command line":
            return f"command line --{given}"
        if self.name == "environment":
            return f"environment {_variable_of(given)}"
        if self.name == "launcher":
            return f"environment {LAUNCH_VARIABLES.get(path.removeprefix('launch.'), path)}"
        return self.name


def settle(layers: Sequence[Layer], settings: type[BaseModel]) -> tuple[tuple[Layer, ...], dict[str, Any]]:
    """Lay the stronger layers over the weaker ones; a section of another ``kind`` replaces the weaker one whole.

    Returns:
        The layers, the strongest first, without what was replaced; and the values that follow from them.
    """
    counting: list[Layer] = []
    merged: dict[str, Any] = {}
    for layer in reversed(layers):
        replaced = list(_replaced(merged, layer.values, [settings]))
        counting = [replace(weaker, values=without(weaker.values, replaced)) for weaker in counting]
        merged = _merge(without(merged, replaced), layer.values)
        counting.insert(0, layer)
    return tuple(counting), merged


def _replaced(
    weaker: Mapping[str, Any], stronger: Mapping[str, Any], owners: Sequence[type[BaseModel]], prefix: str = ""
) -> Iterator[str]:
    """Paths of the sections that ``stronger`` says to be of another kind."""
    for name, value in stronger.items():
        below = weaker.get(name)
        nested = [
            model
            for owner in owners
            if name in owner.model_fields
            for model in fields.models(owner.model_fields[name].annotation)
        ]
        if not isinstance(value, Mapping) or not isinstance(below, Mapping):
            continue
        if any(map(fields.tag, nested)) and {"kind"} <= value.keys() & below.keys() and value["kind"] != below["kind"]:
            yield prefix + name
        else:
            yield from _replaced(below, value, nested, f"{prefix}{name}.")


def _merge(weaker: Any, stronger: Any) -> Any:
    if not isinstance(weaker, Mapping) or not isinstance(stronger, Mapping):
        return stronger
    return {**weaker, **{name: _merge(weaker.get(name), value) for name, value in stronger.items()}}


def without(values: Mapping[str, Any], paths: Sequence[str], prefix: str = "") -> dict[str, Any]:
    """Nested values less those at some dotted paths."""
    kept = {name: value for name, value in values.items() if prefix + name not in paths}
    return {
        name: without(value, paths, f"{prefix}{name}.") if isinstance(value, Mapping) else value
        for name, value in kept.items()
    }


def default_layer(settings: type[RuntimeSettings]) -> Layer:
    """What the class's own default sections say, so that a stronger source may change one of their fields."""
    return Layer(
        "default",
        {
            name: _said(field.default)
            for name, field in settings.model_fields.items()
            if isinstance(field.default, BaseModel)
        },
    )


def _said(section: BaseModel) -> dict[str, Any]:
    kind = {"kind": fields.tag(type(section))} if fields.tag(type(section)) else {}
    said = {name: getattr(section, name) for name in section.model_fields_set}
    return kind | {name: _said(value) if isinstance(value, BaseModel) else value for name, value in said.items()}


def launch_layer() -> Layer:
    """What the launcher's variables say."""
    said = {field: os.environ[name] for field, name in LAUNCH_VARIABLES.items() if os.environ.get(name)}
    return Layer("launcher", {"launch": said} if said else {})


def launch_problems(layers: Sequence[Layer]) -> Iterable[Problem]:
    """A world size from the launcher needs a rank from it, or from a stronger source."""
    launcher = next(layer for layer in layers if layer.name == "launcher")
    if launcher.has("launch.world_size") and not any(layer.has("launch.rank") for layer in layers):
        yield Problem(
            "launch.rank",
            "WORLD_SIZE is set, but RANK is not",
            fix="start with torchrun, set RANK as well, or unset WORLD_SIZE",
        )


def command_line_layer(settings: type[RuntimeSettings], argv: Sequence[str]) -> Layer:
    """What the flags say; an unknown flag is an error that names the closest known one."""
    args = [_with_underscores(arg) for arg in argv]
    problems = [problem for arg in args if arg.startswith("--") for problem in _flag_problems(settings, arg)]
    if problems:
        raise SettingsError(f"The command line of {settings.__name__} is wrong.", problems)
    try:
        flags = tuple(arg.partition("=")[0].removeprefix("--") for arg in args if arg.startswith("--"))
        return Layer("command line", CliSettingsSource[Any](settings, cli_parse_args=args)(), flags)
    except SourceError as error:
        told = str(error).removeprefix("error parsing CLI: ")
        fix = "see --help; a switch takes no value: --name or --no-name"
        raise SettingsError(
            f"The command line of {settings.__name__} is wrong.", [Problem("", told, fix=fix)]
        ) from error


def _with_underscores(arg: str) -> str:
    flag, equals, value = arg.partition("=")
    no = "--no-" if flag.startswith("--no-") else "--"
    return no + flag.removeprefix(no).replace("-", "_") + equals + value if flag.startswith("--") else arg


def _flag_problems(settings: type[RuntimeSettings], arg: str) -> Iterable[Problem]:
    flag = arg.partition("=")[0]
    path = flag.removeprefix("--")
    if not fields.knows(settings, path) and not fields.knows(settings, path.removeprefix("no-")):
        near = fields.closest(settings, path)
        yield Problem(flag, "unknown flag", fix=f"did you mean --{near}?" if near else "see --help")


def environment_layer(settings: type[RuntimeSettings], known_to: Iterable[type[RuntimeSettings]]) -> Layer:
    """What our environment variables say; one that no class in ``known_to`` has is an error."""
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


def _variable_of(path: str) -> str:
    return ENV_PREFIX + path.upper().replace(".", "__")


def _closest_variable(settings: type[RuntimeSettings], path: str) -> str:
    near = fields.closest(settings, path)
    return f"did you mean {_variable_of(near)}?" if near else "unset it"


def file_layer(settings: type[RuntimeSettings], path: Path, named_by: str) -> Layer:
    """What a YAML or TOML file says."""
    try:
        return Layer(f"file {path}", _read(settings, path))
    except (OSError, ValueError, TypeError, ImportError) as error:
        what, fix = str(error), "mend the file, or name another"
        if isinstance(error, ImportError):
            what, fix = "reading YAML needs the package PyYAML", "pip install 'runtime-di[yaml]', or write TOML"
        raise SettingsError(
            f"The settings file of {settings.__name__} cannot be read.",
            [Problem("config", what, value=str(path), source=named_by, fix=fix)],
        ) from error


def _read(settings: type[RuntimeSettings], path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    if path.suffix in (".yaml", ".yml"):
        import yaml

        try:
            return YamlConfigSettingsSource(settings, yaml_file=path)()
        except yaml.YAMLError as error:
            raise ValueError(f"not YAML: {error}") from error
        except (TypeError, ValueError) as error:
            raise ValueError("it holds no mapping of settings") from error
    if path.suffix == ".toml":
        try:
            return TomlConfigSettingsSource(settings, toml_file=path)()
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"not TOML: {error}") from error
    raise ValueError(f"a settings file ends in .yaml, .yml or .toml, not {path.suffix or 'nothing'!r}")
