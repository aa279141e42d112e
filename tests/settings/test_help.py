"""The text of ``--help``."""

from __future__ import annotations

import pytest

from tests.support.job_settings import JobSettings


def test_help_documents_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    """--help lists every field of every kind with its default, and exits with 0."""
    with pytest.raises(SystemExit) as caught:
        JobSettings.load(["--help"])

    printed = capsys.readouterr().out
    assert caught.value.code == 0
    assert "--sizes.tensor INT\n        Ranks that share a tensor. (default: 1)" in printed
    assert "--text.kind {file,byte}  (default: byte)" in printed
    assert "--text.path PATH\n        (required)" in printed
    assert "--text.extra_tokens INT\n        (default: 3)" in printed
    assert "--secret SECRET\n        (default: **********)" in printed
