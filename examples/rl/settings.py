"""Settings and reward of the RL example; torch is not imported, so that a wrong value is reported at once."""

from __future__ import annotations

import re
from typing import Self

from pydantic import PositiveFloat, PositiveInt, model_validator

from runtime_di import Section
from runtime_di.providers.tokenizer import Tokenizer


class LearnSettings(Section):
    """Updates of the policy."""

    steps: PositiveInt = 40
    """Number of updates."""
    learning_rate: PositiveFloat = 1e-3
    """Learning rate of the optimizer."""
    prompt_length: PositiveInt = 8
    """Tokens of the corpus at the start of each sample."""


class RewardSettings(Section):
    """Tokens that are rewarded."""

    pattern: str = r" ?[a-z]+"
    """Regular expression that must match a token's whole text: by default a word in lower case."""

    @model_validator(mode="after")
    def _check_pattern(self) -> Self:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern {self.pattern!r} is not a regular expression: {error}; fix it") from error
        return self


class Reward:
    """The share of tokens whose text matches the pattern: a verifiable reward, without a reward model."""

    def __init__(self, settings: RewardSettings, tokenizer: Tokenizer) -> None:
        pattern = re.compile(settings.pattern)
        self.matches = [bool(pattern.fullmatch(tokenizer.decode([token]))) for token in range(tokenizer.size)]

    def __call__(self, tokens: list[int]) -> float:
        return sum(self.matches[token] for token in tokens) / len(tokens)
