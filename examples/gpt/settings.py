"""Settings of the GPT; torch is not imported, so that a wrong value is reported at once."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, PositiveInt, model_validator

from runtime_di import Section


class GPTSettings(Section):
    """Shape of the model; the vocabulary size comes from the tokenizer."""

    num_layers: PositiveInt = 2
    """Transformer blocks."""
    width: PositiveInt = 128
    """Elements of a token's hidden state."""
    num_heads: PositiveInt = 4
    """Attention heads, which divide the width; tensor-parallel ranks divide the heads."""
    context_length: PositiveInt = 128
    """Most tokens in a sequence."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability of each block's output; if above 0, tensor-parallel ranks must draw the same numbers."""

    @model_validator(mode="after")
    def _check_head_width(self) -> Self:
        if self.width % (2 * self.num_heads):
            raise ValueError(
                f"width {self.width} must be a multiple of twice num_heads {self.num_heads}: "
                f"rotary embeddings rotate pairs of elements of a head"
            )
        return self
