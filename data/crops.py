"""Transforms that draw crops: multi-crop (DINO, 2104.14294), single crop (MAE, 2111.06377) and evaluation crops.

A transform draws the crop parameters of an image from the size of the image and a random generator. `data.resample`
cuts the crops. Boxes are drawn as in torchvision's RandomResizedCrop: the area is uniform in the range `scale`, and the
aspect ratio is log-uniform in the range `ratio`. A box that does not fit into the image is drawn again. After ten such
boxes, the central box is used.

Shapes: an image has H x W pixels; n crops have S x S pixels.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import AfterValidator, Field
from torch import Tensor

from tessera.data.batch import SampleParameters, ViewParameters
from tessera.data.collate import Packing, Transform, ViewShape
from tessera.data.colors import (
    BLUR_SIGMA,
    ColorConfig,
    Share,
    Sigmas,
    ascending,
    color_operations,
    draw_colors,
    own_rng,
)
from tessera.data.sampler import step_noise
from tessera.runtime.settings import Section

REDRAWS = 10
"""Number of further boxes that are drawn for a crop without enough data (`avoid_nodata`)."""
ENOUGH = 0.5
"""Share of the values of a box that must hold data, so that no other box is drawn."""
TRIES = 10
"""Number of random boxes that are tried before the central box is used."""
BOX_DRAWS = 2 * TRIES + 4
"""Number of random values per crop, for its box, its mirroring and its rotation. It never changes, because the crops
and colours of every run would change with it. Another operation draws from `data.colors.own_rng`."""
LONGEST = 4
"""Maximum ratio of the longer side to the shorter side of a box of `NativeCrop`."""
SMALL_SIDE = 128
"""Side of a global crop in pixels, below which some defaults differ (measurements: docs/results.md)."""

T = TypeVar("T")
Positive = Annotated[float, Field(gt=0)]
Areas = Annotated[
    tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]], AfterValidator(ascending)
]
Ratios = Annotated[tuple[Positive, Positive], AfterValidator(ascending)]
Degrees = Annotated[float, Field(ge=0, le=180)]


class RandomCropConfig(Section):
    """Settings of random crops of one size."""

    size: int = Field(default=224, ge=1)
    """side length of a crop, in pixels"""
    scale: Areas = (0.2, 1.0)
    """smallest and largest area of a box before the resize, as a share of the image's area"""
    ratio: Ratios = (3 / 4, 4 / 3)
    """smallest and largest ratio of width to height of a box before the resize"""
    flip: Share = 0.5
    """probability that a crop is mirrored left to right"""
    rotation: Degrees = 0.0
    """largest rotation of a crop about its centre in either direction, in degrees; corners are filled by reflection"""


def local_side(global_side: int) -> int:
    """Return the side of a local crop in pixels, for global crops of side `global_side`.

    As in DINO, local crops have 96 pixels for global crops of 224 pixels.
    """
    return max(round(global_side * 96 / 224 / 16), 1) * 16


def by_size(small: T, large: T) -> Callable[[dict[str, Any]], T]:
    """Return a function that chooses a default: `small` if `global_size` is less than `SMALL_SIDE`, else `large`."""
    return lambda given: small if given.get("global_size", 224) < SMALL_SIDE else large


def scaled_blur(side: int) -> tuple[float, float]:
    """Return the range of the blur's standard deviation for global crops of `side` pixels.

    Below 128 pixels, the blur shrinks with the crops, because a larger blur would remove most details of a small crop.
    """
    factor = side / 224 if side < SMALL_SIDE else 1
    return round(BLUR_SIGMA[0] * factor, 3), round(BLUR_SIGMA[1] * factor, 3)


class MultiCropConfig(ColorConfig, frozen=True):
    """Settings of global and local crops with colour changes."""

    global_size: int = Field(default=224, ge=1)
    """side length of each of the two global crops, in pixels"""
    global_scale: Areas = (0.4, 1.0)
    """smallest and largest area of a global crop before the resize, as a share of the image's area"""
    local_crops: int = Field(default_factory=by_size(4, 8), ge=0)
    """number of local crops per image; default: 8, or 4 if global_size is less than 128"""
    local_size: int = Field(default_factory=lambda given: local_side(given.get("global_size", 224)), ge=1)
    """side of a local crop, in pixels; default: 3/7 of global_size, rounded to a multiple of 16"""
    local_scale: Areas = Field(default_factory=by_size((0.15, 0.5), (0.05, 0.4)))
    """smallest and largest area of a local crop before the resize, as a share of the image's area; default: 0.05,0.4,
    or 0.15,0.5 if global_size is less than 128"""
    ratio: Ratios = (3 / 4, 4 / 3)
    """smallest and largest ratio of width to height of a crop before the resize"""
    flip: Share = 0.5
    """probability that a crop is mirrored left to right"""
    rotation: Degrees = 0.0
    """largest rotation of a crop about its centre in either direction, in degrees; corners are filled by reflection"""
    blur_sigma: Sigmas = Field(default_factory=lambda given: scaled_blur(given.get("global_size", 224)))
    """smallest and largest standard deviation of the Gaussian blur, in pixels of the crop; default: 0.1,2.0, multiplied
    by global_size / 224 if global_size is less than 128"""
    blur_global1: Share = 1.0
    """probability that the first global crop is blurred"""
    blur_global2: Share = 0.1
    """probability that the second global crop is blurred"""
    blur_local: Share = 0.5
    """probability that a local crop is blurred"""
    solarize_global2: Share = 0.2
    """probability that the second global crop is solarised"""


