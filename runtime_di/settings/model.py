"""The settings of an entrypoint: one frozen, validated object that records the source of each value."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, PrivateAttr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from runtime_di.errors import Problem, SettingsError
from runtime_di.settings import fields, sources
from runtime_di.settings.explanation import Explanation, format_value, problem_of
from runtime_di.settings.frozen import FrozenModel
from runtime_di.settings.help import render_help
from runtime_di.settings.launch import LaunchSettings
from runtime_di.settings.layers import ENV_PREFIX, Layer, merge_layers, without
from runtime_di.settings.marks import Mark

_LAYERS = "_layers"


class RuntimeSettings(BaseSettings):
    """Base of an entrypoint's settings.

    The constructor takes values and reads the launcher's variables and no other source; `load` reads every source.
    Both raise `SettingsError` with all problems, each with its dotted path, value, source and rule.
    """

    model_config = SettingsConfigDict(
        **{**FrozenModel.model_config, "title": None},  # type: ignore[typeddict-item]
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        env_parse_none_str="null",
        cli_avoid_json=True,
        cli_exit_on_error=False,
        cli_implicit_flags=True,
        cli_parse_none_str="null",
    )

    config: Annotated[Path | None, Mark.PER_RANK] = None
    """YAML or TOML file with settings; weaker than flags and environment."""
    launch: Annotated[LaunchSettings, Mark.NOT_PORTABLE] = LaunchSettings()
    """Rank and world of this process, from the launcher."""

    _sources: tuple[Layer, ...] = PrivateAttr(default=())

    def __init__(self, **values: Any) -> None:
        layers: tuple[Layer, ...] | None = values.pop(_LAYERS, None)
        if layers is None:
            layers = (Layer("constructor", values), sources.launch_layer(), sources.default_layer(type(self)))
        problems = list(sources.launch_problems(layers))
        layers, merged = merge_layers(layers, type(self))
        try:
            BaseModel.__init__(self, **merged)
        except ValidationError as error:
            invalid = [problem_of(type(self), layers, detail) for detail in error.errors()]
            problems += invalid + list(self._rules_of_valid_fields(layers, merged, invalid))
        else:
            self._sources = layers
            problems += self._broken_rules()
        if problems:
            count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
            raise SettingsError(f"{type(self).__name__} cannot be used: {count}.", problems) from None

    @classmethod
    def load(cls, argv: Sequence[str] | None = None) -> Self:
        """Read every source: flags over environment over file over checkpoint over defaults.

        Args:
            argv: the flags, without the program's name; ``sys.argv[1:]`` by default.

        Raises:
            SettingsError: a source cannot be read, or the settings are invalid.
            SystemExit: ``--help`` was requested and printed.
        """
        argv = sys.argv[1:] if argv is None else argv
        if "--help" in argv or "-h" in argv:
            print(render_help(cls))  # noqa: T201 - help is for the terminal
            raise SystemExit(0)
        layers = [sources.command_line_layer(cls, argv), sources.environment_layer(cls, _known_classes())]
        config = next((layer for layer in layers if layer.has("config")), None)
        if config is not None and config.get("config") is not None:
            layers.append(sources.file_layer(cls, Path(config.get("config")), config.origin("config")))
        layers += [*cls.checkpoint_layers(layers), sources.launch_layer(), sources.default_layer(cls)]
        return cls(**{_LAYERS: tuple(layers)})

    @classmethod
    def checkpoint_layers(cls, stronger: Sequence[Layer]) -> Iterable[Layer]:
        """The layer of the checkpoint named by the ``stronger`` layers; entrypoints with checkpoints override this."""
        return ()

    def rules(self) -> Iterable[Problem]:
        """Rules between values of several sections, without side effects; run after every field is valid by itself.

        ``where`` of a problem is a dotted path; the caller fills in its value and source.
        """
        return ()

    def revalidated(self) -> Self:
        """Return these settings, validated again; no source is read again.

        Raises:
            SettingsError: a value is invalid, or missing.
        """
        layers = self.__pydantic_private__ and self._sources
        values = {name: value for name, value in self.__dict__.items() if name in type(self).model_fields}
        missing = [name for name in type(self).model_fields if name not in values]
        if missing:
            problems = [Problem(name, "missing: the settings were created without validation") for name in missing]
            raise SettingsError(f"{type(self).__name__} cannot be used.", problems)
        fresh = type(self)(**{_LAYERS: (Layer("constructor", values), Layer("launcher", {}))})
        if dict(fresh) == values:
            return self
        fresh._sources = layers or fresh._sources
        return fresh

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a validated copy with ``update`` as the strongest source."""
        strongest = Layer("constructor", {**dict(self), **(update or {})} if not self._sources else update or {})
        return type(self)(**{_LAYERS: (strongest, *self._sources, Layer("launcher", {}))})

    def explain(self, path: str) -> Explanation:
        """Explain a setting: its value, the source that set it, and the values it overrode.

        Raises:
            SettingsError: no setting has this path.
        """
        if not fields.knows(type(self), path):
            near = fields.closest(type(self), path)
            fix = f"did you mean {near}?" if near else None
            raise SettingsError(f"{type(self).__name__} has no such setting.", [Problem(path, "unknown", fix=fix)])
        value: Any = self
        for part in path.split("."):
            value = value[part] if isinstance(value, Mapping) else getattr(value, part, None)
        setting = [layer for layer in self._sources if layer.has(path)]
        return Explanation(
            path,
            format_value(type(self), path, value),
            setting[0].origin(path) if setting else "default",
            tuple((layer.origin(path), format_value(type(self), path, layer.get(path))) for layer in setting[1:]),
        )

    def agreed(self) -> dict[str, Any]:
        """Path to value of every setting that must be equal on all ranks: neither per-rank nor secret."""
        shared = [leaf for leaf in fields.leaves(self) if Mark.PER_RANK not in leaf.marks and not leaf.secret]
        return {leaf.path: leaf.value for leaf in shared}

    def fingerprint(self) -> str:
        """The SHA-256 digest of `agreed`, equal on all ranks, machines and runs with equal settings."""
        return hashlib.sha256(json.dumps(self.agreed(), sort_keys=True).encode()).hexdigest()

    @property
    def portable(self) -> dict[str, Any]:
        """A JSON copy of the settings that a checkpoint passes to another run, nested by section."""
        kept = [leaf for leaf in fields.leaves(self) if not leaf.marks and not leaf.secret]
        return fields.nest({leaf.path: leaf.value for leaf in kept})

    @property
    def masked(self) -> dict[str, Any]:
        """A JSON copy of all settings, nested by section, with secrets masked."""
        return fields.nest({leaf.path: leaf.value for leaf in fields.leaves(self)})

    def _broken_rules(self) -> Iterator[Problem]:
        for problem in (*self.launch.problems(), *self.rules()):
            if problem.value is None and fields.find(type(self), problem.where):
                explanation = self.explain(problem.where)
                yield replace(problem, value=explanation.value, source=explanation.source)
            else:
                yield problem

    def _rules_of_valid_fields(
        self, layers: tuple[Layer, ...], merged: dict[str, Any], invalid: Sequence[Problem]
    ) -> Iterator[Problem]:
        """The broken rules between valid fields, checked with invalid fields at their defaults."""
        wrong = [problem.where for problem in invalid]
        try:
            rest = type(self).model_construct()
            BaseModel.__init__(rest, **without(merged, wrong))
        except ValidationError:
            return
        rest._sources = layers
        for problem in rest._broken_rules():
            if not any(_overlaps(path, other) for path in (problem.where, *problem.involves) for other in wrong):
                yield problem


def _known_classes() -> Iterator[type[RuntimeSettings]]:
    pending: list[type[RuntimeSettings]] = [RuntimeSettings]
    while pending:
        settings = pending.pop()
        yield settings
        pending += settings.__subclasses__()


def _overlaps(path: str, other: str) -> bool:
    return f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.")
