"""Paths of the repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
"""The root of the repository."""
EXAMPLES = ROOT / "examples"
