"""Training samples: noisy pictures of numbers, drawn with glyphs of three by five pixels."""

from __future__ import annotations

import torch
from torch import Tensor

from mimo.caption_data import NUM_DIGITS

GLYPHS = """
### .#. ### ### #.# ### ### ### ### ###
#.# ##. ..# ..# #.# #.. #.. ..# #.# #.#
#.# .#. ### ### ### ### ### ..# ### ###
#.# .#. #.. ..# ..# ..# #.# ..# #.# ..#
### ### ### ### ..# ### ### ..# ### ###
"""
"""The digits from 0 to 9, side by side."""

HEIGHT, WIDTH = 8, 16
NOISE = 0.2


def glyphs() -> Tensor:
    """Pixels of each digit: (digit, row, column)."""
    rows = [[[float(dot == "#") for dot in digit] for digit in row.split()] for row in GLYPHS.split("\n") if row]
    return torch.tensor(rows).transpose(0, 1)


def draw_samples(seed: int, num_samples: int) -> tuple[Tensor, Tensor]:
    """Draw random numbers at random heights, with noise; equal seeds give equal samples.

    Returns:
        Pictures (sample, HEIGHT, WIDTH) and the number in each of them (sample,).
    """
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(10**NUM_DIGITS, (num_samples,), generator=generator)
    tops = torch.randint(HEIGHT - 4, (num_samples,), generator=generator)
    pictures = NOISE * torch.randn((num_samples, HEIGHT, WIDTH), generator=generator)
    pixels = glyphs()
    for picture, number, top in zip(pictures, numbers.tolist(), tops.tolist(), strict=True):
        for position, digit in enumerate(f"{number:0{NUM_DIGITS}}"):
            picture[top : top + 5, 4 * position : 4 * position + 3] += pixels[int(digit)]
    return pictures, numbers
