"""Cut the crops of an image: resize boxes as Pillow does, and mirror and rotate the crops.

Crops have the type of the image. Whole numbers are rounded, and limited to the range of their type.

Shapes: an image has C channels and H x W pixels. There are n crops of S x T pixels.
"""

from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.data.batch import ViewParameters

if TYPE_CHECKING:
    from scipy.sparse import csr_array


def cut(image: Tensor, view: ViewParameters, out: Tensor) -> None:
    """Cut the crops of one view from an image (C, H, W) into `out` (n, S, T, C) of the same type."""
    channels = len(image)
    pixels = image.permute(1, 2, 0).contiguous()[None]  # (1, H, W, C), a view: decoded images have this memory order
    for (top, left, height, width), flip, place in zip(view.boxes.tolist(), view.flips.tolist(), out, strict=True):
        box = pixels[:, top : top + height, left : left + width]
        if flip or view.window:
            crop = resize(box, torch.empty((1, *view.size, channels), dtype=out.dtype))
            if view.window:
                first, second, rows, columns = view.window
                crop = crop[:, first : first + rows, second : second + columns]
            place.copy_(crop.flip(2)[0] if flip else crop[0])
        else:
            resize(box, place[None])
    if view.degrees is not None:
        out.copy_(rotate(out.permute(0, 3, 1, 2), view.degrees).permute(0, 2, 3, 1))


def resize(pixels: Tensor, out: Tensor) -> Tensor:
    """Resize an image (1, H, W, C) into `out` (1, S, T, C) of the same type, and return `out`.

    The resize is bicubic with antialiasing, as in Pillow.
    """
    if out.dtype != torch.uint8:
        found = to_type(_resized(pixels[0].float().numpy(), (out.shape[1], out.shape[2])), out.dtype)
        out.view(out.shape[1], -1).copy_(found.t())
        return out
    # Call the operation behind `torch.nn.functional.interpolate` directly, because `interpolate` cannot write to a
    # given tensor. The fastest kernel of the operation needs channels-last input and output.
    torch.ops.aten._upsample_bicubic2d_aa.out(
        pixels.permute(0, 3, 1, 2), out.shape[1:3], False, None, None, out=out.permute(0, 3, 1, 2)
    )
    return out


def _resized(values: np.ndarray, size: tuple[int, int]) -> Tensor:
    """Resize an image (H, W, C) float32 by two products with sparse matrices: (T * C, S) float32, columns first.

    Between the products, a matrix is transposed as a whole, because NumPy and torch are slow where they reorder three
    axes. For three channels, torch's kernel for floats takes 2.5 times as long.
    """
    height, width, _ = values.shape
    rows = _weights(height, size[0]) @ values.reshape(height, -1)  # (S, W * C)
    columns = np.ascontiguousarray(rows.T).reshape(width, -1)  # (W, C * S)
    return torch.from_numpy(_weights(width, size[1]) @ columns).view(-1, size[0])


@lru_cache(maxsize=256)
def _weights(old: int, new: int) -> "csr_array":
    """Return the matrix (new, old) float32 that resizes a line of `old` pixels to `new` pixels.

    The weights are those of Keys' cubic convolution with a = -0.5 (10.1109/TASSP.1981.1163711). To shrink a line, the
    kernel is stretched by the ratio of the lengths. Kernels are cut off at the ends of the line.
    """
    from scipy.sparse import csr_array  # imported here, because images of 8 bits do not need it

    scale = old / new
    stretch = max(scale, 1.0)
    centers = (np.arange(new) + 0.5) * scale
    start = np.maximum((centers - 2 * stretch + 0.5).astype(np.int64), 0)
    places = start[:, None] + np.arange(2 * ceil(2 * stretch) + 1)
    x = np.minimum(np.abs(places + 0.5 - centers[:, None]) / stretch, 2)
    squares = x * x
    weights = np.where(x < 1, (1.5 * x - 2.5) * squares + 1, (2.5 - 0.5 * x) * squares - 4 * x + 2)
    weights[places >= old] = 0
    weights /= weights.sum(1, keepdims=True)
    rows = np.arange(0, weights.size + 1, weights.shape[1])
    places = np.minimum(places, old - 1)
    return csr_array((weights.astype(np.float32).ravel(), places.ravel(), rows), shape=(new, old))


def to_type(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert floats to values of a type. Whole numbers are rounded, and limited to the range of their type."""
    if dtype.is_floating_point:
        return values
    limits = torch.iinfo(dtype)
    return values.round_().clamp_(limits.min, limits.max).to(dtype)


def rotate(view: Tensor, degrees: np.ndarray) -> Tensor:
    """Rotate each crop counter-clockwise about its centre: (n, C, S, S), (n,) -> (n, C, S, S) of the same type.

    Interpolation is bicubic, and corners are filled by reflection.
    """
    angle = torch.from_numpy(np.radians(degrees)).float()  # (n,)
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    turn = torch.stack([cos, -sin, zero, sin, cos, zero], dim=1).view(-1, 2, 3)
    grid = F.affine_grid(turn, list(view.shape), align_corners=False)  # (n, S, S, 2)
    turned = F.grid_sample(view.float(), grid, mode="bicubic", padding_mode="reflection", align_corners=False)
    return to_type(turned, view.dtype)
