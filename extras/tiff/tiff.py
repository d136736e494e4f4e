"""TIFF images with any number of bands. tifffile reads plain pages, and Pillow the other kinds of gray and RGB pages.

Values keep their type, except that pages that Pillow reads have 8 bits. If the pages of a file hold the channels of one
image, they are read as its bands. tifffile recognises such pages by the axes in files of ImageJ, OME, MetaMorph and
tifffile. Every other page is a separate image, and `single` returns one of them as the bytes of a file.

Images may come from untrusted sources. Therefore, only the compressions in `COMPRESSIONS` and `PILLOW_COMPRESSIONS` are
decoded, and all sizes that determine the required memory are compared with limits before pixels are decoded. Images
have H x W pixels.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple, cast
from xml.etree import ElementTree

import numpy as np
from PIL import Image

from tessera.data.decoders import Decoded
from tessera.data.headers import JPEG_RATIO, HeaderError, MissingPackageError, check_sides, raise_lack_of_memory
from tessera.data.levels import check_range
from tessera.data.pages import check_total, maximum

if TYPE_CHECKING:
    from tifffile import TiffFile, TiffPage, TiffPageSeries

EXTENSION = "tif"
SIGNATURES = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
"""First bytes of TIFF and BigTIFF files, in little-endian and big-endian byte order."""
COMPRESSIONS = (1, 5, 8, 32946, 32773)
"""TIFF codes of the compressions that tifffile decodes here: none, LZW, deflate (two codes), PackBits."""
FAX, JPEG = (2, 3, 4), 7
"""TIFF codes of three kinds of fax compression, which store a row in one bit at best, and of JPEG compression."""
PILLOW_COMPRESSIONS = (*COMPRESSIONS, *FAX, JPEG)
"""TIFF codes of the compressions that Pillow decodes here."""
INVERTED, GRAY, RGB, PALETTE, YCBCR = 0, 1, 2, 3, 6
"""TIFF codes of photometric interpretations: gray in which 0 is white, gray, RGB and palette. In TIFF files, the code
for gray also marks bands that are not colours, such as infrared."""
PILLOW_COLOURS = (INVERTED, GRAY, RGB, PALETTE, 5, 6)
"""TIFF codes of the photometric interpretations that Pillow reads here: inverted gray, gray, RGB, palette, CMYK,
YCbCr."""
REDUCED, MASK = 1, 4
"""Bits of the TIFF tag NewSubfileType that mark a page as a smaller copy or as a mask of another page."""
MOST_PAGES = 4096  # maximum number of pages of a TIFF, because tifffile reads their headers one by one in Python
ORIENTATION, ROWS_PER_STRIP, NODATA = 274, 278, 42113
"""Numbers of three TIFF tags. The last one is GDAL's tag of the value that marks pixels without data, as text."""
PREMULTIPLIED, ALPHA = 1, 2
"""Values of the TIFF tag ExtraSamples for alpha bands: premultiplied into the colours, and not premultiplied."""
MOST_PARTS = 2**16  # maximum number of strips or tiles, because tifffile decodes strips and tiles one by one in Python
_OME_NUMBERS = ("SizeZ", "SizeC", "SizeT", "FirstZ", "FirstC", "FirstT", "IFD", "NumPlanes", "PlaneCount")
MOST_PLANES = 2**16  # maximum number of planes that the description of an OME-TIFF may announce


class _Plane(NamedTuple):
    """Bands of an image that are stored together: a page, or a plane of a page that holds several planes."""

    number: int
    """Number of the page in the file."""
    page: "TiffPage"
    plane: int | None = None
    """Number of the plane in the values of the page; None if the page is the plane."""
    lookup: bool = False
    """True if a palette is only the colours in which a microscope's program shows the values."""


_Planes = list[_Plane]
"""Planes of one image, whose bands are joined."""


def matches(encoded: bytes) -> bool:
    """Return True if the first bytes of a file are those of a TIFF."""
    return encoded[:4] in SIGNATURES


def read(encoded: bytes, *, most_bands: int, max_pixels: int) -> Decoded:
    """Read the image of a TIFF.

    Smaller copies (thumbnails and pyramids) and masks of the image are skipped.

    Raises:
        HeaderError: the TIFF is damaged, not supported, too large or too dark, has several images, or a package for
            TIFF images is not installed.
    """
    with _opened(encoded) as file:
        images = _images(file, len(encoded))
        if len(images) > 1:
            raise HeaderError(
                f"a TIFF file with {len(images)} pages, but one image is expected. Set data.pages to first, each or "
                "max (--pages of other commands). Write pages that are channels as the bands of one page (tifffile: "
                "photometric='minisblack', planarconfig='separate'), and set data.channels to their number"
            )
        return _decoded(images[0], encoded, most_bands, max_pixels)


