"""Decoders of image formats that other code adds: the registry `DECODERS`, group `tessera.decoders` (docs/own_data.md).

A decoder is a module, or another object with the functions of `Decoder`, registered under the name of its format. It
gets the files that begin with the bytes of neither JPEG, PNG nor WebP.
"""

from typing import Literal, NamedTuple, Protocol, cast

import numpy as np

from tessera.data.headers import HeaderError, is_jpeg, is_png
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
    any_order: bool = False
    """True if the file does not say which axis holds the bands, so that `values` are (H, W, bands) or (bands, H, W)."""


class Decoder(Protocol):
    """Decoder of one format.

    A decoder of files that may hold several images (pages) also has the functions of `PagedDecoder`.
    """

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


class PagedDecoder(Decoder, Protocol):
    """Decoder of files that may hold several images. Its function `read` refuses such files."""

    def count(self, encoded: bytes) -> int:
        """Return the number of images of a file, without decoding their values.

        Raises:
            HeaderError: as `read`.
        """
        ...

    def single(self, encoded: bytes, pages: int | Literal["max"], *, most_bands: int, max_pixels: int) -> bytes:
        """Return a file that `read` reads: of image number `pages`, or of the maximum of all images.

        A file of one image is returned unchanged.

        Raises:
            HeaderError: as `read`; or `pages` is `max`, and the images differ in their size, bands or type.
        """
        ...


MOST_BANDS = 2**12
"""Maximum number of bands of an image in a data set whose number of channels is not known."""

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


def paged_decoder_of(encoded: bytes) -> PagedDecoder | None:
    """Return the decoder of a file; None if its format never holds several images."""
    name = decoder_of(encoded)
    return cast(PagedDecoder, DECODERS[name]) if name is not None and hasattr(DECODERS[name], "single") else None


def is_webp(encoded: bytes) -> bool:
    """Return True if the first bytes of a file are those of a WebP."""
    return encoded.startswith(b"RIFF") and encoded[8:12] == b"WEBP"


def read(name: str, encoded: bytes, *, channels: int | None, max_pixels: int) -> Decoded:
    """Decode a file of one image by the decoder `name`.

    Args:
        name: name of the decoder.
        encoded: content of the file.
        channels: number of channels of the data set; None if it is not known.
        max_pixels: maximum number of pixels.

    Raises:
        HeaderError: as `Decoder.read`, or neither the file nor `channels` says which axis holds the bands.
    """
    most = MOST_BANDS if channels is None else max(channels, 4)
    found = DECODERS[name].read(encoded, most_bands=most, max_pixels=max_pixels)
    if not found.any_order:
        return found
    first, last = found.values.shape[0], found.values.shape[2]
    bands = min(first, last) if channels is None else channels
    if first == last or bands not in (first, last):
        raise HeaderError(
            f"an array of the shape {found.values.shape}, in which neither the first nor the last axis alone has "
            f"{bands} bands. Set data.channels to the number of bands, or save the arrays as (H, W, C) TIFFs"
        )
    return found._replace(values=found.values if bands == last else found.values.transpose(1, 2, 0))


def known_formats() -> str:
    """Return the names of all formats for messages, such as `JPEG, PNG, WebP or TIFF`."""
    *first, last = ["JPEG", "PNG", "WebP", *(name.upper() for name in DECODERS.names())]
    return f"{', '.join(first)} or {last}"
