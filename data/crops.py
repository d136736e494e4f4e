"""What is cut out of an image: DINO's multi-crop (2104.14294), MAE's crop (2111.06377), the crop of evaluation.

A transform turns one image into `Crops`, and all that is random in it comes from the generator that it is given. Boxes
follow torchvision's RandomResizedCrop: an area uniform in `scale`, a log-uniform aspect ratio, ten tries.
H x W pixels; n crops; S x S pixels of a crop.
"""

import math
from collections.abc import Sequence
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import AfterValidator, Field
from torch import Tensor

from data.augment import ColorConfig, Share, ascending, draw
from data.batch import Crops, Packing, Photometric
from data.settings import Section

TRIES = 10
"""boxes tried before the central one is taken"""
BOX_DRAWS = 2 * TRIES + 4
"""random numbers a crop"""
LONGEST = 4
"""a crop that keeps the aspect ratio is at most this many times as long as it is wide"""

Positive = Annotated[float, Field(gt=0)]
Areas = Annotated[
    tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]], AfterValidator(ascending)
]
Ratios = Annotated[tuple[Positive, Positive], AfterValidator(ascending)]
Degrees = Annotated[float, Field(ge=0, le=180)]


class RandomCropConfig(Section):
    """Random boxes of an image, resized to one size."""

    size: int = Field(default=224, ge=1)
    """side of a crop, in pixels"""
    scale: Areas = (0.2, 1.0)
    """least and largest share of the image's area"""
    ratio: Ratios = (3 / 4, 4 / 3)
    """least and largest ratio of width to height"""
    flip: Share = 0.5
    """probability of mirroring left and right"""
    rotation: Degrees = 0.0
    """largest turn to either side about the centre of the crop, in degrees; what comes from outside is a reflection"""


class MultiCropConfig(ColorConfig):
    """Global and local crops, and their colours."""

    global_size: int = Field(default=224, ge=1)
    """side of the two global crops, in pixels"""
    global_scale: Areas = (0.4, 1.0)
    """least and largest share of the image's area in a global crop"""
    local_crops: int = Field(default=8, ge=0)
    """local crops per image"""
    local_size: int = Field(default=96, ge=1)
    """side of a local crop, in pixels"""
    local_scale: Areas = (0.05, 0.4)
    """least and largest share of the image's area in a local crop"""
    ratio: Ratios = (3 / 4, 4 / 3)
    """least and largest ratio of width to height of what is cut out"""
    flip: Share = 0.5
    """probability of mirroring left and right"""
    rotation: Degrees = 0.0
    """largest turn to either side about the centre of a crop, in degrees; what comes from outside is a reflection"""
    blur_global1: Share = 1.0
    """probability of blur in the first global crop"""
    blur_global2: Share = 0.1
    """probability of blur in the second global crop"""
    blur_local: Share = 0.5
    """probability of blur in a local crop"""
    solarize_global2: Share = 0.2
    """probability of solarising the second global crop"""


class MultiCrop:
    """Two global crops and some local ones, with drawn photometric changes that are yet to be applied."""

    packing = None

    def __init__(self, config: MultiCropConfig) -> None:
        c = self.config = config
        self.crops: tuple[int, ...] = (2, c.local_crops) if c.local_crops else (2,)
        shape = {"ratio": c.ratio, "flip": c.flip, "rotation": c.rotation}
        self._boxes = (
            RandomCropConfig(size=c.global_size, scale=c.global_scale, **shape),
            RandomCropConfig(size=c.local_size, scale=c.local_scale, **shape),
        )
        self._blur = ((c.blur_global1, c.blur_global2), (c.blur_local,) * c.local_crops)
        self._solarize = ((0.0, c.solarize_global2), (0.0,) * c.local_crops)

    def __call__(self, image: Tensor, rng: np.random.Generator) -> Crops:
        """(3, H, W) uint8 -> views (2, 3, G, G) and (local_crops, 3, L, L) uint8, of the global and local size."""
        views: list[Tensor] = []
        drawn: list[Photometric | None] = []
        for n, boxes, blur, solarize in zip(self.crops, self._boxes, self._blur, self._solarize, strict=False):
            views.append(random_crops(image, rng, n, boxes))
            drawn.append(draw(rng, self.config, blur, solarize))
        return Crops(views, drawn)