def count(encoded: bytes) -> int:
    """Return the number of images of a TIFF. No values are decoded.

    Raises:
        HeaderError: as `read`.
    """
    with _opened(encoded) as file:
        return len(_images(file, len(encoded)))


def single(encoded: bytes, pages: int | Literal["max"], *, most_bands: int, max_pixels: int) -> bytes:
    """Return a TIFF file of one image of a TIFF, or of the maximum of all images. A file of one image stays as it is.

    Args:
        encoded: content of the file.
        pages: number of the image, or `max`.
        most_bands: maximum number of bands.
        max_pixels: maximum number of pixels of an image.

    Raises:
        HeaderError: as `read`; or `pages` is `max`, and the images differ in their size, bands or type.
    """
    with _opened(encoded) as file:
        images = _images(file, len(encoded))
        if len(images) == 1:
            return encoded
        if isinstance(pages, int):
            return _encoded(_decoded(images[pages], encoded, most_bands, max_pixels))
        check_total(len(images), prod(images[0][0].page.shape), max_pixels)
        return _encoded(maximum(_decoded(image, encoded, most_bands, max_pixels) for image in images))


@contextmanager
def _opened(encoded: bytes) -> "Iterator[TiffFile]":
    """Open a TIFF file. All errors in the block become `HeaderError`, except a lack of memory."""
    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # it warns of each odd tag, and damage is an error here
    try:
        import imagecodecs  # noqa: F401 - gives tifffile decoders that never write past a strip
        from tifffile import TiffFile
    except ImportError as error:
        raise MissingPackageError("TIFF", error.name, "tiff") from error
    try:
        with TiffFile(BytesIO(encoded)) as file:
            yield file
    except HeaderError:
        raise
    except Exception as error:  # tifffile and Pillow raise many kinds of errors for damaged files
        raise_lack_of_memory(error)
        raise HeaderError(f"a damaged TIFF image: {error}") from error


def _images(file: "TiffFile", size: int) -> list[_Planes]:
    """Return the planes of each image of a file of `size` bytes, in the order of the axes.

    Raises:
        HeaderError: the file is damaged or has too many pages, or its description does not fit its pages.
    """
    full = _full_pages(file)
    first = full[0].page
    if not first.size or not (file.is_ome or first.is_imagej or first.is_shaped or first.is_stk):
        return [[plane] for plane in full]
    if file.is_ome:
        _check_description(first.description)
    found, images = {plane.page.offset: plane for plane in full}, []
    for series in file.series:
        offsets = [None if page is None else page.offset for page in series]
        if None in offsets:
            raise HeaderError("a TIFF file of which some pages are missing or in other files, which is not supported")
        planes = [found[offset] for offset in offsets if offset in found]
        if planes:  # otherwise the pages are smaller copies or masks
            images += _by_axes(series, planes, size)
    described = {plane.page.offset for image in images for plane in image}
    if len(described) < len(full):
        raise HeaderError(f"a TIFF file whose description leaves out {len(full) - len(described)} of {len(full)} pages")
    return images


def _full_pages(file: "TiffFile") -> _Planes:
    """Return the pages of a file that are neither smaller copies nor masks of other pages."""
    found: _Planes = []
    offsets: set[int] = set()
    parts = 0
    for number in range(MOST_PAGES + 1):
        try:
            page = cast("TiffPage", file.pages[number])
        except IndexError:
            break
        if page.offset in offsets:  # a damaged chain of pages, which returns to an earlier page
            break
        parts += len(page.dataoffsets)
        if len(page.dataoffsets) > MOST_PARTS or parts > 4 * MOST_PARTS:
            raise HeaderError(f"a TIFF image with {parts} strips or tiles, more than the limit of {MOST_PARTS}")
        found.append(_Plane(number, page))
        offsets.add(page.offset)
    if not found:
        raise HeaderError("a damaged TIFF image: it has no page")
    if len(found) > MOST_PAGES:
        raise HeaderError(f"a TIFF file with more than {MOST_PAGES} pages, which is not supported")
    full = [plane for plane in found if not plane.page.subfiletype & (REDUCED | MASK)]
    if len(found) > 1 and not full:
        raise HeaderError(f"a TIFF file whose {len(found)} pages are all marked as smaller copies or masks")
    return full or found  # the mark of a page without others has no meaning


