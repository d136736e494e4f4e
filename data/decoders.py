"""Decoders of image formats that other code adds: the registry `DECODERS`, group `tessera.decoders` (docs/own_data.md).

A decoder is a module, or another object with the functions of `Decoder`, registered under the name of its format. It
gets the files that begin with the bytes of neither JPEG, PNG nor WebP.
"""

from typing import NamedTuple, Protocol

import numpy as np

from tessera.data.headers import is_jpeg, is_png
from tessera.data.levels import check_range, eight_bits
from tessera.runtime.plugins import Registry


class Decoded(NamedTuple):
    """Image of a file."""

    values: np.ndarray
    """Values (H, W, bands) as stored in the file, not turned upright: uint8, uint16, int16 or float32. Values of other
    types of numbers are accepted if the type of the data set holds each of them."""
    orientation: int
    """EXIF orientation; 1 is upright."""
    mode: str | None
    """Pillow's name of the mode for gray or RGB bands, with or without alpha; None for other bands."""
    nodata: float | None = None
    """Value that marks pixels without data, if the file names one, such as in GDAL's tag."""


class Decoder(Protocol):
    """Decoder of one format."""

    EXTENSION: str
    """File name extension of images of this format."""

    def matches(self, encoded: bytes) -> bool:
        """Return True if the first bytes of a file are those of this format."""
        ...

    def read(self, encoded: bytes, *, most_bands: int, max_pixels: int) -> Decoded:
        """Decode a file. Images may come from untrusted sources, so limits are checked before pixels are decoded.

        Raises:
            HeaderError: the file is damaged, not supported, has more than `max_pixels` pixels or more than `most_bands`
                bands, or a package that reads it is missing.
        """
        ...


DECODERS: Registry[Decoder] = Registry(
    "decoder",
    {},
    group="tessera.decoders",
    expected="a module with the functions `matches` and `read`",
    valid=lambda value: callable(getattr(value, "matches", None)) and callable(getattr(value, "read", None)),
)


def decoder_of(encoded: bytes) -> str | None:
    """Return the name of the decoder of a file; None if no decoder of the registry reads it."""
    if is_jpeg(encoded) or is_png(encoded) or is_webp(encoded):
        return None
    return next((name for name in DECODERS.names() if DECODERS[name].matches(encoded)), None)


def is_webp(encoded: bytes) -> bool:
    """Return True if the first bytes of a file are those of a WebP."""
    return encoded.startswith(b"RIFF") and encoded[8:12] == b"WEBP"


def read(name: str, encoded: bytes, *, most_bands: int, max_pixels: int) -> Decoded:
    """Decode a file by the decoder `name`, and convert values of 16 bits to 8 bits (`data.levels`).

    Raises:
        HeaderError: as `Decoder.read`, or the values of 16 bits do not use their range.
    """
    found = DECODERS[name].read(encoded, most_bands=most_bands, max_pixels=max_pixels)
    if found.values.dtype == np.uint8:
        return found
    check_range(found.values)
    return found._replace(values=eight_bits(found.values))


def known_formats() -> str:
    """Return the names of all formats for messages, such as `JPEG, PNG, WebP or TIFF`."""
    *first, last = ["JPEG", "PNG", "WebP", *(name.upper() for name in DECODERS.names())]
    return f"{', '.join(first)} or {last}"
