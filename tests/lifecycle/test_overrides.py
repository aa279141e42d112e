"""Overrides: objects that replace services in one open runtime."""

from __future__ import annotations

import subprocess
import sys
import weakref
from pathlib import Path
from typing import Protocol

import pytest

from runtime_di import OverrideError, Phase, Runtime, RuntimeContainer, service
from tests.support.small_runtimes import (
    NOT_A_FOLDER,
    JobSettings,
    Log,
    Service,
    container_of,
    declare,
    needing,
    opener,
    reading,
    runtime_of,
)

settings = RuntimeContainer.settings


class Encoder(Protocol):
    def encode(self, text: str) -> list[int]: ...


class FakeEncoder:
    def encode(self, text: str) -> list[int]:
        return [len(text)]


class Shouting:
    def encode(self) -> list[int]:
        return []


def encoders(log: Log) -> type[Runtime]:
    """A runtime whose vocabulary is built from its tokenizer."""
    tokenizer = service(Phase.TOKENIZER, opener(log, "tokenizer"), settings.provided.writer)
    vocabulary = service(Phase.VOCABULARY, opener(log, "vocabulary"), tokenizer)
    return runtime_of({"tokenizer": tokenizer, "vocabulary": vocabulary}, {"tokenizer": Encoder}, JobSettings)


@pytest.mark.parametrize("by", ["name", "container attribute"])
def test_override_replaces_a_service(by: str) -> None:
    """Every dependant gets the override; the real factory is not called, and its section is not checked."""
    log: Log = []
    runtime_class, fake = encoders(log), FakeEncoder()
    key = "tokenizer" if by == "name" else runtime_class.plan().container.tokenizer
    job = JobSettings(writer={"folder": NOT_A_FOLDER})

    with runtime_class.open(job, overrides={key: fake}) as runtime:
        assert (runtime.tokenizer, runtime.container.tokenizer(), runtime.vocabulary.args) == (fake, fake, (fake,))

        assert runtime.built == ("tokenizer", "vocabulary")
    assert log == ["+vocabulary", "-vocabulary"]


def test_override_by_the_attribute_of_a_base_container_reaches_the_redeclaration() -> None:
    """A redeclared service is overridden by the base's declaration of it as well."""
    base = container_of(declare([], {"tokenizer": Phase.TOKENIZER}))
    own = container_of({"tokenizer": service(Phase.TOKENIZER, opener([], "own"))}, base)

    with runtime_of(own).open(overrides={base.providers["tokenizer"]: "fake"}) as runtime:
        assert runtime.tokenizer == "fake"


def test_wrong_overrides_are_reported_together() -> None:
    """Unknown names, wrong types and fakes that lack a method or take other calls are refused, nothing is built."""
    log: Log = []
    runtime_class = encoders(log)

    with pytest.raises(OverrideError) as lacking:
        runtime_class.open(overrides={"tokenizer": object(), "tokeniser": 1, RuntimeContainer.settings: JobSettings()})
    with pytest.raises(OverrideError, match=r"Shouting encode\(\) does not take the calls of \(text\)"):
        runtime_class.open(overrides={"tokenizer": Shouting()})

    assert str(lacking.value) == (
        "SmallRuntime cannot be opened with these overrides.\n"
        "  tokenizer: the override of type object lacks 'encode' of Encoder\n"
        f"    fix: pass an object that fits {Encoder}\n"
        "  tokeniser: is not a service of SmallRuntime\n"
        "    fix: override one of tokenizer, vocabulary\n"
        "  settings: is not a service of SmallRuntime\n"
        "    fix: override one of tokenizer, vocabulary"
    )
    assert log == []


def test_override_of_a_class_annotation_must_be_an_instance() -> None:
    """A plain class in the annotation is checked with isinstance, ``None`` only where it is annotated."""
    runtime_class = runtime_of(declare([], {"a": Phase.RUNTIME}), {"a": Path})

    with pytest.raises(OverrideError, match="the override of type NoneType is not an instance of Path"):
        runtime_class.open(overrides={"a": None})


