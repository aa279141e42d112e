"""Services that the settings switch off."""

from __future__ import annotations

import pytest

from runtime_di import Phase, RuntimeContainer, ServiceDisabledError, service
from tests.support.small_runtimes import (
    FolderSettings,
    JobSettings,
    Log,
    Service,
    needing,
    opener,
    runtime_of,
)

settings = RuntimeContainer.settings


def test_disabled_service_is_reported_with_its_reason_and_its_setting() -> None:
    """Reading it, or a dependant, names the setting that enables it; its phase completes without it."""
    log: Log = []
    retriever = service(Phase.TOKENIZER, needing(log, "retriever"), settings.provided.retriever)
    reader = service(Phase.TOKENIZER, needing(log, "reader"), retriever)
    last = service(Phase.RUNTIME, opener(log, "last"))
    runtime_class = runtime_of({"retriever": retriever, "reader": reader, "last": last}, settings=JobSettings)

    with runtime_class.open() as runtime:
        with pytest.raises(ServiceDisabledError) as own:
            runtime.retriever
        with pytest.raises(ServiceDisabledError) as others:
            runtime.container.reader()
        runtime.start()
        assert runtime.disabled == {
            "retriever": "retriever (from default): is null, so 'retriever' is off\n  fix: set 'retriever'",
            "reader": "reader (from default): needs 'retriever', which is off: retriever is null, so 'retriever' is off"
            "\n  fix: set 'retriever'",
        }

    assert str(own.value) == (
        "Service 'retriever' is disabled.\n"
        "  retriever (from default): is null, so 'retriever' is off\n"
        "    fix: set 'retriever'"
    )
    assert "fix: set 'retriever'" in str(others.value)
    assert log == ["+last", "-last"]


def test_disabled_service_has_no_side_effect() -> None:
    """The factory of a service whose section is null is never called, so no handler is installed (B25)."""
    calls: Log = []

    def install(value: FolderSettings) -> object:
        calls.append("installed")
        return value

    runtime_class = runtime_of(
        {"a": service(Phase.RUNTIME, install, settings.provided.retriever)}, settings=JobSettings
    )

    runtime_class.open().start().close()
    runtime_class.open(JobSettings(retriever=FolderSettings())).start().close()

    assert calls == ["installed"]


def test_dependants_that_accept_none_get_none_for_a_disabled_service() -> None:
    """By annotation or default; also if they take an attribute of the service, or a path into its section."""

    def by_annotation(value: Service | None) -> object:
        return ["built", value]

    def by_default(value=None):
        return ["built", value]

    retriever = service(Phase.RUNTIME, needing([], "r"), settings.provided.retriever)
    declared = {
        "annotated": service(Phase.RUNTIME, by_annotation, retriever),
        "defaulted": service(Phase.RUNTIME, by_default, value=retriever),
        "attribute": service(Phase.RUNTIME, by_annotation, retriever.provided.name),
        "path": service(Phase.RUNTIME, by_annotation, settings.provided.retriever.depth),
    }

    with runtime_of({"retriever": retriever, **declared}, settings=JobSettings).open() as runtime:
        assert [getattr(runtime, name) for name in declared] == [["built", None]] * 4


def test_path_into_a_null_section_names_the_section() -> None:
    """A service that needs a field of a null section is disabled by that section."""

    def needs(depth: int) -> object:
        return depth

    runtime_class = runtime_of(
        {"a": service(Phase.RUNTIME, needs, settings.provided.retriever.depth)}, settings=JobSettings
    )

    with runtime_class.open() as runtime:
        assert runtime.disabled["a"] == "retriever (from default): is null, so 'a' is off\n  fix: set 'retriever'"
