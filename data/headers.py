"""Headers of JPEGs, PNGs and NumPy arrays, read before the values. Every function takes time linear in the file size.

Images may come from untrusted sources. Pillow reads the segments of a JPEG and the chunks of a PNG one by one in
Python, and libjpeg decodes every scan of a JPEG at the full size of the image. A small hostile file could therefore
occupy a loader worker for hours. Files with more segments, chunks or scans than any encoder writes are refused here.
"""

import re
import zlib
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

import numpy as np

MAX_SIDE = 65_535
"""Maximum width and height of an image in pixels, for all formats. It is the maximum of the JPEG format."""
LARGEST_JPEG_HEADER = 2**24  # maximum number of bytes before the pixels, for example of colour profiles and thumbnails
MOST_SEGMENTS = 4096  # maximum number of segments before the pixels of a JPEG
MOST_JUNK = 2**16  # maximum number of bytes between the segments of a JPEG header
MOST_SCANS = 100  # maximum number of scans of a JPEG; progressive JPEGs in practice have about ten
MOST_CHUNKS = 2**16  # maximum number of chunks of a PNG; most encoders write chunks of 8 KiB or more
MOST_SCANNED = 3 * 10**9  # maximum number of scans times pixels of a JPEG; each scan costs time for every pixel
JPEG_RATIO = 512  # maximum number of pixels per byte of a JPEG; Huffman coding stores at least one bit per 8 x 8 pixels
PNG_RATIO = 1032  # maximum compression ratio of deflate, which stores 258 bytes in 2 bits at best: 258 * 8 / 2
INFLATED_AT_ONCE = 2**18  # maximum number of bytes that are decompressed at once

_NOT_FILL = re.compile(rb"[^\xff]")
_START, _FRAMES = b"\xff\xd8\xff", {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_SEGMENTS = {*range(0xC0, 0xD0), *range(0xDA, 0xDE), *range(0xE0, 0xF0), 0xFE} - {0xC8}
_PNG_START = b"\x89PNG\r\n\x1a\n"
_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # number of values per pixel for each colour type of PNG
_ADAM7 = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))
"""First row, first column, row step and column step of each of the seven passes of an interlaced PNG."""


class HeaderError(ValueError):
    """Raised if the header of an image is damaged or exceeds a limit. The message states the reason."""


class MissingPackageError(HeaderError):
    """Raised if a package that reads a format is not installed."""

    def __init__(self, formats: str, package: str | None, extra: str) -> None:
        super().__init__(
            f"{formats} images need the package {package}. Install it with: pip install 'tessera-ssl[{extra}]'"
        )


NO_MEMORY = ("allocate memory", "Insufficient memory", "out of memory", "decoder error -9")
"""Substrings of out-of-memory errors of libjpeg, Pillow and torch that are not a `MemoryError`."""


def raise_lack_of_memory(error: Exception) -> None:
    """Raise `MemoryError` if the error of a library is a lack of memory, so that no intact image counts as corrupt."""
    if isinstance(error, MemoryError) or any(part in str(error) for part in NO_MEMORY):
        raise MemoryError(str(error)) from error


class JpegHeader(NamedTuple):
    """Size, number of components and APP1 segments of a JPEG, from its header."""

    width: int
    height: int
    components: int
    applications: list[bytes]
    """Contents of the APP1 segments, which hold EXIF or XMP data."""


