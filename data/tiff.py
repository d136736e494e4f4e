"""TIFF images with any number of bands, read by tifffile.

Images may come from untrusted sources. Therefore, only the compressions in `COMPRESSIONS` are decoded, and all sizes
that determine the required memory are compared with limits before pixels are decoded. Images have H x W pixels.
"""

from io import BytesIO
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tessera.data.headers import HeaderError, check_sides

if TYPE_CHECKING:
    from tifffile import TiffPage

SIGNATURES = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
"""First bytes of TIFF and BigTIFF files, in little-endian and big-endian byte order."""
COMPRESSIONS = (1, 5, 8, 32946, 32773)
"""TIFF codes of the supported compressions: none, LZW, deflate (two codes), PackBits."""
GRAY, RGB = 1, 2
"""TIFF codes of the supported photometric interpretations. In TIFF files, the code for gray also marks bands that are
not colours, such as infrared."""
ORIENTATION = 274
"""Number of the TIFF tag that holds the orientation."""
ALPHA = 2
"""Value of the TIFF tag ExtraSamples for an alpha band that is not premultiplied into the colours."""
MOST_PARTS = 2**16  # maximum number of strips or tiles, because tifffile decodes strips and tiles one by one in Python
ROWS_AT_ONCE = 2**21  # maximum number of values that are converted from 16 to 8 bits at once


DARK = 4096
"""16-bit images whose values are all below this number are refused, because at most 17 of 256 gray levels would be left
in 8 bits. Such images come from 12-bit cameras, for example."""


class Tiff(NamedTuple):
    """First page of a TIFF."""

    pixels: np.ndarray
    """Pixels (H, W, bands) uint8 as stored in the file, not turned upright."""
    orientation: int
    """EXIF orientation; 1 is upright."""
    mode: str | None
    """Pillow's name of the mode for gray or RGB bands, with or without alpha; None for other bands."""


def is_tiff(encoded: bytes) -> bool:
    """Return True if the first bytes of a file are those of a TIFF."""
    return encoded[:4] in SIGNATURES


def read_tiff(encoded: bytes, *, most_bands: int, max_pixels: int) -> Tiff:
    """Read the first page of a TIFF with 8 or 16 bits per band. 16-bit values are converted by `eight_bits`.

    Raises:
        HeaderError: the TIFF is damaged, not supported, too large or too dark, or a package for TIFF images is not
            installed.
    """
    try:
        import imagecodecs  # noqa: F401 - gives tifffile decoders that never write past a strip
        from tifffile import TiffFile
    except ImportError as error:
        raise HeaderError(
            f"TIFF images need the package {error.name}. Install it with: pip install 'tessera-ssl[tiff]'"
        ) from error
    try:
        with TiffFile(BytesIO(encoded)) as file:
            page = file.pages.first
            _check(page, most_bands, max_pixels)
            _check_parts(page, len(encoded))
            values = page.asarray(squeeze=False, maxworkers=1)  # (bands, 1, H, W, 1) or (1, 1, H, W, bands)
            orientation = int(page.tags.valueof(ORIENTATION, 1))
            mode = _mode(page)
    except (HeaderError, MemoryError):
        raise
    except Exception as error:  # tifffile raises many kinds of errors for damaged files
        raise HeaderError(f"a damaged TIFF image: {error}") from error
    pixels = values[:, 0].transpose(1, 2, 0, 3).reshape(*values.shape[2:4], -1)  # (H, W, bands)
    if pixels.dtype == np.uint16:
        check_range(int(pixels.min(initial=2**16 - 1)), int(pixels.max(initial=0)))
        pixels = eight_bits(pixels)
    return Tiff(pixels, orientation, mode)


def check_range(smallest: int, largest: int) -> None:
    """Check that the values of a 16-bit image, from `smallest` to `largest`, use enough of the range of 16 bits.

    Raises:
        HeaderError: the values differ, but all are below `DARK`. With 8 bits, few gray levels would be left.
    """
    if smallest < largest < DARK:
        levels = (largest + 128) // 257 + 1
        raise HeaderError(
            f"a 16-bit image whose largest value is {largest} of 65535, so at most {levels} of 256 gray levels would "
            "be left. Scale the values of the data set to the range 0 to 65535, or save its images with 8 bits"
        )


def eight_bits(values: np.ndarray) -> np.ndarray:
    """Divide 16-bit values (H, W, ...) by 257, so that 65535 becomes 255. The shape stays the same."""
    pixels = np.empty(values.shape, dtype=np.uint8)
    rows = max(ROWS_AT_ONCE // max(prod(values.shape[1:]), 1), 1)
    for top in range(0, len(values), rows):
        pixels[top : top + rows] = (values[top : top + rows].astype(np.uint32) + 128) // 257
    return pixels


def _check(page: "TiffPage", most_bands: int, max_pixels: int) -> None:
    """Raise `HeaderError` if the header of a page is damaged, exceeds a limit, or needs an unsupported feature."""
    height, width, bands = page.imagelength, page.imagewidth, page.samplesperpixel
    check_sides(width, height, max_pixels)
    tile = prod(page.tile or ())  # a tile may be larger than its image
    if tile > max_pixels:
        raise HeaderError(f"a TIFF image whose tiles have {tile} pixels, more than the limit of {max_pixels}")
    if not 1 <= bands <= most_bands:
        raise HeaderError(f"a TIFF image with {bands} bands, but only 1 to {most_bands} bands are supported")
    if prod(page.shaped) != height * width * bands:
        raise HeaderError("a TIFF image with a depth axis, which is not supported")
    if page.compression not in COMPRESSIONS:
        raise HeaderError(f"a TIFF image with the compression {page.compression!r}, which is not supported")
    if page.photometric not in (GRAY, RGB):
        raise HeaderError(f"a TIFF image with the colour type {page.photometric!r}, which is not supported")
    if (page.bitspersample, page.dtype) not in ((8, np.uint8), (16, np.uint16)):
        raise HeaderError(
            f"a TIFF image with {page.bitspersample} bits per band ({page.dtype}), which is not supported"
        )


def _check_parts(page: "TiffPage", size: int) -> None:
    """Raise `HeaderError` if strips or tiles of a page are missing or lie outside the file, which has `size` bytes.

    Without this check, tifffile would fill missing strips and tiles with zeros.
    """
    if len(page.dataoffsets) > MOST_PARTS:
        raise HeaderError(
            f"a TIFF image with {len(page.dataoffsets)} strips or tiles, more than the limit of {MOST_PARTS}"
        )
    offsets, counts = np.array(page.dataoffsets, dtype=object), np.array(page.databytecounts, dtype=object)
    wanted = prod(page.chunked)
    if len(offsets) < wanted or len(counts) < wanted or not (offsets[:wanted] > 0).all():
        raise HeaderError("a damaged TIFF image: strips or tiles are missing")
    if not (counts[:wanted] > 0).all() or (offsets[:wanted] + counts[:wanted] > size).any():
        raise HeaderError("a damaged TIFF image: the file is truncated")


def _mode(page: "TiffPage") -> str | None:
    """Return Pillow's name of the mode for the bands of a page; None if Pillow has no such mode."""
    colors = "RGB" if page.photometric == RGB else "L"
    extra = page.samplesperpixel - len(colors)
    if extra == 0:
        return colors
    return f"{colors}A" if extra == 1 and tuple(page.extrasamples)[:1] == (ALPHA,) else None
