"""Settings of the MiMo example; torch is not imported, so that a wrong value is reported at once."""

from __future__ import annotations

from pydantic import PositiveFloat, PositiveInt

from runtime_di import Section


class VisionSettings(Section):
    """Shape of the vision encoder."""

    patch_width: PositiveInt = 4
    """Columns of the picture in one position of the features."""
    hidden_width: PositiveInt = 128
    """Elements of the encoder's hidden layer."""


class LearnSettings(Section):
    """Training steps and learning rate of both modules."""

    steps: PositiveInt = 200
    """Number of training steps."""
    learning_rate: PositiveFloat = 3e-3
    """Peak learning rate, reached after a tenth of the steps."""
