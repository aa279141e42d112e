"""How tokens are drawn; torch is not imported, so that a wrong value is told at once."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveInt

from runtime_di import Section


class SamplingSettings(Section):
    """How many tokens are generated, and how they are drawn."""

    max_tokens: PositiveInt = 64
    """Most tokens of an answer; it ends earlier where the model ends the document or the cache is full."""
    temperature: Annotated[NonNegativeFloat, Field(allow_inf_nan=False)] = 0.0
    """0 takes the likeliest token every time; 1 draws by the model's own probabilities."""
    seed: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    """Equal prompts with equal seeds get equal answers, whatever else is generated meanwhile."""
