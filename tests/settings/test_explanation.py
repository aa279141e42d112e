"""Explanations of settings and of errors in them."""

from __future__ import annotations

import pytest

from runtime_di import SettingsError
from tests.support.job_settings import JobSettings, error_of


def test_all_problems_are_reported_together() -> None:
    """Invalid fields and broken rules of the others come in one message, each with value, source and rule."""
    message = error_of(["--seed", "-1", "--sizes.tensor", "3", "--text.extra_tokens", "x"])

    assert message == (
        "JobSettings cannot be used: 3 problems.\n"
        "  text.extra_tokens = x (from command line --text.extra_tokens): input should be a valid integer, unable to "
        "parse string as an integer\n"
        "  seed = -1 (from command line --seed): input should be greater than 0\n"
        "  sizes.tensor = 3 (from command line --sizes.tensor): 3 does not divide the world size 1\n"
        "    fix: use 1"
    )


def test_explaining_an_unknown_setting_names_the_closest() -> None:
    """explain of a misspelt path is a SettingsError."""
    with pytest.raises(SettingsError, match=r"did you mean sizes\.tensor\?"):
        JobSettings().explain("sizes.tenso")


def test_secrets_are_masked_everywhere() -> None:
    """A secret appears in no dump, explanation, error, snapshot or help."""
    settings = JobSettings.load(["--secret", "hunter2", "--output.token", "hunter2"])
    with pytest.raises(SettingsError) as caught:
        JobSettings(secret=["hunter2"], output={"token": 2})

    texts = [
        repr(settings),
        str(settings),
        settings.model_dump_json(),
        str(settings.masked),
        str(settings.portable),
        str(settings.agreed()),
        str(settings.explain("secret")),
        str(settings.explain("output")),
        str(caught.value),
    ]

    assert not any("hunter2" in text for text in texts)
