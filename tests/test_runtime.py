"""Opening a runtime: the checks before the first build, and the containers it accepts."""

from __future__ import annotations

import threading
import types
from pathlib import Path
from typing import Any

import pytest
from dependency_injector import providers

from runtime_di import (
    CapabilityError,
    ClosedError,
    Phase,
    PlanError,
    RuntimeContainer,
    RuntimeSettings,
    SettingsError,
    service,
)
from tests.support.small_runtimes import (
    NOT_A_FOLDER,
    FolderSettings,
    JobSettings,
    Log,
    container_of,
    declare,
    needing,
    opener,
    reading,
    runtime_of,
)

settings = RuntimeContainer.settings


class NeedsSize(RuntimeSettings):
    data_parallel_size: int


def test_errors_are_reported_kind_by_kind_and_nothing_is_built() -> None:
    """Settings come first, then the plan, then what the machine lacks; each stops the opening (B22)."""
    log: Log = []
    wrong = JobSettings.model_construct(**{**dict(JobSettings(writer={"folder": NOT_A_FOLDER})), "launch": 3})
    lacking = JobSettings(writer={"folder": NOT_A_FOLDER}, timers={"folder": NOT_A_FOLDER})
    broken = runtime_of({**reading(log, "writer"), "a": service(Phase.RNG, lambda b: b)}, settings=JobSettings)
    sound = runtime_of(reading(log, "writer", "timers"), settings=JobSettings)

    with pytest.raises(SettingsError, match="launch"):
        broken.open(wrong)
    with pytest.raises(PlanError):
        broken.open(lacking)
    with pytest.raises(CapabilityError) as caught:
        sound.open(lacking)

    assert [problem.where for problem in caught.value.problems] == ["writer.folder", "timers.folder"]
    assert log == []


def test_settings_created_without_validation_are_refused() -> None:
    """model_construct with an invalid or a missing value cannot be opened (B34)."""
    runtime_class = runtime_of({}, settings=JobSettings)
    section = FolderSettings.model_construct(depth=-1)

    with pytest.raises(SettingsError, match=r"writer.depth = -1 .*greater than 0"):
        runtime_class.open(JobSettings.model_construct(**{**dict(JobSettings()), "writer": section}))
    with pytest.raises(SettingsError, match="data_parallel_size: missing"):
        runtime_of({}, settings=NeedsSize).open(NeedsSize.model_construct())
    with pytest.raises(SettingsError, match="cannot open with a dict"):
        runtime_class.open({"writer": {"depth": 1}})


def test_settings_of_another_class_are_refused() -> None:
    """The settings must be an instance of the class that the Runtime annotates, or of a subclass."""

    class MoreSettings(JobSettings):
        more: int = 1

    runtime_class = runtime_of({}, settings=JobSettings)

    with pytest.raises(SettingsError) as caught:
        runtime_class.open(RuntimeSettings())
    with runtime_class.open(MoreSettings()) as runtime:
        assert runtime.settings.more == 1

    assert str(caught.value) == (
        "SmallRuntime cannot open with a RuntimeSettings.\n"
        "  fix: pass a JobSettings, from JobSettings.load() or JobSettings(...)"
    )


def test_opening_without_settings_takes_the_defaults() -> None:
    """open() alone is a world of one with the defaults of the annotated class."""
    with runtime_of({}, settings=JobSettings).open() as runtime:
        assert type(runtime.settings) is JobSettings


def test_capabilities_are_checked_only_for_sections_that_enabled_services_read(tmp_path: Path) -> None:
    """A section that no service or only a disabled one reads may need what this machine lacks (B2, B20)."""
    lacking = {"folder": NOT_A_FOLDER}
    job = JobSettings(writer={"folder": tmp_path / "new"}, timers=lacking)
    off = service(Phase.RUNTIME, needing([], "off"), settings.provided.retriever, settings.provided.timers)

    with runtime_of({**reading([], "writer"), "off": off}, settings=JobSettings).open(job) as runtime:
        runtime.start()

        assert (runtime.built, list(runtime.disabled)) == (("writer",), ["off"])
    assert list(tmp_path.iterdir()) == []


def test_capability_is_checked_for_a_section_of_which_one_field_is_read() -> None:
    """A path to a field checks its section; the whole settings check every section."""
    job = JobSettings(writer={"folder": NOT_A_FOLDER})

    for path in (settings.provided.writer.depth, settings):
        runtime_class = runtime_of({"a": service(Phase.RUNTIME, opener([], "a"), path)}, settings=JobSettings)
        with pytest.raises(
            CapabilityError, match=r"writer.folder = .*below \(from constructor\): cannot create the folder"
        ):
            runtime_class.open(job)


