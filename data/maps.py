"""Maps of the size of their upright image: segmentation maps and depth maps.

A segmentation map is a PNG that holds the class number of each pixel of an image. The value 255 marks ignored pixels.
The PNG is gray with up to 8 bits or has a palette, like the maps of ADE20K, Cityscapes and PASCAL VOC. The values of a
map with a palette are the palette indices, not the colours.

A depth map is a gray PNG of 16 bits, like the maps of NYU Depth v2 and KITTI, or a NumPy array (.npy). Its unit is that
of the data set. A pixel whose value is not positive and finite has no depth.

Shapes: a map has H x W pixels. There are n crops of S x T pixels.
"""

from io import BytesIO
from math import prod
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tessera.data.batch import ViewParameters
from tessera.data.decode import MAX_PIXELS, ImageError, check_header
from tessera.data.headers import (
    HeaderError,
    check_sides,
    holds_all_pixels,
    raise_lack_of_memory,
    read_array_header,
)
from tessera.data.shards.tar_index import MAPS

IGNORED = 255
"""Value of pixels that are neither trained on nor scored."""
MapKind = int | Literal["depth"]
"""Kind of maps: the number of classes of segmentation maps, or `depth`."""
_BITS, _COLOURS = 24, 25  # byte offsets of the bit depth and of the colour type in a PNG
_ARRAY = np.lib.format.MAGIC_PREFIX  # first bytes of a .npy file


def map_member(encoded: bytes) -> str:
    """Return the file name extension that a map has in a shard, by its content."""
    segmentation, of_png, of_array = MAPS
    if encoded.startswith(_ARRAY):
        return of_array
    return of_png if encoded[_BITS : _BITS + 1] == bytes([16]) else segmentation


def decode_map(encoded: bytes, size: tuple[int, int] | None = None) -> Tensor:
    """Decode a segmentation map: bytes of a PNG -> (H, W) uint8.

    Raises:
        ImageError: the file is damaged, is not a gray or palette PNG of at most 8 bits, has more than `MAX_PIXELS`
            pixels, or does not have the `size` (H, W) of its image.
    """
    values = _png_values(encoded, size, ("1", "L", "P"), "a map has one channel of class numbers, of at most 8 bits")
    values = values.astype(np.uint8)
    if encoded[_COLOURS] == 0 and encoded[_BITS] in (2, 4):
        values //= 255 // (2 ** encoded[_BITS] - 1)  # Pillow scales values of 2 and 4 bits to 0 to 255
    return torch.from_numpy(values)


def decode_depth(encoded: bytes, size: tuple[int, int] | None = None) -> Tensor:
    """Decode a depth map: bytes of a PNG or of a NumPy array -> (H, W) float32, with 0 for pixels without a depth.

    Raises:
        ImageError: the file is damaged, is neither a gray PNG of 16 bits nor an array (H, W) of numbers, has a finite
            value above the range of float32, or does not have the `size` (H, W) of its image.
    """
    if encoded.startswith(_ARRAY):
        values = _array_values(encoded, size)
    else:
        values = _png_values(encoded, size, ("I;16", "I"), "a depth map has one channel of 16 bits")
    with np.errstate(over="ignore"):
        depth = torch.from_numpy(values.astype(np.float32))
    if len(large := values[np.isfinite(values) & ~np.isfinite(depth.numpy())]):
        raise ImageError(
            f"the depth map has the value {large[0]:g}, but the maximum is {np.finfo(np.float32).max:g}. Mark pixels "
            "without a depth with 0 or NaN"
        )
    return torch.where((depth > 0) & depth.isfinite(), depth, 0)


