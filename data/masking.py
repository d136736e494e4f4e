"""Random masks that hide single tokens (MAE, 2111.06377) or blocks of tokens (BEiT, 2106.08254) of an image.

Shapes: the tokens of an image form a grid of h x w tokens.
"""

import math
from dataclasses import replace
from typing import Literal

import numpy as np

from data.batch import ViewParameters
from data.crops import NativeCrop, RandomCrop

MaskKind = Literal["random", "block"]

LEAST_BLOCK = 0.08
"""Area of the smallest block, as a share of the grid. It corresponds to BEiT's 16 of 196 tokens."""
BLOCK_RATIO = 0.3
"""Smallest ratio of a block's height to its width. Ratios are log-uniform between this number and its inverse."""


def hidden_count(tokens: int, ratio: float) -> int:
    """Return the number of tokens to hide in an image of `tokens` tokens: about `ratio` * `tokens`.

    At least one token is hidden, and at least one token stays visible.

    Raises:
        ValueError: the image has fewer than two tokens.
    """
    if tokens < 2:
        raise ValueError(
            "The image has only one token, so that no token would stay visible. Use larger images or smaller patches."
        )
    return min(max(tokens - int(tokens * (1 - ratio)), 1), tokens - 1)


def random_mask(grid: tuple[int, int], ratio: float, rng: np.random.Generator) -> np.ndarray:
    """Return a mask (h, w) bool that hides `hidden_count` tokens, drawn uniformly without replacement."""
    tokens = grid[0] * grid[1]
    hidden = np.zeros(tokens, dtype=bool)
    hidden[rng.random(tokens).argsort()[: hidden_count(tokens, ratio)]] = True
    return hidden.reshape(grid)


def block_mask(grid: tuple[int, int], ratio: float, rng: np.random.Generator) -> np.ndarray:
    """Return a mask (h, w) bool that hides `hidden_count` tokens in rectangles that may overlap.

    Rectangles are added until enough tokens are hidden. The last rectangle hides its tokens row by row, and stops when
    `hidden_count` tokens are hidden.
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
    """Draws one crop of an image, and a mask that hides tokens of the crop.

    Args:
        crop: draws the crop, whose sides are multiples of `stride`.
        stride: side of the square that a token covers, in pixels.
        kind: `random` for single tokens, `block` for blocks of tokens.
        ratio: share of hidden tokens.
    """

    def __init__(self, crop: RandomCrop | NativeCrop, stride: int, kind: MaskKind, ratio: float) -> None:
        self.crop, self.stride, self.kind, self.ratio = crop, stride, kind, ratio
        self.packing, self.views = crop.packing, crop.views

    def draw(self, size: tuple[int, int], rng: np.random.Generator) -> list[ViewParameters]:
        """Draw one crop of an image of `size` (H, W), and the mask of the crop.

        A crop of h * stride x w * stride pixels has a mask (1, h, w).
        """
        (view,) = self.crop.draw(size, rng)
        rows, columns = (side // self.stride for side in view.boxes.shape)
        hidden = MASKS[self.kind]((rows, columns), self.ratio, rng)
        return [replace(view, masks=(hidden[None],))]