def sides(config: MultiCropConfig) -> list[int]:
    """Return the side of the crops of each view, in pixels."""
    return [config.global_size, config.local_size] if config.local_crops else [config.global_size]


class MultiCrop:
    """Draws two global crops and several local crops of an image, with colour changes."""

    packing = None

    def __init__(self, config: MultiCropConfig) -> None:
        c = self.config = config
        shapes = (ViewShape(2, c.global_size), ViewShape(c.local_crops, c.local_size))
        self.views = tuple(shape for shape in shapes if shape.crops)
        shape = {"ratio": c.ratio, "flip": c.flip, "rotation": c.rotation}
        self._boxes = (
            RandomCropConfig(size=c.global_size, scale=c.global_scale, **shape),
            RandomCropConfig(size=c.local_size, scale=c.local_scale, **shape),
        )
        sigma = c.blur_sigma
        self._colors = (
            color_operations(c, (c.blur_global1, c.blur_global2), (0.0, c.solarize_global2), blur_sigma=sigma),
            color_operations(c, (c.blur_local,) * c.local_crops, (0.0,) * c.local_crops, blur_sigma=sigma),
        )

    def draw(self, size: tuple[int, int], rng: np.random.Generator) -> list[ViewParameters]:
        """Draw the parameters of the global and local crops of an image of `size` (H, W)."""
        parameters = []
        for shape, boxes, operations in zip(self.views, self._boxes, self._colors, strict=False):
            view = random_boxes(size, rng, shape.crops, boxes)
            parameters.append(replace(view, colors=draw_colors(rng, operations, shape.crops)))
        return parameters


class ResizedView:
    """Adds a view to the views of a transform.

    The added view has the boxes of the first view, resized to `size` x `size` pixels, without colour changes and masks.
    In DINOv3 (2508.10104), these crops are the input of the Gram teacher.
    """

    def __init__(self, transform: Transform, size: int) -> None:
        self.transform, self.size, self.packing = transform, size, transform.packing
        self.views = (*transform.views, ViewShape(transform.views[0].crops, size))

    def draw(self, size: tuple[int, int], rng: np.random.Generator) -> list[ViewParameters]:
        """Draw the parameters of the transform's views and of the added view, for an image of `size` (H, W)."""
        views = self.transform.draw(size, rng)
        return [*views, replace(views[0], size=(self.size, self.size), colors=(), masks=(), is_plain=True)]


class MixedCrops:
    """Draws the crops of each step with one of several transforms.

    The high-resolution phase of DINOv3 (2508.10104) mixes crops of several sizes in this way. The seed and the step
    determine the transform, so all processes draw crops of the same sizes in a step. `views` and `draw`, which have no
    step argument, use the transform whose crops have the most pixels.

    Args:
        transforms: transforms without packing.
        weights: relative probability of each transform.
    """

    packing = None

    def __init__(self, transforms: Sequence[Transform], weights: Sequence[float]) -> None:
        self.transforms = tuple(transforms)
        self.shares = [float(weight / np.sum(weights)) for weight in weights]
        self._ends = np.cumsum(weights) / np.sum(weights)
        self._largest = max(transforms, key=lambda one: sum(view.crops * view.size**2 for view in one.views))
        self.views = self._largest.views

    def at(self, seed: int, step: int) -> Transform:
        """Return the transform of a step in a run with the given seed."""
        return self.transforms[int(np.searchsorted(self._ends[:-1], step_noise(seed, step), side="right"))]

    def draw(self, size: tuple[int, int], rng: np.random.Generator) -> SampleParameters:
        """Draw the parameters of the largest crops of an image of `size` (H, W)."""
        return self._largest.draw(size, rng)


class RandomCrop:
    """Draws one random crop of an image, without colour changes."""

    packing = None

    def __init__(self, config: RandomCropConfig) -> None:
        self.config, self.views = config, (ViewShape(1, config.size),)

    def draw(self, size: tuple[int, int], rng: np.random.Generator) -> list[ViewParameters]:
        """Draw the parameters of the crop of an image of `size` (H, W)."""
        return [random_boxes(size, rng, 1, self.config)]


