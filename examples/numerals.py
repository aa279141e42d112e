"""Pictures of numbers, drawn from glyphs of three by five dots, each with its digits as the caption."""

from __future__ import annotations

import torch
from torch import Tensor

GLYPHS = """
### .#. ### ### #.# ### ### ### ### ###
#.# ##. ..# ..# #.# #.. #.. ..# #.# #.#
#.# .#. ### ### ### ### ### ..# ### ###
#.# .#. #.. ..# ..# ..# #.# ..# #.# ..#
### ### ### ### ..# ### ### ..# ### ###
"""
"""The digits from 0 to 9, side by side."""

NUM_DIGITS = 4
HEIGHT, WIDTH = 8, 16
NOISE = 0.2
CAPTION_LENGTH = NUM_DIGITS + 1
"""Bytes of a caption: the digits and a line feed."""


def glyphs() -> Tensor:
    """The dots of each digit: (digit, row, column)."""
    rows = [[[float(dot == "#") for dot in digit] for digit in row.split()] for row in GLYPHS.split("\n") if row]
    return torch.tensor(rows).transpose(0, 1)


def draw(seed: int, num_samples: int) -> tuple[Tensor, Tensor]:
    """Draw numbers at random heights, with noise, the same for equal seeds.

    Returns:
        Pictures (sample, HEIGHT, WIDTH) and captions as bytes (sample, CAPTION_LENGTH).
    """
    generator = torch.Generator().manual_seed(seed)
    digits = torch.randint(10, (num_samples, NUM_DIGITS), generator=generator)
    tops = torch.randint(HEIGHT - 4, (num_samples,), generator=generator)
    pictures = NOISE * torch.randn((num_samples, HEIGHT, WIDTH), generator=generator)
    dots = glyphs()
    for picture, number, top in zip(pictures, digits.tolist(), tops.tolist(), strict=True):
        for place, digit in enumerate(number):
            picture[top : top + 5, 4 * place : 4 * place + 3] += dots[digit]
    line_feed = torch.full((num_samples, 1), ord("\n"))
    return pictures, torch.cat((digits + ord("0"), line_feed), dim=1)