def _array_values(encoded: bytes, size: tuple[int, int] | None) -> np.ndarray:
    """Return the values (H, W) of a .npy file. The shape is compared with the size of the file first."""
    file = BytesIO(encoded)
    try:
        shape, columns_first, dtype = read_array_header(file)
    except HeaderError as error:
        raise ImageError(str(error)) from error
    if dtype.kind not in "fiu" or len(shape) != 2:
        raise ImageError(f"the array has the type {dtype} and {len(shape)} axes, but a depth map has 2 axes of numbers")
    height, width = shape
    _check_size((width, height), size)
    try:
        check_sides(width, height, MAX_PIXELS)
    except HeaderError as error:
        raise ImageError(str(error)) from error
    if len(encoded) - file.tell() != prod(shape) * dtype.itemsize:
        raise ImageError(
            f"a damaged NumPy array: {len(encoded) - file.tell()} bytes of values do not fit the shape {shape}"
        )
    return np.frombuffer(encoded, dtype, offset=file.tell()).reshape(shape, order="F" if columns_first else "C")


def _png_values(encoded: bytes, size: tuple[int, int] | None, modes: tuple[str, ...], wanted: str) -> np.ndarray:
    """Return the pixels (H, W) of a PNG with one of Pillow's `modes`. `wanted` describes these modes in errors."""
    check_header(encoded, MAX_PIXELS)
    try:
        image = Image.open(BytesIO(encoded), formats=("PNG",))
        _check_size(image.size, size)
        if image.mode not in modes:
            raise ImageError(f"the PNG has the mode {image.mode}, but {wanted}")
        values = np.array(image)
        if not values[-1].any() and not holds_all_pixels(encoded):
            raise ImageError("a damaged PNG: the pixel data is truncated")
    except ImageError:
        raise
    except Exception as error:  # Pillow raises many kinds of errors for damaged files
        raise_lack_of_memory(error)
        raise ImageError(f"a damaged PNG: {error}") from error
    return values


def _check_size(found: tuple[int, int], size: tuple[int, int] | None) -> None:
    """Check the size (width, height) of a map against the `size` (H, W) of its image, if it is known."""
    if size is not None and found != size[::-1]:
        raise ImageError(f"the map has {found[0]} x {found[1]} pixels, but the upright image has {size[1]} x {size[0]}")


def checked_map(encoded: bytes, size: tuple[int, int], kind: MapKind | None = None) -> Tensor:
    """Decode the map of an image of `size` (H, W), and check it: bytes -> (H, W), uint8 for classes, float32 for depth.

    Raises:
        ImageError: the map is damaged, its size is not `size`, it is of another `kind`, or a value is neither 255 nor
            less than the number of classes. If `kind` is None, both kinds and all values are accepted.
    """
    if kind == "depth" or (kind is None and map_member(encoded) != MAPS[0]):
        return decode_depth(encoded, size)
    values = decode_map(encoded, size)
    if kind is not None and len(wrong := values[(values >= kind) & (values != IGNORED)]):
        raise ImageError(
            f"the map has the value {int(wrong[0])}, but there are {kind} classes, numbered from 0 ({IGNORED} marks "
            "ignored pixels)"
        )
    return values


def encode_map(values: Tensor, member: str) -> bytes:
    """Encode a decoded map (H, W) as the file with the extension `member`."""
    file = BytesIO()
    if member.endswith(".npy"):
        np.save(file, values.numpy())
    else:
        Image.fromarray(values.numpy().astype(np.uint8 if member == MAPS[0] else np.uint16)).save(file, "png")
    return file.getvalue()


def cut_map(values: Tensor, view: ViewParameters) -> Tensor:
    """Cut the same crops from a map as `data.resample.cut` cuts from its image: (H, W) -> (n, S, T).

    A pixel of a crop has the value of the nearest pixel of the map. The crops must not be rotated.
    """
    first, second, height, width = view.window or (0, 0, *view.size)
    crops = []
    for (top, left, *sides), flip in zip(view.boxes.tolist(), view.flips.tolist(), strict=True):
        rows, columns = (
            ((2 * torch.arange(size) + 1) * side) // (2 * size) for size, side in zip(view.size, sides, strict=True)
        )
        rows, columns = top + rows[first : first + height], left + columns[second : second + width]
        crops.append(values[rows[:, None], columns.flip(0) if flip else columns])
    return torch.stack(crops)