class NativeCrop:
    """Draws one random crop of an image. The crop has about the aspect ratio of the image, as for NaViT (2307.06304).

    The area of the box is a share of the image's area, and this share is drawn from `config.scale`. `config.ratio` is
    not used. The box is resized to a crop of whole patches. The crop has about the area of a square whose side is drawn
    uniformly from `smallest` to `config.size`. The crops of a batch are packed into sequences.

    Args:
        config: size, scale, flip and rotation of the crop.
        patch: side of a patch in pixels.
        smallest: smallest side in pixels of the square that has about the area of the crop.
        token_budget: maximum number of patches in a packed sequence.

    Raises:
        ValueError: `smallest` is not between `patch` and `config.size`, or the largest crop has more patches than
            `token_budget`.
    """

    def __init__(self, config: RandomCropConfig, patch: int, smallest: int, token_budget: int) -> None:
        if not patch <= smallest <= config.size:
            raise ValueError(
                f"smallest_size is {smallest}. Use at least {patch} (one patch) and at most {config.size} (size)."
            )
        if (config.size // patch) ** 2 > token_budget:
            raise ValueError(
                f"An image of {(config.size // patch) ** 2} tokens does not fit into a token_budget of {token_budget}. "
                "Raise token_budget, or lower size."
            )
        self.config, self.patch, self.smallest = config, patch, smallest
        self.packing = Packing(patch, token_budget)
        self.views = (ViewShape(1, config.size),)

    def draw(self, size: tuple[int, int], rng: np.random.Generator) -> list[ViewParameters]:
        """Draw the parameters of one crop of an image of `size` (H, W).

        The sides of the crop are multiples of the patch size.
        """
        u = rng.random(6)
        least, most = self.config.scale
        height, width = min(size[0], LONGEST * size[1]), min(size[1], LONGEST * size[0])
        share = math.sqrt(least + (most - least) * u[0])
        sides = [max(round(side * share), 1) for side in (height, width)]
        corner = [int(v * (whole - side + 1)) for v, whole, side in zip(u[1:3], size, sides, strict=True)]
        budget = int(((self.smallest + (self.config.size - self.smallest) * u[3]) / self.patch) ** 2)
        rows, columns = native_grid(sides[0], sides[1], budget)
        degrees = (2 * u[5:] - 1) * self.config.rotation if self.config.rotation else None
        shape = rows * self.patch, columns * self.patch
        boxes = np.array([corner + sides])
        return [ViewParameters(boxes, shape, u[4:5] < self.config.flip, degrees)]


def native_grid(height: int, width: int, tokens: int) -> tuple[int, int]:
    """Return the numbers of rows and columns of a grid of at most `tokens` patches.

    The ratio of rows to columns is about `height` / `width`. Each of the two numbers is rounded up or down, to make the
    number of patches as large as possible.
    """
    rows, columns = math.sqrt(tokens * height / width), math.sqrt(tokens * width / height)
    near = [(r, c) for r in (int(rows), int(rows) + 1) for c in (int(columns), int(columns) + 1)]
    near += [(1, min(int(columns), tokens)), (min(int(rows), tokens), 1)]
    return max(((r, c) for r, c in near if 0 < r * c <= tokens), key=lambda sides: sides[0] * sides[1])


class CenterCrop:
    """Returns the central crop of an image, for evaluation.

    The image is resized so that its shorter side has `resize` pixels. The central square of `size` x `size` pixels is
    the crop.

    Args:
        size: side of the crop in pixels.
        resize: shorter side of the resized image in pixels; None for `size` * 256 / 224.

    Raises:
        ValueError: `size` is below 1 or greater than `resize`.
    """

    packing = None

    def __init__(self, size: int = 224, resize: int | None = None) -> None:
        self.size, self.views = size, (ViewShape(1, size),)
        self.resize = round(size * 256 / 224) if resize is None else resize
        if not 1 <= self.size <= self.resize:
            raise ValueError(
                f"The side of the crop is {size} pixels. It must be at least 1 and at most {self.resize}, the shorter "
                "side of the resized image."
            )

    def draw(self, size: tuple[int, int], rng: np.random.Generator | None = None) -> list[ViewParameters]:
        """Return the parameters of the crop of an image of `size` (H, W).

        The crop is deterministic, and `rng` is not used.
        """
        # Cut off the ends of a very long image before the resize. Otherwise, the resized image would be too large.
        kept = [min(side, 16 * min(size)) for side in size]
        corner = [(side - k) // 2 for side, k in zip(size, kept, strict=True)]
        height, width = (self.resize * side // min(size) for side in kept)
        top, left = (round((side - self.size) / 2) for side in (height, width))
        window = (top, left, self.size, self.size)
        boxes, flips = np.array([corner + kept]), np.array([False])
        return [ViewParameters(boxes, (height, width), flips, window=window)]


class WholeImage:
    """Resizes an image to a square of `size` x `size` pixels, for evaluation. The aspect ratio changes.

    Args:
        size: side of the square in pixels.
    """

    packing = None

    def __init__(self, size: int) -> None:
        self.size, self.views = size, (ViewShape(1, size),)

    def draw(self, size: tuple[int, int], rng: np.random.Generator | None = None) -> list[ViewParameters]:
        """Return the parameters of the square for an image of `size` (H, W).

        The square is deterministic, and `rng` is not used.
        """
        square = (self.size, self.size)
        # Set a window, because `largest_shrink` lets the decoder shrink only images without a window.
        return [ViewParameters(np.array([(0, 0, *size)]), square, np.array([False]), window=(0, 0, *square))]


def random_boxes(size: tuple[int, int], rng: np.random.Generator, n: int, config: RandomCropConfig) -> ViewParameters:
    """Draw n crops of an image of `size` (H, W). For each crop, `BOX_DRAWS` values are drawn from `rng`."""
    u = rng.random((n, BOX_DRAWS))  # (n, BOX_DRAWS)
    degrees = (2 * u[:, -1] - 1) * config.rotation if config.rotation else None
    return ViewParameters(boxes(u, size, config), (config.size, config.size), u[:, -2] < config.flip, degrees)


def boxes(u: np.ndarray, size: tuple[int, int], config: RandomCropConfig) -> np.ndarray:
    """Turn random values `u` into boxes in an image of `size` (H, W): (n, BOX_DRAWS) -> (n, 4) int64.

    A box is stored as top, left, height and width.
    """
    return np.array([_box(numbers, size, config) for numbers in u.tolist()])


def _box(numbers: list[float], size: tuple[int, int], config: RandomCropConfig) -> tuple[int, int, int, int]:
    """Return the first random box that fits into the image, or the central box if no random box fits.

    The computation uses Python numbers, because NumPy is several times slower for arrays of this size.
    """
    (least, most), (low, high), (height, width) = config.scale, map(math.log, config.ratio), size
    for share, skew in zip(numbers[:TRIES], numbers[TRIES : 2 * TRIES], strict=True):
        area = height * width * (least + (most - least) * share)
        ratio = math.exp(low + (high - low) * skew)
        h, w = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < h <= height and 0 < w <= width:
            down, right = numbers[2 * TRIES : 2 * TRIES + 2]
            return int(down * (height - h + 1)), int(right * (width - w + 1)), h, w
    h = min(max(round(width / config.ratio[0]), 1), height)
    w = min(max(round(height * config.ratio[1]), 1), width)
    return (height - h) // 2, (width - w) // 2, h, w


def avoid_nodata(
    views: SampleParameters, absent: Tensor, transform: Transform, rng: np.random.Generator
) -> SampleParameters:
    """Return the parameters of an image with boxes that hold data in at least half of their values, where possible.

    A box with less data is replaced by a box that `transform` draws from a stream of its own, at most `REDRAWS` times.
    Of boxes with too little data, the one with the most data is kept. Everything else of a crop stays as drawn.

    Args:
        views: parameters that `transform` has drawn.
        absent: True for values without data, (C, H, W) bool.
        rng: generator of the sample, which does not advance.
    """
    size = (absent.shape[1], absent.shape[2])
    counts = np.zeros((size[0] + 1, size[1] + 1), dtype=np.int64)  # absent values above and left of each corner
    counts[1:, 1:] = absent.sum(0).numpy().cumsum(0).cumsum(1)

    def shares(view: ViewParameters) -> np.ndarray:
        """Return the share of values with data of each box, (n,)."""
        top, left, height, width = view.boxes.T
        down, right = top + height, left + width
        missing = counts[down, right] - counts[top, right] - counts[down, left] + counts[top, left]
        return 1 - missing / (len(absent) * height * width)

    own = own_rng(rng, "nodata")
    for _ in range(REDRAWS):
        if all((shares(view) >= ENOUGH).all() for view in views):
            break
        chosen = []
        for view, other in zip(views, transform.draw(size, own), strict=True):
            better = (shares(view) < ENOUGH) & (shares(other) > shares(view))
            if view.size == other.size:
                chosen.append(replace(view, boxes=np.where(better[:, None], other.boxes, view.boxes)))
            else:  # the size of the only crop of `NativeCrop` follows from its box, and the size of the masks, too
                chosen.append(other if better.all() else view)
        views = chosen
    return views
