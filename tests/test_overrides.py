"""Overrides: objects that take the place of services for one opening."""

from __future__ import annotations

import subprocess
import sys
import weakref
from pathlib import Path
from typing import Protocol

import pytest

from declaring import (
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
from runtime_di import (
    OverrideError,
    Phase,
    Runtime,
    RuntimeContainer,
    service,
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
def test_override_takes_the_place_of_a_service(by: str) -> None:
    """The given object is what everybody gets; the real factory is not called, nor its section asked."""
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


def test_wrong_overrides_are_told_together() -> None:
    """Unknown names, wrong types and fakes that lack a method or take other calls are refused, nothing is built."""
    log: Log = []
    runtime_class = encoders(log)

    with pytest.raises(OverrideError) as lacking:
        runtime_class.open(overrides={"tokenizer": object(), "tokeniser": 1, RuntimeContainer.settings: JobSettings()})
    with pytest.raises(OverrideError, match=r"Shouting encode\(\) does not take the calls of \(text\)"):
        runtime_class.open(overrides={"tokenizer": Shouting()})

    assert str(lacking.value) == (
        "SmallRuntime cannot be opened with these overrides.\n"
        "  tokenizer: the given object lacks 'encode' of Encoder\n"
        f"    fix: give an object that fits {Encoder}\n"
        "  tokeniser: no service of SmallRuntime\n"
        "    fix: override one of tokenizer, vocabulary\n"
        "  settings: no service of SmallRuntime\n"
        "    fix: override one of tokenizer, vocabulary"
    )
    assert log == []


def test_override_of_a_class_annotation_must_be_an_instance() -> None:
    """A plain class in the annotation is checked with isinstance, ``None`` only where it is annotated."""
    runtime_class = runtime_of(declare([], {"a": Phase.RUNTIME}), {"a": Path})

    with pytest.raises(OverrideError, match="the given NoneType is no Path"):
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


@pytest.mark.parametrize(("name", "annotation"), [("device", "device"), ("store", "Store"), ("mesh", "DeviceMesh")])
def test_override_of_a_type_that_is_not_imported_is_refused(name: str, annotation: str) -> None:
    """A type of torch is checked even where nothing has imported torch yet."""
    told = subprocess.run([sys.executable, "-c", UNIMPORTED, name], capture_output=True, text=True, check=True).stdout

    assert f"{name}: the given str is no {annotation}\n" in told


def test_override_of_a_type_that_exists_nowhere_passes() -> None:
    """Of an annotation that cannot be resolved even by importing, nothing is said."""
    runtime_class = runtime_of(declare([], {"a": Phase.RUNTIME}), {"a": "nowhere.Thing"})

    with runtime_class.open(overrides={"a": "fake"}) as runtime:
        assert runtime.a == "fake"


def test_two_overrides_of_one_service_are_refused() -> None:
    """A service that is given by name and by container attribute is given once too often."""
    runtime_class = encoders([])
    attribute = runtime_class.plan().container.tokenizer

    with pytest.raises(OverrideError, match=r"tokenizer: is given twice(.|\n)*fix: give it by name alone"):
        runtime_class.open(overrides={"tokenizer": FakeEncoder(), attribute: FakeEncoder()})
    with pytest.raises(OverrideError, match="tokenizer: is given twice"):
        runtime_class.overriding({"tokenizer": 1}, tokenizer=2)


def test_overriding_a_disabled_service_enables_it_and_its_dependants() -> None:
    """A service that the settings switch off is on where it is given."""
    retriever = service(Phase.RUNTIME, needing([], "r"), settings.provided.retriever)
    reader = service(Phase.RUNTIME, needing([], "reader"), retriever)
    runtime_class = runtime_of({"retriever": retriever, "reader": reader}, settings=JobSettings)

    with runtime_class.open(overrides={"retriever": "fake"}) as runtime:
        assert runtime.disabled == {}
        assert runtime.reader.args == ("fake",)


def test_start_skips_what_was_reachable_only_through_an_override() -> None:
    """Neither a start nor an ask of the overridden service builds what only that service is built from."""
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


def test_capabilities_of_what_only_an_override_was_built_from_are_not_asked() -> None:
    """What start() skips may lack what it needs of the machine."""
    writer = reading([], "writer")["writer"]
    faked = service(Phase.RUNTIME, opener([], "faked"), writer)
    job = JobSettings(writer={"folder": NOT_A_FOLDER})

    runtime_of({"writer": writer, "faked": faked}, settings=JobSettings).open(job, overrides={"faked": 1}).close()


def test_override_ends_with_its_scope() -> None:
    """The next opening builds the real services, dependants included, and the fake is let go (B77, B79)."""
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
