"""What holds for every entrypoint: one boundary, nothing before validation, and one way from settings to services."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch.distributed as dist

from runtime_di import (
    CapabilityError,
    Runtime,
    RuntimeDIError,
    RuntimeSettings,
    ServiceDisabledError,
    ServiceError,
    SettingsError,
    VocabularyError,
    containers,
    fields,
)
from runtime_di.cli import shipped
from runtime_di.providers.snapshot import Snapshot, write_snapshot


@dataclass(frozen=True)
class Entrypoint:
    """What differs between entrypoints.

    Attributes:
        tokenizer: whether it opens a tokenizer, so that its section decides about the vocabulary.
        world: whether it joins a world.
        off: services that are off even with a checkpoint, beside those that a caller may give.
        more: settings that all its services need.
    """

    runtime: type[Runtime]
    tokenizer: bool = True
    world: bool = True
    off: frozenset[str] = frozenset()
    more: Mapping[str, Any] = field(default_factory=dict)

    def settings(self, **values: Any) -> RuntimeSettings:
        return self.runtime.settings_class()(**values)


GIVEN = {"store", "embedding"}
ENTRYPOINTS = {
    "training": Entrypoint(containers.TrainingRuntime),
    "inference": Entrypoint(containers.InferenceRuntime),
    "rl": Entrypoint(containers.RLRuntime),
    "mimo": Entrypoint(containers.MimoRuntime, off=frozenset({"tokenizer"})),
    "converter": Entrypoint(
        containers.ConverterRuntime, tokenizer=False, world=False, more={"conversion": {"folder": "converted"}}
    ),
}
every_entrypoint = pytest.mark.parametrize("entrypoint", ENTRYPOINTS.values(), ids=ENTRYPOINTS)
BYTES = {"kind": "byte"}


def test_table_is_complete() -> None:
    """Every entrypoint that the package ships is tested here."""
    assert {name: entrypoint.runtime for name, entrypoint in ENTRYPOINTS.items()} == shipped()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint, as far as settings and vocabulary read it."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    settings = {
        "vocabulary": {"divisible_by": 64, "size": 5},
        "log": {"level": "DEBUG"},
        "launch": {"rank": 1, "world_size": 2},
        "parallel": {"tensor": 2},
        "checkpoint": {"folder": "elsewhere", "load": "elsewhere"},
        "cache": {"offload": True},
        "retriever": {"depth": 3},
    }
    vocabulary = {"size": 300, "padded_size": 320, "tensor_parallel": 1, "dummy_rows": 20, "origin": "tokenizer"}
    write_snapshot(folder, Snapshot(step=1, settings=settings, vocabulary=vocabulary))
    return folder


# Before anything


class Traces:
    """What a start could leave behind."""

    def __init__(self, folder: Path) -> None:
        process = psutil.Process()
        self.files = sorted(str(path) for path in folder.rglob("*"))
        self.processes = [child.pid for child in process.children(recursive=True)]
        self.sockets = [str(connection) for connection in process.net_connections()]
        self.descriptors = process.num_fds()
        self.threads = sorted(thread.name for thread in threading.enumerate())
        self.environment = dict(os.environ)
        self.initialised = dist.is_initialized()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Traces) and vars(self) == vars(other)

    __hash__ = object.__hash__


@every_entrypoint
@pytest.mark.parametrize("way", ["constructor", "unvalidated", "machine", "flags", "world"])
def test_refused_settings_leave_nothing(
    entrypoint: Entrypoint,
    way: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Settings that fail, in whatever way they are given, leave no file, process, socket, thread or variable."""
    monkeypatch.chdir(tmp_path)
    settings = entrypoint.runtime.settings_class()
    lost = {"load": tmp_path / "lost"}
    broken: dict[str, Any] = {"vocabulary": {"divisible_by": 0}, "checkpoint": lost}
    before = Traces(tmp_path)

    with pytest.raises((RuntimeDIError, SystemExit)) as caught:
        match way:
            case "constructor":
                settings(**broken)
            case "unvalidated":
                entrypoint.runtime.open(settings.model_construct(**broken))
            case "machine":
                entrypoint.runtime.open(settings(checkpoint=lost))
            case "flags":
                entrypoint.runtime.main(lambda runtime: runtime.start(), ["--vocabulary.divisible_by", "0"])
            case "world":
                settings(launch={"rank": 2, "world_size": 2})

    told = {"machine": CapabilityError, "flags": SystemExit}.get(way, SettingsError)
    assert type(caught.value) is told
    assert way != "flags" or "vocabulary.divisible_by = 0" in capsys.readouterr().err
    assert Traces(tmp_path) == before


# One boundary