UNIMPORTED = """
import sys
from runtime_di import OverrideError
from runtime_di.containers import TrainingRuntime

assert "torch" not in sys.modules
try:
    TrainingRuntime.open(overrides={sys.argv[1]: "cpu"})
except OverrideError as error:
    print(error)
"""


@pytest.mark.processes
@pytest.mark.parametrize(("name", "annotation"), [("device", "device"), ("store", "Store"), ("mesh", "DeviceMesh")])
def test_override_of_a_type_that_is_not_imported_is_refused(name: str, annotation: str) -> None:
    """A type of torch is checked even where nothing has imported torch yet."""
    printed = subprocess.run(
        [sys.executable, "-c", UNIMPORTED, name], capture_output=True, text=True, check=True
    ).stdout

    assert f"{name}: the override of type str is not an instance of {annotation}\n" in printed


def test_override_of_a_type_that_exists_nowhere_passes() -> None:
    """An annotation that cannot be resolved even by importing accepts every override."""
    runtime_class = runtime_of(declare([], {"a": Phase.RUNTIME}), {"a": "nowhere.Thing"})

    with runtime_class.open(overrides={"a": "fake"}) as runtime:
        assert runtime.a == "fake"


def test_two_overrides_of_one_service_are_refused() -> None:
    """A service cannot be overridden both by name and by container attribute."""
    runtime_class = encoders([])
    attribute = runtime_class.plan().container.tokenizer

    with pytest.raises(OverrideError, match=r"tokenizer: is overridden twice(.|\n)*fix: pass one override, by name"):
        runtime_class.open(overrides={"tokenizer": FakeEncoder(), attribute: FakeEncoder()})
    with pytest.raises(OverrideError, match="tokenizer: is overridden twice"):
        runtime_class.overriding({"tokenizer": 1}, tokenizer=2)


def test_overriding_a_disabled_service_enables_it_and_its_dependants() -> None:
    """A service that the settings switch off is enabled by an override."""
    retriever = service(Phase.RUNTIME, needing([], "r"), settings.provided.retriever)
    reader = service(Phase.RUNTIME, needing([], "reader"), retriever)
    runtime_class = runtime_of({"retriever": retriever, "reader": reader}, settings=JobSettings)

    with runtime_class.open(overrides={"retriever": "fake"}) as runtime:
        assert runtime.disabled == {}
        assert runtime.reader.args == ("fake",)


def test_start_skips_what_was_reachable_only_through_an_override() -> None:
    """Neither start() nor a read of the overridden service builds what only that service depends on."""
    log: Log = []
    phases = dict.fromkeys(("shared", "deep", "only", "faked", "user", "lone"), Phase.RUNTIME)
    edges = {"only": ["deep"], "faked": ["only", "shared"], "user": ["faked", "shared"]}
    runtime_class = runtime_of(declare(log, {**phases, "mesh": Phase.DISTRIBUTED}, edges))

    with runtime_class.open(overrides={"faked": 1}) as runtime:
        assert runtime.user.args[0] == 1
        assert runtime.built == ("shared", "faked", "user")
        runtime.start()
        assert runtime.built == ("shared", "faked", "user", "lone", "mesh")

        assert runtime.only.args == (runtime.deep,)


def test_capabilities_of_services_behind_an_override_are_not_checked() -> None:
    """A service that start() skips may need what this machine lacks."""
    writer = reading([], "writer")["writer"]
    faked = service(Phase.RUNTIME, opener([], "faked"), writer)
    job = JobSettings(writer={"folder": NOT_A_FOLDER})

    runtime_of({"writer": writer, "faked": faked}, settings=JobSettings).open(job, overrides={"faked": 1}).close()


def test_override_ends_with_its_scope() -> None:
    """The next opening builds the real services, dependants included, and the fake is released (B77, B79)."""
    log: Log = []
    runtime_class, fake = encoders(log), FakeEncoder()
    gone = weakref.ref(fake)

    with runtime_class.open(JobSettings(), overrides={"tokenizer": fake}) as runtime:
        runtime.start()
    del fake
    with runtime_class.open(JobSettings()) as again:
        real = again.vocabulary.args[0]

    assert gone() is None
    assert isinstance(real, Service)
