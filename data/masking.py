"""Which tokens of an image are hidden, drawn for each sample: singly (MAE, 2111.06377) or in blocks (BEiT, 2106.08254).

h x w grid of tokens.
"""

import math
from dataclasses import replace
from typing import Literal

import numpy as np

from data.batch import ViewParameters
from data.crops import NativeCrop, RandomCrop

MaskKind = Literal["random", "block"]

LEAST_BLOCK = 0.08
"""smallest block, as a share of the grid: 16 of 196 tokens in BEiT"""
BLOCK_RATIO = 0.3
"""height to width of a block lies between this and its inverse, log-uniformly"""


def hidden_count(tokens: int, ratio: float) -> int:
    """How many of an image's `tokens` are hidden: at least one, and at least one stays.

    Raises:
        ValueError: there are fewer than two tokens.
    """
    if tokens < 2:
        raise ValueError("an image of one token leaves nothing to predict from: use larger images or smaller patches")
    return min(max(tokens - int(tokens * (1 - ratio)), 1), tokens - 1)


def random_mask(grid: tuple[int, int], ratio: float, rng: np.random.Generator) -> np.ndarray:
    """`hidden_count` tokens of (h, w), each set of them equally likely: (h, w) bool."""
    tokens = grid[0] * grid[1]
    hidden = np.zeros(tokens, dtype=bool)
    hidden[rng.random(tokens).argsort()[: hidden_count(tokens, ratio)]] = True
    return hidden.reshape(grid)


def block_mask(grid: tuple[int, int], ratio: float, rng: np.random.Generator) -> np.ndarray:
    """`hidden_count` tokens of (h, w) in rectangles that may overlap: (h, w) bool.

    Rectangles are added until they hide enough; of the last one only so many rows, from the top, as are needed.
    """
    rows, columns = grid
    wanted = hidden_count(rows * columns, ratio)
    hidden = np.zeros(grid, dtype=bool)
    while (missing := wanted - int(hidden.sum())) > 0:
        area = rng.uniform(min(LEAST_BLOCK * hidden.size, missing), missing)
        shape = math.exp(rng.uniform(math.log(BLOCK_RATIO), -math.log(BLOCK_RATIO)))
        height = min(max(round(math.sqrt(area * shape)), 1), rows)
        width = min(max(round(math.sqrt(area / shape)), 1), columns)
        top, left = int(rng.integers(rows - height + 1)), int(rng.integers(columns - width + 1))
        block = np.zeros(grid, dtype=bool)
        block[top : top + height, left : left + width] = True
        fresh = np.flatnonzero(block & ~hidden)
        hidden.flat[fresh[:missing]] = True
    return hidden


MASKS = {"random": random_mask, "block": block_mask}


class MaskedCrop:
    """One crop of an image, and which of its tokens are hidden."""

    def __init__(self, crop: RandomCrop | NativeCrop, stride: int, kind: MaskKind, ratio: float) -> None:
        """`stride`: side of a token in pixels, of which the crop's sides are multiples."""
        self.crop, self.stride, self.kind, self.ratio = crop, stride, kind, ratio
        self.packing, self.views = crop.packing, crop.views

    def draw(self, size: tuple[int, int], rng: np.random.Generator) -> list[ViewParameters]:
        """Draw one crop of h * stride x w * stride pixels of an image of `size` (H, W), and its mask (1, h, w)."""
        (view,) = self.crop.draw(size, rng)
        rows, columns = (side // self.stride for side in view.boxes.shape)
        hidden = MASKS[self.kind]((rows, columns), self.ratio, rng)
        return [replace(view, masks=(hidden[None],))]
