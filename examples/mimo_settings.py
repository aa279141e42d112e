"""Settings of the example of two modules; torch is not imported, so that a mistake is told at once."""

from __future__ import annotations

from pydantic import PositiveFloat, PositiveInt

from runtime_di import Section


class VisionSettings(Section):
    """Shape of the module that sees."""

    patch_width: PositiveInt = 4
    """Columns of the picture that make one position of the features."""
    hidden_width: PositiveInt = 128
    """Elements of the encoder's hidden layer."""


class LearnSettings(Section):
    """How the modules are trained."""

    steps: PositiveInt = 200
    """Training steps in all."""
    learning_rate: PositiveFloat = 3e-3
    """Highest learning rate, reached after a tenth of the steps."""
