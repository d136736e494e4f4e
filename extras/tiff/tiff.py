"""TIFF images with any number of bands. tifffile reads plain pages, and Pillow the other kinds of gray and RGB pages.

Images may come from untrusted sources. Therefore, only the compressions in `COMPRESSIONS` and `PILLOW_COMPRESSIONS` are
decoded, and all sizes that determine the required memory are compared with limits before pixels are decoded. Images
have H x W pixels.
"""

from io import BytesIO
from math import prod
from typing import TYPE_CHECKING, cast

import numpy as np
from PIL import Image

from tessera.data.decoders import Decoded
from tessera.data.headers import JPEG_RATIO, HeaderError, check_sides, raise_lack_of_memory
from tessera.data.levels import check_range

if TYPE_CHECKING:
    from tifffile import TiffFile, TiffPage

EXTENSION = "tif"
SIGNATURES = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
"""First bytes of TIFF and BigTIFF files, in little-endian and big-endian byte order."""
COMPRESSIONS = (1, 5, 8, 32946, 32773)
"""TIFF codes of the compressions that tifffile decodes here: none, LZW, deflate (two codes), PackBits."""
FAX, JPEG = (2, 3, 4), 7
"""TIFF codes of three kinds of fax compression, which store a row in one bit at best, and of JPEG compression."""
PILLOW_COMPRESSIONS = (*COMPRESSIONS, *FAX, JPEG)
"""TIFF codes of the compressions that Pillow decodes here."""
GRAY, RGB = 1, 2
"""TIFF codes of two photometric interpretations. In TIFF files, the code for gray also marks bands that are not
colours, such as infrared."""
PILLOW_COLOURS = (0, GRAY, RGB, 3, 5, 6)
"""TIFF codes of the photometric interpretations that Pillow reads here: inverted gray, gray, RGB, palette, CMYK,
YCbCr."""
REDUCED, MASK = 1, 4
"""Bits of the TIFF tag NewSubfileType that mark a page as a smaller copy or as a mask of another page."""
MOST_PAGES = 64  # maximum number of pages of a TIFF, because tifffile reads their headers one by one in Python
ORIENTATION, ROWS_PER_STRIP = 274, 278
"""Numbers of two TIFF tags."""
PREMULTIPLIED, ALPHA = 1, 2
"""Values of the TIFF tag ExtraSamples for alpha bands: premultiplied into the colours, and not premultiplied."""
MOST_PARTS = 2**16  # maximum number of strips or tiles, because tifffile decodes strips and tiles one by one in Python


def matches(encoded: bytes) -> bool:
    """Return True if the first bytes of a file are those of a TIFF."""
    return encoded[:4] in SIGNATURES


