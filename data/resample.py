"""Cut the crops of an image: resize boxes as Pillow does, and mirror and rotate the crops.

Shapes: an image has C channels and H x W pixels. There are n crops of S x T pixels.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.data.batch import ViewParameters


def cut(image: Tensor, view: ViewParameters, out: Tensor) -> None:
    """Cut the crops of one view from an image (C, H, W) uint8 into `out` (n, S, T, C) uint8."""
    channels = len(image)
    pixels = image.permute(1, 2, 0).contiguous()[None]  # (1, H, W, C), a view: decoded images have this memory order
    for (top, left, height, width), flip, place in zip(view.boxes.tolist(), view.flips.tolist(), out, strict=True):
        box = pixels[:, top : top + height, left : left + width]
        if flip or view.window:
            crop = resize(box, torch.empty((1, *view.size, channels), dtype=torch.uint8))
            if view.window:
                first, second, rows, columns = view.window
                crop = crop[:, first : first + rows, second : second + columns]
            place.copy_(crop.flip(2)[0] if flip else crop[0])
        else:
            resize(box, place[None])
    if view.degrees is not None:
        out.copy_(rotate(out.permute(0, 3, 1, 2), view.degrees).permute(0, 2, 3, 1))


def resize(pixels: Tensor, out: Tensor) -> Tensor:
    """Resize an image (1, H, W, C) uint8 into `out` (1, S, T, C) uint8, and return `out`.

    The resize is bicubic with antialiasing, as in Pillow.
    """
    # Call the operation behind `torch.nn.functional.interpolate` directly, because `interpolate` cannot write to a
    # given tensor. The fastest kernel of the operation needs channels-last input and output.
    torch.ops.aten._upsample_bicubic2d_aa.out(
        pixels.permute(0, 3, 1, 2), out.shape[1:3], False, None, None, out=out.permute(0, 3, 1, 2)
    )
    return out


def rotate(view: Tensor, degrees: np.ndarray) -> Tensor:
    """Rotate each crop counter-clockwise about its centre: (n, C, S, S) uint8, (n,) -> (n, C, S, S) uint8.

    Interpolation is bicubic, and corners are filled by reflection.
    """
    angle = torch.from_numpy(np.radians(degrees)).float()  # (n,)
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    turn = torch.stack([cos, -sin, zero, sin, cos, zero], dim=1).view(-1, 2, 3)
    grid = F.affine_grid(turn, list(view.shape), align_corners=False)  # (n, S, S, 2)
    turned = F.grid_sample(view.float(), grid, mode="bicubic", padding_mode="reflection", align_corners=False)
    return turned.round_().clamp_(0, 255).to(torch.uint8)