class RandomCrop:
    """One random crop, and no photometric change."""

    crops = (1,)
    packing = None

    def __init__(self, config: RandomCropConfig) -> None:
        self.config = config

    def __call__(self, image: Tensor, rng: np.random.Generator) -> Crops:
        """(3, H, W) uint8 -> one view (1, 3, size, size) uint8."""
        return Crops([random_crops(image, rng, 1, self.config)], [None])


class NativeCrop:
    """One random crop that keeps the image's own aspect ratio, up to whole patches: NaViT's input (2307.06304).

    Its area is that of a square whose side is drawn uniformly from `smallest` to `config.size`. The crop has the share
    `config.scale` of the image's area; `config.ratio` plays no part.
    """

    crops = (1,)

    def __init__(self, config: RandomCropConfig, patch: int, smallest: int, token_budget: int) -> None:
        """`patch` and `smallest` in pixels; the crops of a batch are packed into sequences of `token_budget` patches.

        Raises:
            ValueError: sizes that cannot be.
        """
        if not patch <= smallest <= config.size:
            raise ValueError(f"smallest_size {smallest} must lie between a patch, {patch}, and size, {config.size}")
        if (config.size // patch) ** 2 > token_budget:
            raise ValueError(
                f"an image of {(config.size // patch) ** 2} tokens does not fit a token_budget of {token_budget}: "
                "raise it, or lower size"
            )
        self.config, self.patch, self.smallest = config, patch, smallest
        self.packing = Packing(patch, token_budget)

    def __call__(self, image: Tensor, rng: np.random.Generator) -> Crops:
        """(3, H, W) uint8 -> one view (1, 3, rows * patch, columns * patch) uint8."""
        u = rng.random(6)
        least, most = self.config.scale
        height, width = image.shape[1:]
        height, width = min(height, LONGEST * width), min(width, LONGEST * height)
        share = math.sqrt(least + (most - least) * u[0])
        sides = [max(round(side * share), 1) for side in (height, width)]
        top, left = (int(v * (whole - side + 1)) for v, whole, side in zip(u[1:3], image.shape[1:], sides, strict=True))
        budget = int(((self.smallest + (self.config.size - self.smallest) * u[3]) / self.patch) ** 2)
        rows, columns = native_grid(sides[0], sides[1], budget)
        pixels = image.permute(1, 2, 0)[None, top : top + sides[0], left : left + sides[1]]
        crop = resize(pixels, rows * self.patch, columns * self.patch)
        view = crop.flip(3) if u[4] < self.config.flip else crop
        turn = (2 * u[5:] - 1) * self.config.rotation
        return Crops([rotate(view, turn) if self.config.rotation else view], [None])


def native_grid(height: int, width: int, tokens: int) -> tuple[int, int]:
    """Rows and columns of at most `tokens` patches, nearest to the aspect ratio of `height` x `width`.

    Of the whole numbers about the exact sides those that use most tokens.
    """
    rows, columns = math.sqrt(tokens * height / width), math.sqrt(tokens * width / height)
    near = [(r, c) for r in (int(rows), int(rows) + 1) for c in (int(columns), int(columns) + 1)]
    near += [(1, min(int(columns), tokens)), (min(int(rows), tokens), 1)]
    return max(((r, c) for r, c in near if 0 < r * c <= tokens), key=lambda sides: sides[0] * sides[1])


class CenterCrop:
    """The transform of evaluation: shorter side to `resize` pixels, then the central `size` x `size`."""

    crops = (1,)
    packing = None

    def __init__(self, size: int = 224, resize: int | None = None) -> None:
        """`resize` is 256 / 224 of `size` unless given.

        Raises:
            ValueError: `resize` is below `size`.
        """
        self.size = size
        self.resize = round(size * 256 / 224) if resize is None else resize
        if not 1 <= self.size <= self.resize:
            raise ValueError(f"a crop of {size} pixels does not fit an image resized to {self.resize}")

    def __call__(self, image: Tensor, rng: np.random.Generator | None = None) -> Crops:
        """(3, H, W) uint8 -> one view (1, 3, size, size) uint8. Nothing is random."""
        shorter = min(image.shape[1:])
        for dim in (1, 2):  # of an image that is next to a line, only the middle: resized, the whole would be too large
            kept = min(image.shape[dim], 16 * shorter)
            image = image.narrow(dim, (image.shape[dim] - kept) // 2, kept)
        height, width = (self.resize * side // shorter for side in image.shape[1:])
        resized = resize(image.permute(1, 2, 0)[None], height, width)  # (1, 3, height, width)
        top, left = (round((side - self.size) / 2) for side in (height, width))
        view = resized[..., top : top + self.size, left : left + self.size]
        return Crops([view.contiguous(memory_format=torch.channels_last)], [None])


def random_crops(image: Tensor, rng: np.random.Generator, n: int, config: RandomCropConfig) -> Tensor:
    """(3, H, W) uint8 -> (n, 3, size, size) uint8. Takes n * `BOX_DRAWS` numbers from `rng`, crop after crop."""
    u = rng.random((n, BOX_DRAWS))  # (n, BOX_DRAWS)
    pixels = image.permute(1, 2, 0)[None]  # (1, H, W, 3)
    flipped = (u[:, -2] < config.flip).tolist()
    crops = []
    for (top, left, h, w), mirror in zip(boxes(u, image.shape[-2:], config), flipped, strict=True):
        crop = resize(pixels[:, top : top + h, left : left + w], config.size, config.size)  # (1, 3, S, S)
        crops.append(crop.flip(3) if mirror else crop)
    view = torch.cat(crops)  # (n, 3, S, S)
    return rotate(view, (2 * u[:, -1] - 1) * config.rotation) if config.rotation else view


def boxes(u: np.ndarray, size: Sequence[int], config: RandomCropConfig) -> list[list[int]]:
    """(top, left, height, width) of n crops of an image of `size` (H, W), from uniform numbers (n, BOX_DRAWS)."""
    (least, most), (low, high) = config.scale, np.log(config.ratio)
    (height, width), limit = size, np.array(size)[:, None]  # (2, 1)
    area = height * width * (least + (most - least) * u[:, :TRIES])  # (n, TRIES)
    ratio = np.exp(low + (high - low) * u[:, TRIES : 2 * TRIES])
    sides = np.rint(np.sqrt([area / ratio, area * ratio]))  # (2, n, TRIES): heights, widths
    fits = np.all((sides > 0) & (sides <= limit[..., None]), axis=0)  # (n, TRIES)
    sides = sides[:, np.arange(len(u)), fits.argmax(1)]  # (2, n): of the first that fits
    corners = np.floor(u[:, 2 * TRIES : 2 * TRIES + 2].T * (limit - sides + 1))  # (2, n): top, left
    found = np.any(fits, axis=1)
    if not found.all():
        central = round(width / config.ratio[0]), round(height * config.ratio[1])
        sides = np.where(found, sides, np.clip(central, 1, size)[:, None])
        corners = np.where(found, corners, (limit - sides) // 2)
    return np.concatenate([corners, sides]).T.astype(int).tolist()


def resize(pixels: Tensor, height: int, width: int) -> Tensor:
    """Bicubic with antialiasing, as Pillow does it: (1, H, W, 3) uint8 -> (1, 3, height, width) uint8."""
    # From this memory order torch takes its fastest kernel and returns the same order.
    return F.interpolate(pixels.permute(0, 3, 1, 2), size=(height, width), mode="bicubic", antialias=True)


def rotate(view: Tensor, degrees: np.ndarray) -> Tensor:
    """Turn each crop counter-clockwise about its centre, bicubic, edges reflected: (n, 3, S, S) uint8, (n,) -> same."""
    angle = torch.from_numpy(np.radians(degrees)).float()  # (n,)
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    turn = torch.stack([cos, -sin, zero, sin, cos, zero], dim=1).view(-1, 2, 3)
    grid = F.affine_grid(turn, list(view.shape), align_corners=False)  # (n, S, S, 2)
    turned = F.grid_sample(view.float(), grid, mode="bicubic", padding_mode="reflection", align_corners=False)
    return turned.round_().clamp_(0, 255).to(torch.uint8)
