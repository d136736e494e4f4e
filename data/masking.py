"""Random masks that hide single tokens (MAE, 2111.06377) or blocks of tokens (BEiT, 2106.08254) of an image or crop.

Shapes: the tokens of an image form a grid of h x w tokens.
"""

import math
from dataclasses import replace
from typing import Literal

import numpy as np

from tessera.data.batch import ViewParameters
from tessera.data.crops import MultiCrop, NativeCrop, RandomCrop

MaskKind = Literal["random", "block"]

LEAST_BLOCK = 0.08
"""Area of the smallest block, as a share of the grid. It corresponds to BEiT's 16 of 196 tokens."""
BLOCK_RATIO = 0.3
"""Smallest ratio of a block's height to its width. Ratios are log-uniform between this number and its inverse."""
SEARCHES = 10
"""Number of random blocks that `block_search_mask` tries in a row before it gives up."""
BLOCK_TOKENS = 4
"""Smallest area in tokens that `block_search_mask` draws for a block."""


def hidden_count(tokens: int, ratio: float) -> int:
    """Return the number of tokens to hide in an image of `tokens` tokens: about `ratio` * `tokens`.

    At least one token is hidden, and at least one token stays visible.

    Raises:
        ValueError: the image has fewer than two tokens.
    """
    if tokens < 2:
        raise ValueError(
            "The image has only one token, and hiding this token would leave no visible token. Use larger images or "
            "smaller patches."
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


def block_search_mask(grid: tuple[int, int], wanted: int, rng: np.random.Generator, *, fill: bool) -> np.ndarray:
    """Return a mask (h, w) bool that hides about `wanted` tokens in rectangles, as for iBOT in DINOv2 (2304.07193).

    Each rectangle is smaller than the grid in both directions and covers at most half of the grid. A rectangle is
    discarded if it hides no new token, or more new tokens than are missing. After `SEARCHES` discarded rectangles in a
    row, the search ends, even if fewer than `wanted` tokens are hidden. If `fill` is true, single tokens are then
    hidden at random until `wanted` tokens are hidden, as in DINOv3 (2508.10104). If `fill` is false and the search has
    hidden no token, one random token is hidden.
    """
    rows, columns = grid
    hidden = np.zeros(grid, dtype=bool)
    tries = 0
    while tries < SEARCHES and (missing := wanted - int(hidden.sum())) > 0:
        tries += 1
        most = min(missing, hidden.size / 2)
        area = BLOCK_TOKENS + (most - BLOCK_TOKENS) * rng.random()
        shape = math.exp(rng.uniform(math.log(BLOCK_RATIO), -math.log(BLOCK_RATIO)))
        height, width = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if not (height < rows and width < columns):
            continue
        top, left = int(rng.integers(rows - height + 1)), int(rng.integers(columns - width + 1))
        block = hidden[top : top + height, left : left + width]
        if 0 < block.size - int(block.sum()) <= most:
            block[:] = True
            tries = 0
    missing = (wanted if fill else min(wanted, 1)) - int(hidden.sum())
    if missing > 0:
        hidden.flat[rng.permutation(np.flatnonzero(~hidden))[:missing]] = True
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
        rows, columns = (side // self.stride for side in view.shape)
        hidden = MASKS[self.kind]((rows, columns), self.ratio, rng)
        return [replace(view, masks=(hidden[None],))]


class MaskedMultiCrop:
    """Draws global and local crops of an image, and masks that hide blocks of tokens of some global crops, as DINOv2
    (2304.07193) does for iBOT.

    DINOv2 masks a fixed number of global crops per batch, and spreads the shares of hidden tokens evenly over these
    crops. Here, the masks of a sample depend only on this sample, and neither on the batch nor on the number of
    processes. If `probability` is 0.5, exactly one of the two global crops of every image is masked, and therefore
    exactly half of the global crops of any batch.

    Args:
        crop: draws the crops. The global crops are the first view.
        grid: number of token rows and of token columns of a global crop.
        probability: share of the global crops that are masked.
        ratio: smallest and largest share of hidden tokens of a masked crop. Shares are uniform in this range. At least
            one token of a masked crop is hidden.
        fill: True to hide single tokens until a mask hides exactly the drawn share of tokens.
    """

    def __init__(
        self, crop: MultiCrop, grid: tuple[int, int], probability: float, ratio: tuple[float, float], *, fill: bool
    ) -> None:
        self.crop, self.grid, self.probability, self.ratio, self.fill = crop, grid, probability, ratio, fill
        self.packing, self.views = crop.packing, crop.views

    def draw(self, size: tuple[int, int], rng: np.random.Generator) -> list[ViewParameters]:
        """Draw the crops of an image of `size` (H, W), and masks (n, h, w) of the n global crops."""
        first, *others = self.crop.draw(size, rng)
        crops = self.views[0].crops
        # Equidistant values make the share of masked crops vary less than independent values would.
        turns = (rng.random() + np.arange(crops) / crops) % 1
        masks = [self._mask(rng) if turn < self.probability else np.zeros(self.grid, dtype=bool) for turn in turns]
        return [replace(first, masks=(np.stack(masks),)), *others]

    def _mask(self, rng: np.random.Generator) -> np.ndarray:
        least, most = self.ratio
        wanted = int((least + (most - least) * rng.random()) * self.grid[0] * self.grid[1])
        return block_search_mask(self.grid, max(wanted, 1), rng, fill=self.fill)