def _check_description(description: str) -> None:
    """Check the numbers in the description of an OME-TIFF, for which tifffile takes memory.

    Raises:
        HeaderError: the description announces too many planes, or axes that are not supported.
    """
    planes = 0
    for element in ElementTree.fromstring(description).iter():
        if element.tag[:-1].endswith("Along"):
            raise HeaderError("an OME-TIFF with modulo axes, which is not supported")
        numbers = {name: int(text) for name, text in element.attrib.items() if name in _OME_NUMBERS}
        planes += prod(numbers.values()) if element.tag.endswith("Pixels") else max(numbers.values(), default=0)
        if planes > MOST_PLANES:
            raise HeaderError(f"an OME-TIFF whose description has more than {MOST_PLANES} planes")


def _by_axes(series: "TiffPageSeries", pages: _Planes, size: int) -> list[_Planes]:
    """Group the pages of a series into images, whose planes are the channels (axis C), in the order of the axes.

    Raises:
        HeaderError: the axes do not fit the pages, or the planes of a page lie outside the file.
    """
    axes, shape = series.get_axes(squeeze=False), series.get_shape(squeeze=False)
    first = pages[0]
    planes, rest = divmod(prod(shape), first.page.size or 1)
    if len(pages) == 1 and planes > 1:  # one header for planes that follow one another
        page = first.page
        if page.compression != 1 or not page.is_contiguous or page.dataoffsets[0] + planes * page.nbytes > size:
            raise HeaderError("a damaged TIFF image: the file is truncated")
        pages = [first._replace(plane=plane) for plane in range(planes)]
    outer = next((number for number in range(len(shape) + 1) if prod(shape[:number]) == len(pages)), None)
    if rest or planes != len(pages) or outer is None:
        raise HeaderError(f"a TIFF file whose axes {axes} {shape} do not fit its {len(pages)} pages")
    if planes > 1 and series.kind in ("ome", "imagej"):
        pages = [plane._replace(lookup=True) for plane in pages]
    order = sorted(range(outer), key=lambda number: axes[number] == "C")
    channels = prod(length for axis, length in zip(axes[:outer], shape, strict=False) if axis == "C")
    numbers = np.arange(planes).reshape(shape[:outer]).transpose(order).reshape(-1, channels)
    return [[pages[number] for number in row] for row in numbers.tolist()]


def _decoded(image: _Planes, encoded: bytes, most_bands: int, max_pixels: int) -> Decoded:
    """Decode an image, whose planes all have the size and the type of the first one."""
    number, page = image[0].number, image[0].page
    bands = sum(plane.page.samplesperpixel for plane in image)
    if not 1 <= bands <= most_bands:
        raise HeaderError(f"a TIFF image with {bands} bands, but only 1 to {most_bands} bands are supported")
    for plane in image:
        _check(plane.page, max_pixels)
        _check_parts(plane.page, len(encoded))
        if (plane.page.shape, plane.page.dtype) != (page.shape, page.dtype):
            raise HeaderError(
                f"a TIFF image whose channels differ: {plane.page.shape} {plane.page.dtype} and {page.shape} "
                f"{page.dtype}"
            )
    if all(_is_plain(plane) for plane in image):
        values = (
            np.concatenate([_values(plane, encoded) for plane in image], axis=2)
            if bands > 1
            else _values(image[0], encoded)
        )
        orientation = int(page.tags.valueof(ORIENTATION, 1))
        mode = _mode(page) if len(image) == 1 else None
        return Decoded(values, orientation, mode, _nodata(page, values.dtype))
    if len(image) > 1 or page.dtype not in (np.bool_, np.uint8, np.uint16):
        raise _unsupported(page)
    if page.dtype == np.uint16:  # Pillow converts the values to 8 bits
        check_range(_values(image[0], encoded))
    return _read_by_pillow(encoded, number, page)


def _nodata(page: "TiffPage", dtype: np.dtype) -> float | None:
    """Return the value of GDAL's tag, rounded as the values of the image are; None if there is no tag."""
    text = page.tags.valueof(NODATA)
    if text is None:
        return None
    try:
        value = float(str(text).strip())
    except ValueError:
        raise HeaderError(f"a TIFF image whose tag {NODATA} (GDAL_NODATA) is {text!r:.40}, not a number") from None
    if page.photometric == INVERTED:
        value = 2**page.bitspersample - 1 - value
    with np.errstate(over="ignore"):
        return float(np.float32(value)) if dtype.kind == "f" else value


