"""RandAugment (1909.13719) for batches on any device, with the operations of timm's `rand-m9-mstd0.5-inc1`.

Two operations are drawn for each image, and each of them is applied with probability 0.5. Operations work on whole
numbers from 0 to 255, with the same formulas as Pillow. Geometric operations interpolate bilinearly. Operations are
drawn on the CPU, so that the CPU decides which images need which operation without waiting for the device.

Shapes: B images with C channels and H x W pixels. An operation changes n of the B images.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.encoders.segments import copy_to_device

LAYERS = 2
"""Number of operations that are drawn for each image."""
PROBABILITY = 0.5
"""Probability that a drawn operation is applied."""
SPREAD = 0.5
"""Standard deviation of the normal distribution from which magnitudes are drawn."""
HIGHEST = 10
"""Largest magnitude. A level is a magnitude divided by this number."""


@dataclass(frozen=True)
class Operations:
    """Operations of B images, in the order in which they are applied."""

    kinds: Tensor
    """(B, 2) int64: index in `OPERATIONS`; -1 for no operation."""
    levels: Tensor
    """(B, 2) float64: level from -1 to 1. The sign is the direction, for operations that have one."""


def draw_operations(rngs: Sequence[np.random.Generator], magnitude: float) -> Operations:
    """Draw the operations of B images from their generators. With the magnitude 0, no operation is drawn."""
    kinds, levels = torch.full((len(rngs), LAYERS), -1), torch.zeros(len(rngs), LAYERS, dtype=torch.float64)
    for image, rng in enumerate(rngs if magnitude else ()):
        for layer in range(LAYERS):
            kind, applied, negated = int(rng.integers(len(OPERATIONS))), rng.random(), rng.random()
            level = min(max(rng.normal(magnitude, SPREAD), 0), HIGHEST) / HIGHEST
            if applied < PROBABILITY:
                kinds[image, layer] = kind
                levels[image, layer] = -level if negated < 0.5 else level
    return Operations(kinds, levels)


@torch.no_grad()
def rand_augment(pixels: Tensor, operations: Operations, fill: Sequence[float]) -> Tensor:
    """Apply operations to images: (B, C, H, W) float32 -> (B, C, H, W) float32.

    Args:
        pixels: values of the pixels, whole numbers from 0 to 255.
        operations: operations of the images.
        fill: value of each channel for pixels that a geometric operation leaves empty, 0 to 255.
    """
    background = copy_to_device(torch.tensor(list(fill), dtype=pixels.dtype), pixels.device).view(-1, 1, 1)  # (C, 1, 1)
    for layer in range(LAYERS):
        for kind, operation in enumerate(OPERATIONS.values()):
            chosen = (operations.kinds[:, layer] == kind).nonzero().squeeze(1)  # (n,), on the CPU
            if len(chosen):
                levels = copy_to_device(operations.levels[chosen, layer], pixels.device)
                places = copy_to_device(chosen, pixels.device)
                changed = operation(pixels.index_select(0, places), levels.view(-1, 1, 1, 1), background)
                pixels = pixels.index_copy(0, places, changed.to(pixels.dtype))
    return pixels


def _autocontrast(x: Tensor, level: Tensor, fill: Tensor) -> Tensor:
    low, high = x.amin((2, 3), keepdim=True).double(), x.amax((2, 3), keepdim=True).double()
    scale = 255 / (high - low).clamp(min=1)
    return torch.where(high > low, (x * scale - low * scale).trunc().clamp(0, 255), x.double())


def _equalize(x: Tensor, level: Tensor, fill: Tensor) -> Tensor:
    values = x.long().flatten(2)  # (n, C, H * W)
    counts = values.new_zeros(*values.shape[:2], 256).scatter_add_(2, values, torch.ones_like(values))
    last = counts.gather(2, values.amax(2, keepdim=True))  # (n, C, 1): number of pixels with the largest value
    step = (values.shape[2] - last) // 255
    table = (step // 2 + counts.cumsum(2) - counts) // step.clamp(min=1)  # (n, C, 256)
    return torch.where(step > 0, table.clamp(max=255).gather(2, values), values).view_as(x)


def _invert(x: Tensor, level: Tensor, fill: Tensor) -> Tensor:
    return 255 - x


def _posterize(x: Tensor, level: Tensor, fill: Tensor) -> Tensor:
    step = 2 ** (4 + (4 * level.abs()).trunc()).clamp(max=7)  # 4 to 1 bits remain; Pillow needs at least 1
    return (x / step).floor() * step


def _solarize(x: Tensor, level: Tensor, fill: Tensor) -> Tensor:
    return torch.where(x < 256 - (256 * level.abs()).trunc(), x, 255 - x)


def _solarize_add(x: Tensor, level: Tensor, fill: Tensor) -> Tensor:
    return torch.where(x < 128, (x + (110 * level.abs()).trunc()).clamp(max=255), x.double())


def _color(x: Tensor, level: Tensor, fill: Tensor) -> Tensor:
    return _enhanced(x, _luminance(x), level)


def _contrast(x: Tensor, level: Tensor, fill: Tensor) -> Tensor:
    return _enhanced(x, (_luminance(x).mean((2, 3), keepdim=True) + 0.5).floor(), level)


def _brightness(x: Tensor, level: Tensor, fill: Tensor) -> Tensor:
    return _enhanced(x, torch.zeros_like(x), level)


def _sharpness(x: Tensor, level: Tensor, fill: Tensor) -> Tensor:
    height, width = x.shape[-2:]
    smooth = x.clone()  # pixels at the edges are not smoothed
    if height > 2 and width > 2:
        near = sum(x[..., i : height - 2 + i, j : width - 2 + j] for i in range(3) for j in range(3))
        smooth[..., 1:-1, 1:-1] = ((near + 4 * x[..., 1:-1, 1:-1]) / 13 + 0.5).floor()
    return _enhanced(x, smooth, level)


def _enhanced(x: Tensor, degenerate: Tensor, level: Tensor) -> Tensor:
    """Enhance images as Pillow does: degenerate + f * (x - degenerate), where f = 1 + 0.9 * level, but at least 0.1."""
    factor = (1 + 0.9 * level).clamp(min=0.1).to(x.dtype)
    return (degenerate + factor * (x - degenerate)).clamp(0, 255).trunc()


def _luminance(x: Tensor) -> Tensor:
    """Return Pillow's gray image of RGB images, or the channel mean of other images: (n, C, H, W) -> (n, 1, H, W)."""
    if x.shape[1] != 3:
        return (x.mean(1, keepdim=True) + 0.5).floor()
    red, green, blue = x.long().unbind(1)
    return ((red * 19595 + green * 38470 + blue * 7471 + 2**15) >> 16)[:, None].to(x.dtype)


