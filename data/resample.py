"""Resize boxes of images to crops: image by image on the CPU, or for a whole batch on any device.

Bicubic resizing with antialiasing is a linear operation along each side. To resize the boxes of a batch, each box is
multiplied by a weight matrix for its columns, rounded to whole levels as in Pillow, and then multiplied by a weight
matrix for its rows. Boxes of similar sizes form a chunk, which one operation resizes. In a chunk, each box is padded to
the size of the largest box. All tensor shapes follow from box sizes that are known on the CPU, so that the CPU never
waits for the device.

Shapes: an image or a padded box has C channels and H x W pixels. There are n crops of one image, N crops of a batch and
M crops of a chunk. A crop has S x T pixels.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.data.batch import Batch, CropParameters
from tessera.encoders.segments import copy_to_device

CHUNK_PIXELS = 2**24
"""Maximum number of pixels in one resize operation, including padding. The operation needs about 23 bytes per pixel."""
WIDTH_BIN = 64
"""Length in pixels of the intervals into which box widths are sorted. The boxes of a chunk come from one interval."""


def cut(image: Tensor, cut: CropParameters, out: Tensor) -> None:
    """Cut the crops of one view from an image (C, H, W) uint8 into `out` (n, S, T, C) uint8."""
    channels = len(image)
    pixels = image.permute(1, 2, 0).contiguous()[None]  # (1, H, W, C), the memory order of decoded images
    for (top, left, height, width), flip, place in zip(cut.boxes.tolist(), cut.flips.tolist(), out, strict=True):
        box = pixels[:, top : top + height, left : left + width]
        if flip or cut.window:
            crop = resize(box, torch.empty((1, *cut.size, channels), dtype=torch.uint8))
            if cut.window:
                first, second, rows, columns = cut.window
                crop = crop[:, first : first + rows, second : second + columns]
            place.copy_(crop.flip(2)[0] if flip else crop[0])
        else:
            resize(box, place[None])
    if cut.degrees is not None:
        out.copy_(rotate(out.permute(0, 3, 1, 2), cut.degrees).permute(0, 2, 3, 1))


def resize(pixels: Tensor, out: Tensor) -> Tensor:
    """Resize an image (1, H, W, C) uint8 as Pillow does, bicubic with antialiasing. Fill `out` (1, S, T, C) uint8."""
    # Call this operation directly, because `torch.nn.functional.interpolate`, which uses it, cannot write to a given
    # tensor. The fastest kernel of the operation needs channels-last input and output.
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
    turn = copy_to_device(torch.stack([cos, -sin, zero, sin, cos, zero], dim=1).view(-1, 2, 3), view.device)
    grid = F.affine_grid(turn, list(view.shape), align_corners=False)  # (n, S, S, 2)
    turned = F.grid_sample(view.float(), grid, mode="bicubic", padding_mode="reflection", align_corners=False)
    return turned.round_().clamp_(0, 255).to(torch.uint8)


def exact(device: torch.device) -> AbstractContextManager:
    """Return a context that turns autocast off, because a lower precision than float32 would change pixel values."""
    return torch.autocast(device.type, enabled=False) if device.type in ("cpu", "cuda") else nullcontext()


@torch.no_grad()
def cut_views(batch: Batch) -> Batch:
    """Replace the whole images of a batch by their crops, (n * B, C, S, T) uint8 for each view. Return a new batch.

    Raises:
        ValueError: the batch holds no whole images.
    """
    if batch.raw is None or batch.memory is None:
        raise ValueError("This batch holds no whole images, because its crops are already cut.")
    raw, pixels, channels = batch.raw, batch.memory, batch.preprocessing.channels
    views = [
        replace(view, images=resample(pixels, raw.starts, raw.sizes, view.boxes, channels=channels), boxes=None)
        for view in batch.views
        if view.boxes is not None
    ]
    return replace(batch, views=views, raw=None, memory=None)


def resample(
    pixels: Tensor,
    starts: np.ndarray,
    sizes: np.ndarray,
    cut: CropParameters,
    *,
    channels: int = 3,
    chunk: int = CHUNK_PIXELS,
) -> Tensor:
    """Cut the crops of one view from the whole images of a batch. Return (N, C, S, T) uint8.

    Args:
        pixels: (bytes,) uint8: pixels of B images. Each image is stored in the order row, column, channel.
        starts: (B,) int64: index of the first byte of each image in `pixels`.
        sizes: (B, 2) int64: height and width of each image.
        cut: boxes of N = n * B crops, crop-major.
        channels: number of channels of the images (C).
        chunk: maximum number of pixels in one resize operation. An operation resizes at least one row of pixels, even
            if this row is longer than the maximum.
    """
    rows, columns = cut.size
    top, left, *sides = cut.boxes.T
    image = np.arange(len(cut.boxes)) % len(starts)
    first = starts[image] // channels + top * sizes[image, 1] + left  # index of a box's first pixel
    table = np.stack([first, sizes[image, 1], *sides, cut.flips, np.arange(len(image))])  # (6, N)
    order = np.lexsort((sides[0], sides[1] // WIDTH_BIN))
    out = torch.empty((len(order), channels, rows, columns), dtype=torch.uint8, device=pixels.device)
    table = copy_to_device(torch.from_numpy(table[:, order]), pixels.device)
    for part, height, width in _chunks(sides[0][order], sides[1][order], cut.size, chunk):
        crops = _resized(pixels.view(-1, channels), table[:, part], (height, width), cut.size, chunk)
        out.index_copy_(0, table[-1, part], crops)
    return out if cut.degrees is None else rotate(out, cut.degrees)


def _chunks(
    heights: np.ndarray, widths: np.ndarray, size: tuple[int, int], most: int
) -> Iterator[tuple[slice, int, int]]:
    """Split sorted boxes into chunks. For each chunk, yield the slice of its boxes, the largest height and width."""
    for like in np.split(np.arange(len(widths)), np.flatnonzero(np.diff(widths // WIDTH_BIN)) + 1):
        # Number of pixels per box, including intermediate results.
        room = (heights[like].max() + size[0]) * (widths[like].max() + size[1])
        for some in np.split(like, range(0, len(like), max(most // int(room), 1))[1:]):
            yield slice(some[0], some[-1] + 1), int(heights[some].max()), int(widths[some].max())


def _resized(pixels: Tensor, table: Tensor, longest: tuple[int, int], size: tuple[int, int], most: int) -> Tensor:
    """Resize the boxes of a chunk. Return crops (M, C, S, T) uint8.

    Args:
        pixels: (P, C) uint8: pixels of all images of the batch.
        table: (6, M): one column per box, with the index of the first pixel of the box, the width of the image, the
            height and the width of the box, 1 if the box is mirrored, and the number of the crop.
        longest: height and width of a padded box (H, W).
        size: height and width of a crop (S, T).
        most: maximum number of pixels in one resize operation.
    """
    channels = pixels.shape[1]
    first, stride, height, width, flip = table[:5, :, None]  # each (M, 1)
    with exact(pixels.device):
        columns = weights(width, size[1], longest[1], flip.bool())  # (M, T, W)
        rows = weights(height, size[0], longest[0])  # (M, S, H)
        x = torch.arange(longest[1], device=pixels.device).minimum(width - 1)  # (M, W), repeats the last pixel
        step = max(most // (len(x) * longest[1]), 1)
        narrow = []
        for y in torch.arange(longest[0], device=pixels.device).split(step):
            starts = first + y.minimum(height - 1) * stride  # (M, H)
            box = pixels[starts[:, :, None] + x[:, None]].transpose(2, 3)  # (M, H, C, W)
            product = box.flatten(1, 2).float() @ columns.mT  # (M, H * C, T)
            narrow.append(_levels(product).unflatten(1, (-1, channels)))
        crops = _levels(rows @ torch.cat(narrow, dim=1).flatten(2))  # (M, S, C * T)
    return crops.unflatten(2, (channels, -1)).transpose(1, 2).to(torch.uint8)


def weights(lengths: Tensor, size: int, longest: int, mirrored: Tensor | None = None) -> Tensor:
    """Return the weight matrices that resize M lines of pixels to `size` pixels: (M, size, longest) float32.

    The weights are those of Pillow and of `resize`. They are values of the cubic kernel with a = -0.5. The kernel spans
    two pixels to each side. These are pixels of the original line if the line is enlarged, and pixels of the resized
    line if the line is made smaller. Weights are rounded to multiples of a power of two. For each line, this power is
    chosen so that the largest weight is just below 2**15 times the power.

    Args:
        lengths: (M, 1) int64: number of pixels of each line, at most `longest`.
        size: number of pixels of a resized line.
        longest: number of pixels of the longest line.
        mirrored: (M, 1) bool: True for a line that is reversed.
    """
    places = torch.arange(size, device=lengths.device).expand(len(lengths), -1)  # (M, size)
    if mirrored is not None:
        places = torch.where(mirrored, size - 1 - places, places)
    # Centres and distances are integers in units of 1 / (2 * size) of a pixel.
    centres, reach = (2 * places + 1) * lengths, 2 * lengths.clamp(min=size)
    start = torch.div(centres - 2 * reach, 2 * size, rounding_mode="floor").clamp(min=0)
    taps = torch.arange(4 * max(longest, size) // size + 3, device=lengths.device)  # (K,)
    pixels = start[:, :, None] + taps  # (M, size, K)
    distance = (centres[:, :, None] - (2 * pixels + 1) * size).abs().double() / reach[:, :, None]
    near = (1.5 * distance - 2.5) * distance.square() + 1
    far = ((2.5 - 0.5 * distance) * distance - 4) * distance + 2
    cubic = torch.where(distance < 1, near, far) * ((distance < 2) & (pixels < lengths[:, :, None]))
    cubic = cubic / cubic.sum(2, keepdim=True)
    steps = 2 ** ((torch.log2((2**15 - 0.5) / cubic.amax((1, 2), keepdim=True))).ceil() - 1).clamp(max=22)
    cubic = ((cubic * steps).round_() / steps).float()
    line = torch.zeros((*places.shape, longest + len(taps)), device=lengths.device)
    return line.scatter_(2, pixels, cubic)[:, :, :longest]


def _levels(values: Tensor) -> Tensor:
    """Round values in place to whole levels from 0 to 255. The values stay floats."""
    return values.add_(0.5).floor_().clamp_(0, 255)
