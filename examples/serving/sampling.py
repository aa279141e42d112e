"""Sampling settings; torch is not imported, so that a wrong value is reported at once."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveInt

from runtime_di import Section


class SamplingSettings(Section):
    """How many tokens are generated, and how they are sampled."""

    max_tokens: PositiveInt = 64
    """Most tokens of an answer; it is shorter if the model ends the document or the cache is full."""
    temperature: Annotated[NonNegativeFloat, Field(allow_inf_nan=False)] = 0.0
    """0 always takes the likeliest token; 1 samples with the model's own probabilities."""
    seed: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    """Equal prompts with equal seeds get equal answers, whichever other requests are in the batch."""
