"""Segmentation maps: PNGs that hold the class number of each pixel of an image. The value 255 marks ignored pixels.

A map is gray with up to 8 bits or has a palette, like the maps of ADE20K, Cityscapes and PASCAL VOC. The values of a
map with a palette are the palette indices, not the colours. A map has the size of its upright image.

Shapes: a map has H x W pixels. There are n crops of S x T pixels.
"""

from io import BytesIO

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tessera.data.batch import ViewParameters
from tessera.data.decode import MAX_PIXELS, ImageError, check_header
from tessera.data.headers import holds_all_pixels

IGNORED = 255
"""Value of pixels that are neither trained on nor scored."""
_DEPTH, _COLOURS = 24, 25  # byte offsets of the bit depth and of the colour type in a PNG


def decode_map(encoded: bytes, size: tuple[int, int] | None = None) -> Tensor:
    """Decode a segmentation map: bytes of a PNG -> (H, W) uint8.

    Raises:
        ImageError: the file is damaged, is not a gray or palette PNG of at most 8 bits, has more than `MAX_PIXELS`
            pixels, or does not have the `size` (H, W) of its image.
    """
    check_header(encoded, MAX_PIXELS)
    try:
        image = Image.open(BytesIO(encoded), formats=("PNG",))
        if size is not None and image.size != size[::-1]:
            raise ImageError(
                f"the map has {image.width} x {image.height} pixels, but the upright image has {size[1]} x {size[0]}"
            )
        if image.mode not in ("1", "L", "P"):
            raise ImageError(
                f"the PNG has the mode {image.mode}, but a map has one channel of class numbers, of at most 8 bits"
            )
        values = np.array(image).astype(np.uint8)
        if not values[-1].any() and not holds_all_pixels(encoded):
            raise ImageError("a damaged PNG: the pixel data is truncated")
    except (ImageError, MemoryError):
        raise
    except Exception as error:  # Pillow raises many kinds of errors for damaged files
        raise ImageError(f"a damaged PNG: {error}") from error
    if encoded[_COLOURS] == 0 and encoded[_DEPTH] in (2, 4):
        values //= 255 // (2 ** encoded[_DEPTH] - 1)  # Pillow scales values of 2 and 4 bits to 0 to 255
    return torch.from_numpy(values)


def checked_map(encoded: bytes, size: tuple[int, int], classes: int | None = None) -> Tensor:
    """Decode the segmentation map of an image of `size` (H, W), and check it: bytes of a PNG -> (H, W) uint8.

    Raises:
        ImageError: the map is damaged, its size is not `size`, or a value is neither 255 nor less than `classes`. If
            `classes` is None, all values are accepted.
    """
    values = decode_map(encoded, size)
    if classes is not None and len(wrong := values[(values >= classes) & (values != IGNORED)]):
        raise ImageError(
            f"the map has the value {int(wrong[0])}, but there are {classes} classes, numbered from 0 ({IGNORED} marks "
            "ignored pixels)"
        )
    return values


def cut_map(values: Tensor, view: ViewParameters) -> Tensor:
    """Cut the same crops from a map as `data.resample.cut` cuts from its image: (H, W) -> (n, S, T).

    A pixel of a crop has the value of the nearest pixel of the map.

    Raises:
        ValueError: the crops are rotated.
    """
    if view.degrees is not None:
        raise ValueError("The crops of segmentation maps cannot be rotated. Set the rotation to 0.")
    first, second, height, width = view.window or (0, 0, *view.size)
    crops = []
    for (top, left, *sides), flip in zip(view.boxes.tolist(), view.flips.tolist(), strict=True):
        rows, columns = (
            ((2 * torch.arange(size) + 1) * side) // (2 * size) for size, side in zip(view.size, sides, strict=True)
        )
        rows, columns = top + rows[first : first + height], left + columns[second : second + width]
        crops.append(values[rows[:, None], columns.flip(0) if flip else columns])
    return torch.stack(crops)