def test_opening_does_not_compute_properties_of_the_settings() -> None:
    """A property is computed only for the factory that reads it, and disables nothing."""
    reads: Log = []

    class Computing(RuntimeSettings):
        @property
        def size(self) -> FolderSettings | None:
            reads.append("read")
            return None

    def open_model(size: FolderSettings) -> object:
        return size

    runtime_class = runtime_of({"a": service(Phase.RUNTIME, open_model, settings.provided.size)}, settings=Computing)

    with runtime_class.open() as runtime:
        assert reads == []
        assert runtime.a is None


def test_runtime_is_not_created_by_calling_it() -> None:
    """Only open() creates a runtime."""
    with pytest.raises(TypeError, match=r"use SmallRuntime.open\(settings\)"):
        runtime_of({})()


def test_redeclared_service_is_what_inherited_dependants_get() -> None:
    """A subclass that redeclares the tokenizer changes what the inherited vocabulary is built from."""
    log: Log = []
    phases = {"tokenizer": Phase.TOKENIZER, "vocabulary": Phase.VOCABULARY}
    base = container_of(declare(log, phases, {"vocabulary": ["tokenizer"]}))
    own = container_of({"tokenizer": service(Phase.TOKENIZER, opener(log, "own"))}, base)

    with runtime_of(own).open() as runtime, runtime_of(base).open() as plain:
        assert runtime.vocabulary.args == (runtime.tokenizer,)
        assert (runtime.tokenizer.name, plain.vocabulary.args[0].name) == ("own", "tokenizer")


def test_subclass_of_a_runtime_adds_a_service_and_settings() -> None:
    """A user's container, settings and runtime extend the shipped ones."""

    class MoreSettings(JobSettings):
        index: FolderSettings = FolderSettings(depth=7)

    base = container_of(declare([], {"tokenizer": Phase.TOKENIZER}))
    more = container_of(
        {"index": service(Phase.RUNTIME, opener([], "i"), settings.provided.index, base.providers["tokenizer"])}, base
    )
    parent = runtime_of(base, settings=JobSettings)
    child = types.new_class(
        "Child",
        (parent,),
        {"container": more},
        lambda body: body.update(__annotations__={"settings": MoreSettings, "index": Any}),
    )

    with child.open() as runtime:
        assert (runtime.index.args[0].depth, runtime.index.args[1]) == (7, runtime.tokenizer)
    with parent.open() as runtime:
        assert not hasattr(type(runtime), "index")


def test_plain_factories_beside_services_use_this_openings_services() -> None:
    """A Factory uses the services and settings of its runtime on every call; plain arguments keep their identity."""
    lock = threading.Lock()
    tokenizer = service(Phase.TOKENIZER, opener([], "t"))
    batch = providers.Factory(dict, lock=lock, tokenizer=tokenizer, rank=settings.provided.launch.rank)
    holder = providers.Object(lock)
    runtime_class = runtime_of({"tokenizer": tokenizer, "batch": batch, "holder": holder})

    with runtime_class.open() as runtime, runtime_class.open() as other:
        first, again, others = runtime.container.batch(), runtime.container.batch(), other.container.batch()

        assert first == {"lock": lock, "tokenizer": runtime.tokenizer, "rank": 0}
        assert runtime.container.holder() is lock
        assert first is not again
        assert others["tokenizer"] is other.tokenizer is not runtime.tokenizer
    with pytest.raises(ClosedError):
        runtime.container.batch()


def test_warm_read_is_a_plain_instance_attribute() -> None:
    """After the first read the value is stored on the instance, and no ``__getattr__`` slows its reads."""
    with runtime_of(declare([], {"timers": Phase.RUNTIME})).open() as runtime:
        first = runtime.timers
        assert vars(runtime)["timers"] is first
        assert runtime.timers is first
        assert not hasattr(type(runtime), "__getattr__")


def test_reading_a_service_on_the_class_builds_nothing() -> None:
    """A service can be read on the class, which builds nothing."""
    log: Log = []
    runtime_class = runtime_of(declare(log, {"timers": Phase.RUNTIME}))

    runtime_class.timers

    assert log == []


def test_each_service_is_built_or_not_by_itself() -> None:
    """`built` lists services by name; one built service says nothing about another (B36)."""
    with runtime_of(declare([], {"world": Phase.DISTRIBUTED, "groups": Phase.DISTRIBUTED})).open() as runtime:
        runtime.world

        assert ("world" in runtime.built, "groups" in runtime.built) == (True, False)
        assert runtime.groups


def test_construction_of_settings_never_fails_for_what_depends_on_the_machine() -> None:
    """Settings that this machine cannot serve can be created, copied and explained; only opening refuses (B15)."""
    job = JobSettings(writer={"folder": NOT_A_FOLDER})

    assert job.model_copy(update={"timers": {"depth": 2}}).writer.folder == NOT_A_FOLDER
    with pytest.raises(CapabilityError):
        runtime_of(reading([], "writer"), settings=JobSettings).open(job)
