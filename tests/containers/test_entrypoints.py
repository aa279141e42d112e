"""Every entrypoint: validation before any effect, one start, and equal services from equal settings."""

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
)
from runtime_di.cli.commands import shipped
from runtime_di.providers.checkpoint.format.snapshot import Snapshot, write_snapshot
from runtime_di.settings import fields


@dataclass(frozen=True)
class Entrypoint:
    """The differences between entrypoints.

    Attributes:
        tokenizer: whether it opens a tokenizer, which then determines the vocabulary.
        world: whether it joins a world.
        disabled: services that are disabled even with a checkpoint, apart from those that a caller provides.
        more: settings that its services need to be built.
    """

    runtime: type[Runtime]
    tokenizer: bool = True
    world: bool = True
    disabled: frozenset[str] = frozenset()
    more: Mapping[str, Any] = field(default_factory=dict)

    def settings(self, **values: Any) -> RuntimeSettings:
        return self.runtime.settings_class()(**values)


CALLER_PROVIDED = {"store", "embedding"}
ENTRYPOINTS = {
    "training": Entrypoint(containers.TrainingRuntime),
    "inference": Entrypoint(containers.InferenceRuntime),
    "rl": Entrypoint(containers.RLRuntime),
    "mimo": Entrypoint(containers.MimoRuntime, disabled=frozenset({"tokenizer"})),
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
    """A checkpoint with a snapshot alone, which is what settings and vocabulary read."""
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


# Before any effect


class ProcessState:
    """Files, processes, sockets, file descriptors, threads, variables and torch.distributed of this process."""

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
        return isinstance(other, ProcessState) and vars(self) == vars(other)

    __hash__ = object.__hash__


@every_entrypoint
@pytest.mark.parametrize("way", ["constructor", "unvalidated", "machine", "flags", "world"])
def test_refused_settings_leave_nothing_behind(
    entrypoint: Entrypoint,
    way: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Wrong settings, from any source, leave no file, process, socket, thread or variable."""
    monkeypatch.chdir(tmp_path)
    settings = entrypoint.runtime.settings_class()
    missing = {"load": tmp_path / "missing"}
    broken: dict[str, Any] = {"vocabulary": {"divisible_by": 0}, "checkpoint": missing}
    before = ProcessState(tmp_path)

    with pytest.raises((RuntimeDIError, SystemExit)) as caught:
        match way:
            case "constructor":
                settings(**broken)
            case "unvalidated":
                entrypoint.runtime.open(settings.model_construct(**broken))
            case "machine":
                entrypoint.runtime.open(settings(checkpoint=missing))
            case "flags":
                entrypoint.runtime.main(lambda runtime: runtime.start(), ["--vocabulary.divisible_by", "0"])
            case "world":
                settings(launch={"rank": 2, "world_size": 2})

    expected = {"machine": CapabilityError, "flags": SystemExit}.get(way, SettingsError)
    assert type(caught.value) is expected
    assert way != "flags" or "vocabulary.divisible_by = 0" in capsys.readouterr().err
    assert ProcessState(tmp_path) == before


# Start and close


@every_entrypoint
def test_one_start_builds_everything_once(
    entrypoint: Entrypoint, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening builds nothing; start() builds each service once and joins one world; closing ends threads and world."""
    monkeypatch.chdir(tmp_path)
    settings = entrypoint.settings(checkpoint={"load": checkpoint}, **entrypoint.more)
    before = ProcessState(tmp_path)
    with (
        mock.patch("torch.distributed.init_process_group", wraps=dist.init_process_group) as init_process_group,
        entrypoint.runtime.open(settings) as runtime,
    ):
        built = [runtime.built, runtime.start().built, runtime.start().built]
        disabled = {*runtime.disabled}

    order = runtime.plan().order
    assert disabled == entrypoint.disabled | (CALLER_PROVIDED & {*order})
    assert built == [(), *[tuple(name for name in order if name not in disabled)] * 2]
    assert init_process_group.call_count == entrypoint.world
    assert (dist.is_initialized(), ProcessState(tmp_path).threads) == (False, before.threads)


@every_entrypoint
def test_sources_give_the_same_services(
    entrypoint: Entrypoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal values from flags, environment, file and constructor give equal settings and equal services."""
    settings = entrypoint.runtime.settings_class()
    file = tmp_path / "job.toml"
    file.write_text("[vocabulary]\nsize = 500\ndivisible_by = 64\n[log]\nlevel = 'ERROR'\n")
    values: dict[str, Any] = {"vocabulary": {"size": 500, "divisible_by": 64}, "log": {"level": "ERROR"}}
    flags = ["--vocabulary.size", "500", "--vocabulary.divisible_by", "64", "--log.level", "ERROR"]
    loaded = [settings(**values), settings.load(flags), settings.load(["--config", str(file)])]
    with monkeypatch.context() as environment:
        for name, value in zip(flags[::2], flags[1::2], strict=True):
            environment.setenv("RUNTIME_DI_" + name.removeprefix("--").upper().replace(".", "__"), value)
        loaded.append(settings.load([]))

    opened = [services(entrypoint.runtime, each) for each in loaded]

    assert all(each == opened[0] for each in opened)
    assert "512 embedding rows" in opened[0]["vocabulary"]
    assert len({each.model_copy(update={"config": None}).fingerprint() for each in loaded}) == 1


def services(runtime: type[Runtime], settings: RuntimeSettings) -> Mapping[str, str]:
    """The vocabulary as text, and the class name of every other service."""
    with runtime.open(settings) as opened:
        opened.start()
        return {
            name: str(value) if name == "vocabulary" else type(value).__qualname__
            for name in opened.built
            for value in [getattr(opened, name)]
        }


@pytest.mark.parametrize("second", [name for name, entrypoint in ENTRYPOINTS.items() if entrypoint.world])
def test_one_world_at_a_time(second: str) -> None:
    """While one runtime has collective services, another cannot build its own; after a close it can."""
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
"""Sources of a size, and the resulting size, padded size and origin."""


@pytest.mark.parametrize(
    ("entrypoint", "sources", "expected"),
    [
        pytest.param(entrypoint, sources, expected, id=f"{name}-{'+'.join(sorted(sources))}")
        for name, entrypoint in ENTRYPOINTS.items()
        for sources, expected in SIZES
        if entrypoint.tokenizer or "tokenizer" not in sources
    ],
)
def test_vocabulary_and_its_origin(
    entrypoint: Entrypoint, sources: set[str], expected: tuple[int, int, str], checkpoint: Path
) -> None:
    """Precedence: explicit padded size, checkpoint, tokenizer, explicit size; the result names its origin."""
    values: dict[str, Any] = {"vocabulary": {}, "checkpoint": {"load": checkpoint} if "checkpoint" in sources else {}}
    if entrypoint.tokenizer:
        values["tokenizer"] = BYTES if "tokenizer" in sources else None
    values["vocabulary"] |= {"size": 400} if "size" in sources else {}
    values["vocabulary"] |= {"padded_size": 640} if "padded_size" in sources else {}

    with entrypoint.runtime.open(entrypoint.settings(**values)) as runtime:
        vocabulary: Any = getattr(runtime, "vocabulary")  # noqa: B009 - the base has no such attribute

    origin = f"checkpoint {checkpoint}" if expected[2] == "checkpoint" else expected[2]
    assert (vocabulary.size, vocabulary.padded_size, vocabulary.origin) == (*expected[:2], origin)


@pytest.mark.parametrize("name", [name for name, entrypoint in ENTRYPOINTS.items() if entrypoint.tokenizer])
def test_larger_tokenizer_is_refused(name: str, checkpoint: Path) -> None:
    """A tokenizer with more tokens than the checkpoint's vocabulary is an error that names both."""
    settings = ENTRYPOINTS[name].settings(tokenizer={"kind": "null", "size": 301}, checkpoint={"load": checkpoint})

    with ENTRYPOINTS[name].runtime.open(settings) as runtime, pytest.raises(VocabularyError) as caught:
        runtime.start()

    assert f"checkpoint {checkpoint}: room for 300 tokens, while the tokenizer has 301" in str(caught.value)


@pytest.mark.parametrize("name", [name for name, entrypoint in ENTRYPOINTS.items() if entrypoint.tokenizer])
def test_disabled_tokenizer_is_an_error_only_when_used(name: str) -> None:
    """With ``tokenizer: null`` everything starts; asking for the tokenizer or the vocabulary is an error."""
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
    """With ``checkpoint.load_settings``, portable settings come from the checkpoint; every other source is stronger."""
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
def test_settings_of_a_run_never_come_from_a_checkpoint(entrypoint: Entrypoint, checkpoint: Path) -> None:
    """Log, launch, parallel sizes, folders and explicit sizes stay the current run's; unknown sections are ignored."""
    settings = entrypoint.runtime.settings_class()
    load = ["--checkpoint.load", str(checkpoint)]

    plain, taken = settings.load(load), settings.load([*load, "--checkpoint.load_settings"])

    own = ("log", "launch", "parallel", "checkpoint.folder", "checkpoint.load", "vocabulary.size")
    known = [path for path in own if fields.knows(settings, path)]
    assert {"log", "launch", "checkpoint.load", "vocabulary.size"} <= {*known}
    for path in known:
        assert taken.explain(path).value == plain.explain(path).value


@pytest.mark.parametrize("name", [name for name in ENTRYPOINTS if name != "inference"])
def test_optional_package_is_required_where_it_is_used(name: str, checkpoint: Path) -> None:
    """B20: settings that need a package are valid where no service uses it; only the cache requires it."""
    flags = ["--checkpoint.load", str(checkpoint), "--checkpoint.load_settings"]
    runtime = ENTRYPOINTS[name].runtime

    runtime.open(runtime.settings_class().load(flags)).close()
    with pytest.raises(CapabilityError, match="pip install torch_memory_saver"):
        containers.InferenceRuntime.open(containers.InferenceSettings.load(flags))