def _rotate(x: Tensor, level: Tensor, fill: Tensor) -> Tensor:
    angle = -torch.deg2rad(30 * level)
    return _moved(x, (angle.cos(), angle.sin(), -angle.sin(), angle.cos()), (0, 0), fill)


def _shear_x(x: Tensor, level: Tensor, fill: Tensor) -> Tensor:
    return _moved(x, (1, 0.3 * level, 0, 1), (0.3 * level * x.shape[2] / 2, 0), fill)


def _shear_y(x: Tensor, level: Tensor, fill: Tensor) -> Tensor:
    return _moved(x, (1, 0, 0.3 * level, 1), (0, 0.3 * level * x.shape[3] / 2), fill)


def _translate_x(x: Tensor, level: Tensor, fill: Tensor) -> Tensor:
    return _moved(x, (1, 0, 0, 1), (0.45 * level * x.shape[3], 0), fill)


def _translate_y(x: Tensor, level: Tensor, fill: Tensor) -> Tensor:
    return _moved(x, (1, 0, 0, 1), (0, 0.45 * level * x.shape[2]), fill)


def _moved(x: Tensor, matrix: tuple, shift: tuple, fill: Tensor) -> Tensor:
    """Move images by an affine map: (n, C, H, W) -> (n, C, H, W).

    `matrix` is (a, b, c, d). The output pixel at (column, row) takes its value from the input pixel at (a * column +
    b * row, c * column + d * row) + `shift`. Coordinates are measured from the centre of the image. Output pixels whose
    input pixel lies outside the image get the value `fill`.
    """
    height, width = x.shape[-2:]
    rows = (torch.arange(height, device=x.device, dtype=torch.float64) + 0.5 - height / 2)[:, None]
    columns = torch.arange(width, device=x.device, dtype=torch.float64) + 0.5 - width / 2
    a, b, c, d = matrix
    zeros = torch.zeros(len(x), 1, height, width, device=x.device, dtype=torch.float64)
    across = zeros + a * columns + b * rows + shift[0] + width / 2  # (n, 1, H, W), from the left edge
    down = zeros + c * columns + d * rows + shift[1] + height / 2
    grid = torch.stack([2 * across / width - 1, 2 * down / height - 1], dim=-1).squeeze(1)  # (n, H, W, 2)
    sampled = F.grid_sample(x, grid.to(x.dtype), mode="bilinear", padding_mode="border", align_corners=False)
    inside = (across >= 0) & (across < width) & (down >= 0) & (down < height)
    return torch.where(inside, (sampled + 0.5).floor().clamp(0, 255), fill)


OPERATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "AutoContrast": _autocontrast,
    "Equalize": _equalize,
    "Invert": _invert,
    "Rotate": _rotate,
    "PosterizeIncreasing": _posterize,
    "SolarizeIncreasing": _solarize,
    "SolarizeAdd": _solarize_add,
    "ColorIncreasing": _color,
    "ContrastIncreasing": _contrast,
    "BrightnessIncreasing": _brightness,
    "SharpnessIncreasing": _sharpness,
    "ShearX": _shear_x,
    "ShearY": _shear_y,
    "TranslateXRel": _translate_x,
    "TranslateYRel": _translate_y,
}
"""Maps timm's names to operations. Arguments: images (n, C, H, W), levels (n, 1, 1, 1) from -1 to 1, fill (C, 1, 1)."""