@every_entrypoint
def test_one_boundary(
    entrypoint: Entrypoint, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening builds nothing; one start builds every service once and joins one world; closing ends all of it."""
    monkeypatch.chdir(tmp_path)
    settings = entrypoint.settings(checkpoint={"load": checkpoint}, **entrypoint.more)
    before = Traces(tmp_path)
    with (
        mock.patch("torch.distributed.init_process_group", wraps=dist.init_process_group) as joins,
        entrypoint.runtime.open(settings) as runtime,
    ):
        built = [runtime.built, runtime.start().built, runtime.start().built]
        off = {*runtime.disabled}

    order = runtime.plan().order
    assert off == entrypoint.off | (GIVEN & {*order})
    assert built == [(), *[tuple(name for name in order if name not in off)] * 2]
    assert joins.call_count == entrypoint.world
    assert (dist.is_initialized(), Traces(tmp_path).threads) == (False, before.threads)


@every_entrypoint
def test_sources_give_the_same_services(
    entrypoint: Entrypoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags, environment, file and constructor that say the same give equal settings and equal services."""
    settings = entrypoint.runtime.settings_class()
    file = tmp_path / "job.toml"
    file.write_text("[vocabulary]\nsize = 500\ndivisible_by = 64\n[log]\nlevel = 'ERROR'\n")
    values: dict[str, Any] = {"vocabulary": {"size": 500, "divisible_by": 64}, "log": {"level": "ERROR"}}
    flags = ["--vocabulary.size", "500", "--vocabulary.divisible_by", "64", "--log.level", "ERROR"]
    given = [settings(**values), settings.load(flags), settings.load(["--config", str(file)])]
    with monkeypatch.context() as environment:
        for name, value in zip(flags[::2], flags[1::2], strict=True):
            environment.setenv("RUNTIME_DI_" + name.removeprefix("--").upper().replace(".", "__"), value)
        given.append(settings.load([]))

    opened = [services(entrypoint.runtime, each) for each in given]

    assert all(each == opened[0] for each in opened)
    assert "512 embedding rows" in opened[0]["vocabulary"]
    assert len({each.model_copy(update={"config": None}).fingerprint() for each in given}) == 1


def services(runtime: type[Runtime], settings: RuntimeSettings) -> Mapping[str, str]:
    """Every service in words, without the addresses of objects."""
    with runtime.open(settings) as opened:
        opened.start()
        return {
            name: str(value) if name == "vocabulary" else type(value).__qualname__
            for name in opened.built
            for value in [getattr(opened, name)]
        }


@pytest.mark.parametrize("second", [name for name, entrypoint in ENTRYPOINTS.items() if entrypoint.world])
def test_one_world_at_a_time(second: str) -> None:
    """While one runtime has collective services, another is refused them, and gets them once that is closed."""
    entrypoint = ENTRYPOINTS[second]
    with containers.TrainingRuntime.open() as first, entrypoint.runtime.open(entrypoint.settings()) as other:
        first.start()

        with pytest.raises(ServiceError, match="one process has one world at a time"):
            other.start()
        first.close()

        assert "process_groups" in other.start().built


# Tokenizer and vocabulary


SIZES = [
    ({"tokenizer"}, (258, 384, "tokenizer")),
    ({"size"}, (400, 512, "vocabulary.size")),
    ({"tokenizer", "size"}, (400, 512, "vocabulary.size")),
    ({"checkpoint"}, (300, 320, "checkpoint")),
    ({"tokenizer", "size", "checkpoint"}, (300, 320, "checkpoint")),
    ({"tokenizer", "checkpoint", "padded_size"}, (300, 640, "vocabulary.padded_size")),
    ({"tokenizer", "padded_size"}, (258, 640, "vocabulary.padded_size")),
]
"""What is stated, and the size, the rows and the origin that follow."""


@pytest.mark.parametrize(
    ("entrypoint", "stated", "told"),
    [
        pytest.param(entrypoint, stated, told, id=f"{name}-{'+'.join(sorted(stated))}")
        for name, entrypoint in ENTRYPOINTS.items()
        for stated, told in SIZES
        if entrypoint.tokenizer or "tokenizer" not in stated
    ],
)
def test_vocabulary_and_its_origin(
    entrypoint: Entrypoint, stated: set[str], told: tuple[int, int, str], checkpoint: Path
) -> None:
    """Explicit rows win, then the checkpoint's, then the tokenizer's, then an explicit size, and the origin is kept."""
    values: dict[str, Any] = {"vocabulary": {}, "checkpoint": {"load": checkpoint} if "checkpoint" in stated else {}}
    if entrypoint.tokenizer:
        values["tokenizer"] = BYTES if "tokenizer" in stated else None
    values["vocabulary"] |= {"size": 400} if "size" in stated else {}
    values["vocabulary"] |= {"padded_size": 640} if "padded_size" in stated else {}

    with entrypoint.runtime.open(entrypoint.settings(**values)) as runtime:
        vocabulary: Any = getattr(runtime, "vocabulary")  # noqa: B009 - the base has no such attribute

    origin = f"checkpoint {checkpoint}" if told[2] == "checkpoint" else told[2]
    assert (vocabulary.size, vocabulary.padded_size, vocabulary.origin) == (*told[:2], origin)


@pytest.mark.parametrize("name", [name for name, entrypoint in ENTRYPOINTS.items() if entrypoint.tokenizer])
def test_larger_tokenizer_is_refused(name: str, checkpoint: Path) -> None:
    """A tokenizer with more tokens than the checkpoint is an error that names both."""
    settings = ENTRYPOINTS[name].settings(tokenizer={"kind": "null", "size": 301}, checkpoint={"load": checkpoint})

    with ENTRYPOINTS[name].runtime.open(settings) as runtime, pytest.raises(VocabularyError) as caught:
        runtime.start()

    assert f"checkpoint {checkpoint}: room for 300 tokens, while the tokenizer has 301" in str(caught.value)


@pytest.mark.parametrize("name", [name for name, entrypoint in ENTRYPOINTS.items() if entrypoint.tokenizer])
def test_suppressed_tokenizer_is_harmless(name: str) -> None:
    """With ``tokenizer: null`` everything starts; only asking for it, or for what it decides, is an error."""
    settings = ENTRYPOINTS[name].settings(tokenizer=None)

    with ENTRYPOINTS[name].runtime.open(settings) as runtime:
        runtime.start()

        assert {"tokenizer", "vocabulary"} <= {*runtime.disabled}
        for service, fix in {"tokenizer": "set 'tokenizer'", "vocabulary": "set tokenizer, vocabulary.size"}.items():
            with pytest.raises(ServiceDisabledError, match=fix):
                getattr(runtime, service)


# Settings from a checkpoint


@every_entrypoint
def test_checkpoint_settings_are_the_weakest(
    entrypoint: Entrypoint, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Portable settings come from the checkpoint where it is asked to give them, and anything else is stronger."""
    settings, load = entrypoint.runtime.settings_class(), ["--checkpoint.load", str(checkpoint)]

    without = settings.load(load)
    taken = settings.load([*load, "--checkpoint.load_settings"])
    monkeypatch.setenv("RUNTIME_DI_VOCABULARY__DIVISIBLE_BY", "32")
    stronger = settings.load([*load, "--checkpoint.load_settings"])

    path = "vocabulary.divisible_by"
    assert str(without.explain(path)) == f"{path} = 128 (from default)"
    assert str(taken.explain(path)) == f"{path} = 64 (from checkpoint {checkpoint})"
    assert str(stronger.explain(path)) == (
        f"{path} = 32 (from environment RUNTIME_DI_VOCABULARY__DIVISIBLE_BY)\n"
        f"  overrode 64 from checkpoint {checkpoint}"
    )


@every_entrypoint
def test_this_runs_own_settings_never_come_from_a_checkpoint(entrypoint: Entrypoint, checkpoint: Path) -> None:
    """Log, launch, parallel sizes, folders and explicit sizes are the current run's; unknown sections are left."""
    settings = entrypoint.runtime.settings_class()
    load = ["--checkpoint.load", str(checkpoint)]

    plain, taken = settings.load(load), settings.load([*load, "--checkpoint.load_settings"])

    own = ("log", "launch", "parallel", "checkpoint.folder", "checkpoint.load", "vocabulary.size")
    known = [path for path in own if fields.knows(settings, path)]
    assert {"log", "launch", "checkpoint.load", "vocabulary.size"} <= {*known}
    for path in known:
        assert taken.explain(path).value == plain.explain(path).value


@pytest.mark.parametrize("name", [name for name in ENTRYPOINTS if name != "inference"])
def test_optional_package_is_asked_where_it_is_used(name: str, checkpoint: Path) -> None:
    """B20: settings of a run that needs a package start wherever no service uses it, and only the cache asks for it."""
    flags = ["--checkpoint.load", str(checkpoint), "--checkpoint.load_settings"]
    runtime = ENTRYPOINTS[name].runtime

    runtime.open(runtime.settings_class().load(flags)).close()
    with pytest.raises(CapabilityError, match="pip install torch_memory_saver"):
        containers.InferenceRuntime.open(containers.InferenceSettings.load(flags))