def read_array_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of a .npy file: the shape, True if columns are contiguous, and the type of the values.

    `numpy.load` allocates the memory for the shape before it reads the values. A caller that compares the shape with
    the size of the file first needs no more memory than the file.

    Raises:
        HeaderError: the header is damaged, or the values are Python objects.
    """
    try:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, columns_first, dtype = read(file)
    except Exception as error:  # NumPy raises many kinds of errors for damaged files
        raise_lack_of_memory(error)
        raise HeaderError(f"a damaged NumPy array: {error}") from error
    if dtype.hasobject:
        raise HeaderError(f"a NumPy array of the type {dtype}, which is not supported")
    return shape, columns_first, dtype


def is_jpeg(encoded: bytes) -> bool:
    """Return True if the first bytes of a file are those of a JPEG."""
    return encoded[:3] == _START


def is_png(encoded: bytes) -> bool:
    """Return True if the first bytes of a file are those of a PNG."""
    return encoded[:8] == _PNG_START


def check_sides(width: int, height: int, max_pixels: int) -> None:
    """Raise `HeaderError` if a side or the number of pixels of an image is not positive or exceeds a limit."""
    if min(width, height) < 1:
        raise HeaderError(f"a damaged image: the size in the header is {width} x {height} pixels")
    if width * height > max_pixels:
        raise HeaderError(f"{width} x {height} pixels are more than the limit of {max_pixels}")
    if max(width, height) > MAX_SIDE:
        raise HeaderError(f"an image of {width} x {height} pixels has a side above the limit of {MAX_SIDE} pixels")


def read_jpeg(encoded: bytes) -> JpegHeader:
    """Read the header of a JPEG up to the first scan.

    Raises:
        HeaderError: the header is damaged or truncated, or exceeds a limit, or the file is too short for its pixels.
    """
    place, junk, frame, applications = 2, 0, None, []
    for _ in range(MOST_SEGMENTS):
        marker, first = _next_marker(encoded, place)
        junk += first - 2 - place
        if junk > MOST_JUNK or first > LARGEST_JPEG_HEADER:
            raise HeaderError("a damaged JPEG: its header is too large or has too many bytes outside of segments")
        if marker == 0 or 0xD0 <= marker <= 0xD7:
            place = first
            continue
        length = encoded[first] << 8 | encoded[first + 1]
        if marker not in _SEGMENTS or length < 2 or first + length > len(encoded):
            raise HeaderError(f"a damaged JPEG: its header has an invalid segment (marker {marker:#04x})")
        body = encoded[first + 2 : first + length]
        if marker in _FRAMES:
            if frame is not None or len(body) < 6:
                raise HeaderError("a damaged JPEG: its frame header is damaged or repeated")
            frame = (marker, int.from_bytes(body[3:5], "big"), int.from_bytes(body[1:3], "big"), body[5])
        elif marker == 0xE1:
            applications.append(body)
        elif marker == 0xDA:
            if frame is None or not body:
                raise HeaderError("a damaged JPEG: the frame header is missing")
            _check_scans(encoded, frame, body[0])
            return JpegHeader(*frame[1:], applications)
        place = first + length
    raise HeaderError(f"a damaged JPEG: its header has more than {MOST_SEGMENTS} segments")


def _next_marker(encoded: bytes, place: int) -> tuple[int, int]:
    """Return the first marker of a JPEG at or after the index `place`, and the index of the byte after the marker.

    Raises:
        HeaderError: the file ends before the two bytes after the marker, which are the length of its segment.
    """
    first = place + 2
    if first + 2 <= len(encoded) and encoded[place] == 0xFF != encoded[place + 1]:  # usual case: no fill bytes
        return encoded[place + 1], first
    start = encoded.find(b"\xff", place)
    found = _NOT_FILL.search(encoded, start) if start >= 0 else None
    if found is None or found.end() + 2 > len(encoded):
        raise HeaderError("a damaged JPEG: the file is truncated in its header")
    return found[0][0], found.end()


def _check_scans(encoded: bytes, frame: tuple[int, int, int, int], components: int) -> None:
    """Raise `HeaderError` if a JPEG is too short for its pixels or has too many scans.

    `components` is the number of components in the first scan.
    """
    marker, width, height, all_components = frame
    if width * height > JPEG_RATIO * len(encoded):
        raise HeaderError(f"a damaged JPEG: {len(encoded)} bytes cannot hold {width} x {height} pixels")
    several = marker not in (0xC0, 0xC1) or components < all_components
    most = min(MOST_SCANS, MOST_SCANNED // max(width * height, 1))
    if several and encoded.count(b"\xff\xda") > most:
        raise HeaderError(f"a JPEG of {width} x {height} pixels with more than {most} scans, which is not supported")


def check_png(encoded: bytes, max_pixels: int) -> None:
    """Check the size and the chunks of a PNG before the pixels are decoded.

    Raises:
        HeaderError: the header is damaged or exceeds a limit, or the file is too short for its pixels.
    """
    if len(encoded) < 33 or encoded[12:16] != b"IHDR":
        raise HeaderError("a damaged PNG: its header is damaged")
    width, height = (int.from_bytes(encoded[place : place + 4], "big") for place in (16, 20))
    check_sides(width, height, max_pixels)
    stored = sum(end - start for start, end in _png_data(encoded))
    if not stored:
        raise HeaderError("a damaged PNG: its header is damaged, or the pixel data is missing")
    if _png_bytes(encoded) > PNG_RATIO * stored:
        raise HeaderError(f"a damaged PNG: {stored} bytes of pixel data cannot hold {width} x {height} pixels")


def holds_all_pixels(encoded: bytes) -> bool:
    """Return True if the compressed pixel data of a PNG has as many bytes as the image needs.

    Pillow accepts a PNG whose compressed data ends early, and leaves the missing rows black.
    """
    needed, inflate = _png_bytes(encoded), zlib.decompressobj()
    try:
        for start, end in _png_data(encoded):
            data = encoded[start:end]
            while data and needed > 0:
                needed -= len(inflate.decompress(data, INFLATED_AT_ONCE))
                data = inflate.unconsumed_tail
    except zlib.error:
        return False
    return needed <= 0


def _png_data(encoded: bytes) -> Iterator[tuple[int, int]]:
    """Yield the start and end indices of the data in each IDAT chunk of a PNG."""
    place = 8
    for _ in range(MOST_CHUNKS):
        length, kind = int.from_bytes(encoded[place : place + 4], "big"), encoded[place + 4 : place + 8]
        if kind == b"IDAT":
            yield place + 8, min(place + 8 + length, len(encoded))
        if len(kind) < 4 or kind == b"IEND":
            return
        place += 12 + length
    raise HeaderError(f"a damaged PNG: it has more than {MOST_CHUNKS} chunks")


def _png_bytes(encoded: bytes) -> int:
    """Return the size in bytes of the uncompressed pixel data of a PNG. Every row begins with a filter byte."""
    width, height = (int.from_bytes(encoded[place : place + 4], "big") for place in (16, 20))
    bits = encoded[24] * _PNG_CHANNELS.get(encoded[25], 1)
    passes = [(width, height)]
    if encoded[28]:
        passes = [(-(-(width - c) // across), -(-(height - r) // down)) for r, c, down, across in _ADAM7]
    return sum(rows * (1 + -(-columns * bits // 8)) for columns, rows in passes if columns > 0 and rows > 0)