def _encoded(image: Decoded) -> bytes:
    """Return a TIFF file of one page, from which `read` returns the image."""
    from tifffile import imwrite

    mode, file = image.mode or "", BytesIO()
    text = [] if image.nodata is None else [(NODATA, "s", 0, repr(image.nodata), True)]
    colors = 3 if mode.startswith("RGB") else 1
    extra = ["unassalpha"] if mode.endswith("A") else ["unspecified"] * (image.values.shape[2] - colors)
    imwrite(
        file,
        image.values if image.values.shape[2] > 1 else image.values[..., 0],
        photometric="rgb" if colors == 3 else "minisblack",
        planarconfig="contig" if image.values.shape[2] > 1 else None,
        extrasamples=extra or None,
        metadata=None,
        extratags=[(ORIENTATION, "H", 1, image.orientation, True), *text],
    )
    return file.getvalue()


def _is_plain(plane: _Plane) -> bool:
    """Return True if tifffile reads the bands of a plane. Otherwise, Pillow reads the page."""
    page = plane.page
    extra, colors = tuple(page.extrasamples), (GRAY, RGB) if page.bitspersample == 8 else (INVERTED, GRAY, RGB)
    return (
        page.compression in COMPRESSIONS
        and (page.photometric in colors or (plane.lookup and page.photometric == PALETTE))
        and page.bitspersample in (*range(8, 17), 32, 64)
        and (page.samplesperpixel > 4 or extra != (PREMULTIPLIED,))
    )


def _values(plane: _Plane, encoded: bytes) -> np.ndarray:
    """Return the values (H, W, bands) of a plane."""
    page = plane.page
    if plane.plane is None:
        values = page.asarray(squeeze=False, maxworkers=1)  # (bands, 1, H, W, 1) or (1, 1, H, W, bands)
    else:
        dtype = np.dtype(page.parent.byteorder + cast(np.dtype, page.dtype).char)
        start = page.dataoffsets[0] + plane.plane * page.nbytes
        values = np.frombuffer(encoded, dtype, page.size, start).reshape(page.shaped)
    values = values[:, 0].transpose(1, 2, 0, 3).reshape(*values.shape[2:4], -1)
    return values.dtype.type(2**page.bitspersample - 1) - values if page.photometric == INVERTED else values


def _unsupported(page: "TiffPage") -> HeaderError:
    kind = (
        f"the compression {page.compression!r}, the colour type {page.photometric!r} and {page.samplesperpixel} bands"
    )
    return HeaderError(
        f"a TIFF image with {kind}, which is not supported. Save it as gray, RGB or bands with LZW or deflate"
    )


def _read_by_pillow(encoded: bytes, number: int, page: "TiffPage") -> Decoded:
    """Read a page with Pillow, which bounds the memory of a strip or tile by the size in the header.

    Raises:
        HeaderError: Pillow does not read such pages, or reads only some of the bands.
    """
    bands, size, unsupported = page.samplesperpixel, (page.imagewidth, page.imagelength), _unsupported(page)
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
    # In a palette, CMYK or bits, the value of the tag is not a value of the pixels.
    kept = page.bitspersample == 8 and page.photometric in (INVERTED, GRAY, RGB, YCBCR)
    return Decoded(pixels.reshape(*pixels.shape[:2], -1), 1, mode, _nodata(page, pixels.dtype) if kept else None)


def _check(page: "TiffPage", max_pixels: int) -> None:
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
    if prod(page.shaped) != height * width * bands:
        raise HeaderError("a TIFF image with a depth axis, which is not supported")
    if page.compression not in (PILLOW_COMPRESSIONS if page.bitspersample <= 8 else COMPRESSIONS):
        raise HeaderError(
            f"a TIFF image with the compression {page.compression!r}, which is not supported. Save it with LZW or "
            "deflate"
        )
    unsigned = page.dtype in (np.bool_, np.uint8, np.uint16)
    if page.photometric not in (PILLOW_COLOURS if unsigned else (GRAY, RGB)):
        raise HeaderError(
            f"a TIFF image with the colour type {page.photometric!r}, which is not supported. Save it as gray or RGB"
        )
    if (
        page.bitspersample not in (1, 2, 4, *range(8, 17), 32, 64)
        or page.dtype is None
        or page.dtype.kind not in "buif"
    ):
        raise HeaderError(
            f"a TIFF image with {page.bitspersample} bits per band ({page.dtype}), which is not supported. Save it "
            "with whole numbers of 8 or 16 bits, or with floating-point numbers of 32 bits"
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