def read(encoded: bytes, *, most_bands: int, max_pixels: int) -> Decoded:
    """Read the image of a TIFF with up to 8 or with 16 bits per band.

    Smaller copies (thumbnails and pyramids) and masks of the image are skipped.

    Raises:
        HeaderError: the TIFF is damaged, not supported, too large or too dark, has several pages, or a package for TIFF
            images is not installed.
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
            number, page = _full_page(file)
            _check(page, most_bands, max_pixels)
            _check_parts(page, len(encoded))
            if _is_plain(page):
                return Decoded(_values(page), int(page.tags.valueof(ORIENTATION, 1)), _mode(page))
            if page.dtype == np.uint16:  # Pillow converts the values to 8 bits
                check_range(_values(page))
            return _read_by_pillow(encoded, number, page)
    except HeaderError:
        raise
    except Exception as error:  # tifffile and Pillow raise many kinds of errors for damaged files
        raise_lack_of_memory(error)
        raise HeaderError(f"a damaged TIFF image: {error}") from error


def _full_page(file: "TiffFile") -> tuple[int, "TiffPage"]:
    """Return the number and the header of the page that holds the image.

    Raises:
        HeaderError: the file has several pages that are neither smaller copies nor masks.
    """
    kinds: list[int] = []
    offsets: set[int] = set()
    for number in range(MOST_PAGES + 1):
        try:
            page = cast("TiffPage", file.pages[number])
        except IndexError:
            break
        if page.offset in offsets:  # a damaged chain of pages, which returns to an earlier page
            break
        _check_number_of_parts(page)
        kinds.append(page.subfiletype)
        offsets.add(page.offset)
    if not kinds:
        raise HeaderError("a damaged TIFF image: it has no page")
    full = [number for number, kind in enumerate(kinds) if not kind & (REDUCED | MASK)]
    full = full if len(kinds) > 1 else [0]  # the mark of a page without others has no meaning
    if not full:
        raise HeaderError(f"a TIFF file whose {len(kinds)} pages are all marked as smaller copies or masks")
    count, page = len(full), cast("TiffPage", file.pages[full[0]])
    if count == 1 and page.size and (page.is_imagej or page.is_shaped or page.is_stk):  # planes may share one header
        count = max(count, file.series[0].size // page.size)
    if count > 1:
        several = f"more than {MOST_PAGES}" if len(kinds) > MOST_PAGES else count
        raise HeaderError(
            f"a TIFF file with {several} pages, but one image is expected. Write pages that are channels as the bands "
            "of one page (tifffile: photometric='minisblack', planarconfig='separate'), and set data.channels to their "
            "number. Write other pages to their own files"
        )
    return full[0], page


def _is_plain(page: "TiffPage") -> bool:
    """Return True if tifffile reads the bands of a page. Otherwise, Pillow reads the page."""
    extra = tuple(page.extrasamples)
    return (
        page.compression in COMPRESSIONS
        and page.photometric in (GRAY, RGB)
        and page.bitspersample in (8, 16)
        and (page.samplesperpixel > 4 or extra != (PREMULTIPLIED,))
    )


def _values(page: "TiffPage") -> np.ndarray:
    """Return the values (H, W, bands) of a page."""
    values = page.asarray(squeeze=False, maxworkers=1)  # (bands, 1, H, W, 1) or (1, 1, H, W, bands)
    return values[:, 0].transpose(1, 2, 0, 3).reshape(*values.shape[2:4], -1)


def _read_by_pillow(encoded: bytes, number: int, page: "TiffPage") -> Decoded:
    """Read a page with Pillow, which bounds the memory of a strip or tile by the size in the header.

    Raises:
        HeaderError: Pillow does not read such pages, or reads only some of the bands.
    """
    bands, size = page.samplesperpixel, (page.imagewidth, page.imagelength)
    kind = f"the compression {page.compression!r}, the colour type {page.photometric!r} and {bands} bands"
    unsupported = HeaderError(
        f"a TIFF image with {kind}, which is not supported. Save it as gray, RGB or bands of 8 bits with LZW or deflate"
    )
    try:
        image = Image.open(BytesIO(encoded), formats=("TIFF",))
        image.seek(number)
    except (OSError, SyntaxError) as error:  # Pillow has no mode for these bands
        raise_lack_of_memory(error)
        raise unsupported from error
    if sorted(image.size) != sorted(size) or len(image.getbands()) != bands or image.mode in ("RGBX", "F", "LAB"):
        raise unsupported
    image.load()  # also turns the image upright
    mode = image.mode if image.mode in ("L", "LA", "RGB", "RGBA") else "RGBA" if image.mode == "PA" else "RGB"
    mode = "L" if image.mode == "1" else mode
    pixels = np.array(image.convert(mode))
    return Decoded(pixels.reshape(*pixels.shape[:2], -1), 1, mode)


def _check(page: "TiffPage", most_bands: int, max_pixels: int) -> None:
    """Raise `HeaderError` if the header of a page is damaged, exceeds a limit, or needs an unsupported feature."""
    height, width, bands = page.imagelength, page.imagewidth, page.samplesperpixel
    check_sides(width, height, max_pixels)
    tile = prod(page.tile or ())  # a tile may be larger than its image
    if tile > max_pixels:
        raise HeaderError(f"a TIFF image whose tiles have {tile} pixels, more than the limit of {max_pixels}")
    rows = page.tags.valueof(ROWS_PER_STRIP, 0)
    if (
        height < rows < 2**32 - 1 and rows * width * bands * page.bitspersample >= 2**34
    ):  # the largest number: one strip
        raise HeaderError(f"a damaged TIFF image: its strips have {rows} rows, but the image has {height}")
    if not 1 <= bands <= most_bands:
        raise HeaderError(f"a TIFF image with {bands} bands, but only 1 to {most_bands} bands are supported")
    if prod(page.shaped) != height * width * bands:
        raise HeaderError("a TIFF image with a depth axis, which is not supported")
    compressions = COMPRESSIONS if page.bitspersample == 16 else PILLOW_COMPRESSIONS
    if page.compression not in compressions:
        raise HeaderError(
            f"a TIFF image with the compression {page.compression!r}, which is not supported. Save it with LZW or "
            "deflate"
        )
    if page.photometric not in PILLOW_COLOURS:
        raise HeaderError(
            f"a TIFF image with the colour type {page.photometric!r}, which is not supported. Save it as gray or RGB"
        )
    if page.bitspersample not in (1, 2, 4, 8, 16) or page.dtype not in (np.bool_, np.uint8, np.uint16):
        raise HeaderError(
            f"a TIFF image with {page.bitspersample} bits per band ({page.dtype}), which is not supported. Scale the "
            "values of the data set by one range, and save its images with 8 bits"
        )


def _check_number_of_parts(page: "TiffPage") -> None:
    """Raise `HeaderError` if a page has too many strips or tiles."""
    if len(page.dataoffsets) > MOST_PARTS:
        raise HeaderError(
            f"a TIFF image with {len(page.dataoffsets)} strips or tiles, more than the limit of {MOST_PARTS}"
        )


def _check_parts(page: "TiffPage", size: int) -> None:
    """Raise `HeaderError` if strips or tiles of a page are missing or lie outside the file, which has `size` bytes.

    Without this check, tifffile would fill missing strips and tiles with zeros.
    """
    offsets, counts = np.array(page.dataoffsets, dtype=object), np.array(page.databytecounts, dtype=object)
    wanted = prod(page.chunked)
    if len(offsets) < wanted or len(counts) < wanted or not (offsets[:wanted] > 0).all():
        raise HeaderError("a damaged TIFF image: strips or tiles are missing")
    if not (counts[:wanted] > 0).all() or (offsets[:wanted] + counts[:wanted] > size).any():
        raise HeaderError("a damaged TIFF image: the file is truncated")
    pixels, stored = page.imagewidth * page.imagelength, sum(counts[:wanted])
    fewest = {JPEG: -(-pixels // JPEG_RATIO)} | dict.fromkeys(FAX, -(-page.imagelength // 8))
    if stored < fewest.get(page.compression, 0):
        raise HeaderError(f"a damaged TIFF image: {stored} bytes cannot hold {pixels} pixels")


def _mode(page: "TiffPage") -> str | None:
    """Return Pillow's name of the mode for the bands of a page; None if Pillow has no such mode."""
    colors = "RGB" if page.photometric == RGB else "L"
    extra = page.samplesperpixel - len(colors)
    if extra == 0:
        return colors
    kinds = tuple(page.extrasamples)[:1]  # some programs leave out the mark of an alpha band after RGB
    return f"{colors}A" if extra == 1 and (kinds == (ALPHA,) or (colors == "RGB" and not kinds)) else None
