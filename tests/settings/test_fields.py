"""Fields and their marks: what a fingerprint and a checkpoint leave out."""

from __future__ import annotations

from tests.support.job_settings import JobSettings, OutputSettings


def test_fingerprint_leaves_out_what_may_differ() -> None:
    """Per-rank fields and secrets do not change the fingerprint; every other field does."""
    base = JobSettings()

    assert JobSettings(node="there", secret="s").fingerprint() == base.fingerprint()
    assert (
        JobSettings(launch={"rank": 1, "world_size": 2}).fingerprint()
        == JobSettings(launch={"rank": 0, "world_size": 2}).fingerprint()
    )
    assert JobSettings(output={"folder": "elsewhere"}).fingerprint() != base.fingerprint()


def test_redeclared_section_keeps_its_mark() -> None:
    """A mark of a field applies in a subclass that redeclares the field without it."""

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
