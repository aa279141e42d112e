"""Settings of the reinforcement-learning example; torch is not imported, so that a mistake is told at once."""

from __future__ import annotations

import re
from typing import Self

from pydantic import PositiveFloat, PositiveInt, model_validator

from runtime_di import Section
from runtime_di.providers.tokenizer import Tokenizer


class LearnSettings(Section):
    """How the policy is improved."""

    steps: PositiveInt = 40
    """Updates of the policy."""
    learning_rate: PositiveFloat = 1e-3
    """Size of the updates."""
    prompt_length: PositiveInt = 8
    """Tokens of the corpus that each sample goes on from."""


class RewardSettings(Section):
    """What is rewarded."""

    pattern: str = r" ?[a-z]+"
    """Regular expression that the whole text of a token is to match: by default a word in lower case."""

    @model_validator(mode="after")
    def _pattern_is_one(self) -> Self:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern {self.pattern!r} is no regular expression: {error}; mend it") from error
        return self


class Reward:
    """The share of tokens whose text matches the pattern: anybody can verify it, and no model judges."""

    def __init__(self, settings: RewardSettings, tokenizer: Tokenizer) -> None:
        pattern = re.compile(settings.pattern)
        self.matches = [bool(pattern.fullmatch(tokenizer.decode([token]))) for token in range(tokenizer.size)]

    def __call__(self, tokens: list[int]) -> float:
        return sum(self.matches[token] for token in tokens) / len(tokens)
