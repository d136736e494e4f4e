"""Values of images whose type is not uint8: types, 16-bit PNGs, and conversions between gray, RGB and RGBA.

Shapes: an image has H x W pixels.
"""

import warnings

import numpy as np
import torch

from tessera.data.headers import HeaderError, raise_lack_of_memory
from tessera.data.pixels import LUMINANCE
from tessera.encoders.base import PIXEL_TYPES, PixelType

PNG_MODES = {0: "L", 2: "RGB", 4: "LA", 6: "RGBA"}
"""Pillow's name of the mode for the colour types of PNG, without palettes."""
WHITE = 65535
"""Value of white, and of an opaque alpha band, in uint16."""
ONE_TYPE = "Save all images with one type, or set data.pixel_type uint8, which divides values of 16 bits by 257"


def type_of(values: np.ndarray) -> PixelType:
    """Return the type of pixels that holds the values of an array. For wider integers, it is the smallest such type.

    Raises:
        HeaderError: the values are not numbers.
    """
    name = next((one for one in PIXEL_TYPES if one == values.dtype.name), None)
    if name is not None:
        return name
    if values.dtype.kind == "f":
        return "float32"
    if values.dtype.kind not in "iu":
        raise HeaderError(f"values of the type {values.dtype}, which is not supported")
    wide: tuple[PixelType, ...] = ("uint16", "int16")  # not uint8: a dark image does not change the type of a data set
    return next((one for one in wide if _holds(one, values)), "float32")


def _holds(pixel_type: PixelType, values: np.ndarray) -> bool:
    """Return True if all values are in the range of an integer type."""
    limits = np.iinfo(pixel_type)
    return not values.size or (limits.min <= int(values.min()) and int(values.max()) <= limits.max)


def fitted(values: np.ndarray, pixel_type: PixelType, absent: np.ndarray | None = None) -> np.ndarray:
    """Return values in the type of a data set. Values that `absent` marks may change.

    float64 is rounded to float32, whose relative error of 6e-8 no encoder sees. Integers are never rounded.

    Raises:
        HeaderError: the type does not hold every value, or 8 bits are mixed with wider types. A value of 200 means
            different things in images of 8 and of 16 bits.
    """
    if values.dtype == pixel_type:
        return values
    found, name = values if absent is None else values[~absent], values.dtype.name
    if name == "uint8":
        raise mixed(name, pixel_type)
    if pixel_type == "float32":
        with np.errstate(over="ignore"):
            rounded = found.astype(np.float32)
        kept = bool(np.isfinite(rounded).all() if found.dtype.kind == "f" else (rounded == found).all())
    else:
        kept = pixel_type != "uint8" and found.dtype.kind in "iu" and _holds(pixel_type, found)
    if not kept:
        raise HeaderError(
            f"an image of the type {name} in a data set of the type {pixel_type}, which does not hold all of its "
            "values. Set data.pixel_type to a type that does, or save the images with that type"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(pixel_type)


def mixed(found: PixelType, pixel_type: PixelType) -> HeaderError:
    """Return the error for an image of 8 bits in a data set of a wider type."""
    return HeaderError(f"an image of the type {found} in a data set of the type {pixel_type}. {ONE_TYPE}")


def read_png(encoded: bytes) -> np.ndarray:
    """Return the values (H, W, bands) uint16 of a 16-bit PNG in colour or with alpha. The header was checked before.

    Pillow keeps only the upper byte of each value of such images.

    Raises:
        HeaderError: the file is damaged, or this version of torchvision decodes no images.
    """
    try:
        from torchvision.io import ImageReadMode, decode_png
    except ImportError as error:
        raise HeaderError(
            "a 16-bit PNG in colour, which needs `torchvision.io.decode_png`. Install torchvision 0.29, or save the "
            "images as TIFF"
        ) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            found = decode_png(torch.frombuffer(bytearray(encoded), dtype=torch.uint8), ImageReadMode.UNCHANGED)
    except RuntimeError as error:
        raise_lack_of_memory(error)
        raise HeaderError("a damaged PNG: its pixel data is damaged or truncated") from error
    return found.permute(1, 2, 0).numpy()


def to_channels(values: np.ndarray, mode: str, channels: int) -> np.ndarray:
    """Convert an image (H, W, bands) to gray (1 channel), RGB (3) or RGBA (4), in its type.

    Transparent parts show a white background, as in images of 8 bits. The gray image is the luminance.

    Args:
        values: values of the image.
        mode: Pillow's name of the mode: L, LA, RGB or RGBA.
        channels: number of channels.

    Raises:
        HeaderError: an alpha band is read, added or removed, and the type is not uint16. Other types have no opaque
            value.
    """
    bands = values.shape[2]
    if bands == channels:
        return values
    colors, alpha = (values[..., :-1], values[..., -1:]) if mode.endswith("A") else (values, None)
    if (alpha is not None or channels == 4) and values.dtype != np.uint16:
        raise HeaderError(
            f"an image of {bands} bands of the type {values.dtype}, whose alpha band cannot be converted to {channels} "
            f"channels. Read its bands with data.channels {bands}"
        )
    if channels == 4:
        colors = np.repeat(colors, 3, axis=2) if colors.shape[2] == 1 else colors
        alpha = np.full_like(colors[..., :1], WHITE) if alpha is None else alpha
        return np.concatenate([colors, alpha], axis=2)
    if alpha is not None:
        opaque = alpha.astype(np.uint32)  # the largest sum below is 65535 * 65535 + 32767, which uint32 holds
        colors = ((colors * opaque + WHITE * (WHITE - opaque) + WHITE // 2) // WHITE).astype(np.uint16)
    if channels == 3:
        return np.repeat(colors, 3, axis=2) if colors.shape[2] == 1 else colors
    if colors.shape[2] == 1:
        return colors
    gray = colors.astype(np.float32) @ np.array(LUMINANCE, dtype=np.float32)[:, None]
    return gray if values.dtype == np.float32 else np.rint(gray).astype(values.dtype)
