"""Decode images into upright tensors with C channels, in the type of the data set.

Images have H x W pixels. simplejpeg (with libjpeg-turbo) decodes upright JPEGs with one or three components, the usual
images in most data sets. Pillow decodes the remaining JPEGs, and all PNGs and WebPs. Pillow decodes a JPEG to the same
pixels as simplejpeg, but more slowly. Other formats have decoders in a registry (`data.decoders`).
"""

import warnings
from collections.abc import Sequence
from contextlib import suppress
from io import BytesIO
from typing import Any, Literal, cast

import numpy as np
import simplejpeg
import torch
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError
from torch import Tensor

from tessera.data.decoders import DECODERS, MOST_BANDS, Decoded, decoder_of, known_formats, read
from tessera.data.headers import (
    HeaderError,
    check_png,
    check_sides,
    holds_all_pixels,
    is_jpeg,
    is_png,
    raise_lack_of_memory,
    read_jpeg,
)
from tessera.data.levels import check_range, eight_bits
from tessera.data.nodata import filled, missing
from tessera.data.values import PNG_MODES, WHITE, fitted, mixed, read_png, to_channels, type_of
from tessera.encoders.base import PixelType
from tessera.runtime.user_error import printable

FORMATS = ("JPEG", "PNG", "WEBP")
"""Names of the image formats that Pillow is allowed to decode."""
ORIENTATION = 0x0112
"""EXIF tag that holds the orientation. Orientations are 1 to 8, and 1 is upright."""
FLIPPED_COLUMNS, FLIPPED_ROWS, TRANSPOSED = (2, 3, 6, 7), (3, 4, 7, 8), (5, 6, 7, 8)
"""Three overlapping groups of EXIF orientations. To turn an image upright, transpose the image if its orientation is in
`TRANSPOSED`, then reverse the rows if the orientation is in `FLIPPED_ROWS`, and the columns if it is in
`FLIPPED_COLUMNS`."""
MAX_PIXELS = 178_956_970
"""Default maximum number of pixels of an image, for all formats. Pillow has the same default."""
ROWS_AT_ONCE = 2**21
"""Number of pixels that are converted at once. Converting all pixels at once would need several times the memory."""
LARGEST_EXIF = 2**18
"""Maximum size in bytes of EXIF data. Larger data are ignored, because Pillow copies the data for each tag."""
_ARRAY_TYPES = ("uint8", "uint16", "int16", "float32", "uint32", "int32", "int64", "float16")
"""Types of arrays and tensors that are accepted as images. The type of the data set must hold all values."""
_WIDE_MODES = ("I", "F")
"""First letters of the modes of Pillow images with values of more than 8 bits."""
_TURNS = (b"eXIf", b"Raw profile", b"xmp")
"""Bytes in PNGs that may state an orientation."""
COLOUR_KEY = "a 16-bit PNG with a transparent colour, which is not supported. Save it with alpha"
_STRAIGHT = {"La": "LA", "RGBa": "RGBA"}
"""Modes of Pillow with premultiplied alpha, and the modes to which Pillow converts them."""
_CHANNELS = (1, 3, 4)
"""Numbers of channels to which every JPEG, PNG and WebP image can be converted: 1 (gray), 3 (RGB) and 4 (RGBA)."""


Undecoded = bytes | bytearray | memoryview | Image.Image | np.ndarray | Tensor
"""An image as data sets return it: an encoded file, also as a uint8 array or tensor (N,); a Pillow image; an array
(H, W) or (H, W, C); or a tensor (H, W) or (C, H, W). Arrays and tensors hold numbers (`_ARRAY_TYPES`)."""


class ImageError(ValueError):
    """Raised if an image cannot be decoded or is not accepted. The message states the reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(printable(reason))  # escape bytes of the file that a library's message may quote


def decode(
    encoded: Undecoded,
    *,
    max_pixels: int = MAX_PIXELS,
    channels: int = 3,
    pixel_type: PixelType = "uint8",
    nodata: float | Literal["auto"] | None = None,
    fill: Sequence[float] | None = None,
) -> Tensor:
    """Decode an image file to an upright image (C, H, W) of the type `pixel_type`. Decoded images are only converted.

    The image is turned upright according to its EXIF orientation. The memory format is channels-last. With three
    channels, the image is RGB, and transparent parts show a white background. With one channel, the image is the
    luminance of the RGB image. With four channels, the image is RGBA, and alpha is the largest value of the type if the
    file has no transparency. A TIFF with C bands keeps its bands, for any C.

    With the type uint8, values of 16-bit gray images and 16-bit TIFFs are divided by 257. In 16-bit colour PNGs, only
    the upper byte of each value is kept. The result differs from division by 257 by at most one level. A 16-bit image
    is refused if it does not use the range of 16 bits (`data.levels`). With any other type, all values are kept, and
    images of 8 bits are refused.

    Only the first picture of an animation is decoded. The size in the header is compared with `max_pixels`,
    `data.headers.MAX_SIDE` and Pillow's own limit before any pixel is decoded.

    The EXIF orientation of a Pillow image is applied only if Pillow has opened this object from a file. Other Pillow
    images, such as the result of `rotate`, keep the EXIF data of their file, but may be upright already. They are taken
    as they are, with a warning.

    Args:
        encoded: content of the image file, or a decoded image.
        max_pixels: maximum number of pixels of the image.
        channels: number of channels (C).
        pixel_type: type of the data set.
        nodata: value of pixels without data; `auto` for the value that the file names.
        fill: value of each channel for pixels without data; None leaves their values as they are.

    Raises:
        ImageError: the file is damaged, truncated or of another format, has more than `max_pixels` pixels or a side
            above the limit, cannot be converted to `channels` channels, has values that `pixel_type` does not hold, or
            has no pixel with data.
        MemoryError: this process runs out of memory. The file may be intact.
    """
    options = {"pixel_type": pixel_type, "nodata": nodata, "fill": fill}
    return Picture(encoded, max_pixels=max_pixels, channels=channels, **options).pixels()


def stored_type(image: Undecoded, *, max_pixels: int = MAX_PIXELS) -> PixelType:
    """Return the smallest type of pixels that holds the values of an image.

    The pixels of images of 8 bits, and of 16-bit PNGs, are not decoded.

    Raises:
        ImageError: the image is damaged, or its values are not numbers that a type holds.
    """
    encoded = image if isinstance(image, bytes) else _encoded(image)
    if encoded is not None and not encoded:
        raise ImageError("the file is empty")
    try:
        if encoded is None:
            return "uint8" if _has_bytes(image) else type_of(_array(image))
        if (name := decoder_of(encoded)) is not None:
            return type_of(DECODERS[name].read(encoded, most_bands=MOST_BANDS, max_pixels=max_pixels).values)
    except HeaderError as error:
        raise ImageError(str(error)) from error
    if _plain_jpeg(encoded) is None:
        _open(encoded, 3, max_pixels)
    return "uint16" if _has_16_bits(encoded) else "uint8"


def check_kind(image: object) -> None:
    """Check that an object is an image of a supported type (`Undecoded`). Its content is not checked.

    Raises:
        TypeError: the object is not an image, or its values are of another type. The message says what to do.
    """
    if isinstance(image, Image.Image) and image.mode == "LAB":
        raise TypeError("it is a Pillow image of the mode LAB, which Pillow does not convert. Return RGB images.")
    if isinstance(image, bytes | bytearray | memoryview | Image.Image):
        return
    if not isinstance(image, np.ndarray | Tensor):
        raise TypeError(
            f"it is a {type(image).__name__}. Return a Pillow image, an encoded file, an array or a tensor."
        )
    name = str(image.dtype).removeprefix("torch.")
    if name not in _ARRAY_TYPES or (image.ndim == 1 and name != "uint8"):
        raise TypeError(
            f"its values are {image.dtype}. Return values of the type uint8, uint16, int16 or float32 as they were "
            "measured: leave out transforms such as Normalize, because the run normalises the pixels itself."
        )
    if not 1 <= image.ndim <= 3:
        form = "(H, W, C)" if isinstance(image, np.ndarray) else "(C, H, W)"
        raise TypeError(f"it has the shape {tuple(image.shape)}. Return one image of shape {form}.")


def upright(image: Image.Image) -> Image.Image:
    """Turn a Pillow image upright, even if it is in memory. An image with damaged EXIF data stays as it is."""
    return ImageOps.exif_transpose(image) if _orientation(image) in range(2, 9) else image


class Picture:
    """An image whose size is known: an encoded image whose header has been read, or a decoded image.

    JPEGs are decoded by `pixels`. Images of all other formats are decoded by the constructor.

    Args:
        image: content of the image file, or a decoded image (`Undecoded`).
        max_pixels: maximum number of pixels of the image.
        channels: number of channels of the decoded image (C).
        pixel_type: type of the data set.
        nodata: as in `decode`.
        fill: as in `decode`.
        fewer: accept images with fewer bands, whose other channels are 0. Gray stays one band.

    Raises:
        ImageError: the image cannot be decoded or is not accepted, for the reasons that `decode` lists. For a damaged
            JPEG with a good header, `pixels` raises this error.
        TypeError: the object is not an image; see `check_kind`.
    """

    encoded: bytes
    plain: bool
    """True for a JPEG with one or three components that is stored upright."""
    size: tuple[int, int]
    """Height and width of the upright image."""
    absent: Tensor | None
    """True for values without data, (bands, H, W) bool; None if all values hold data."""

    def __init__(
        self,
        image: Undecoded,
        *,
        max_pixels: int = MAX_PIXELS,
        channels: int = 3,
        pixel_type: PixelType = "uint8",
        nodata: float | Literal["auto"] | None = None,
        fill: Sequence[float] | None = None,
        fewer: bool = False,
    ) -> None:
        self._max_pixels, self._channels, self._pixels = max_pixels, channels, None
        self.plain, self.absent, self._all_channels, self._fewer = False, None, channels, fewer
        encoded = image if isinstance(image, bytes) else _encoded(image)
        self.encoded = encoded or b""
        if encoded is not None and not encoded:
            raise ImageError("the file is empty")
        name = None if encoded is None else decoder_of(encoded)
        if fewer and name is None and (bands := _bands_of(image, encoded)) < channels:
            self._channels = bands
        if name is None and pixel_type == "uint8" and not isinstance(nodata, int | float):
            self._read(image, encoded)
            return
        try:
            self._read_values(image, encoded, name, pixel_type, nodata)
        except HeaderError as error:
            raise ImageError(str(error)) from error
        assert self._pixels is not None
        self.size = self._pixels.shape[1], self._pixels.shape[2]
        if self.absent is not None and fill is not None:
            self._pixels = filled(self._pixels, self.absent, fill[: self._channels])

    @property
    def bands(self) -> int:
        """Number of bands of the image that are channels: C, or fewer with `fewer`."""
        return self._channels

    def _read_values(
        self,
        image: Undecoded,
        encoded: bytes | None,
        name: str | None,
        pixel_type: PixelType,
        nodata: float | Literal["auto"] | None,
    ) -> None:
        """Read an image whose values have more than 8 bits, or pixels without data.

        `name` is the name of its decoder; None if no decoder of the registry reads it.

        Raises:
            HeaderError: the image does not fit the data set, or no pixel holds data.
        """
        channels = self._channels
        if name is not None and encoded is not None:
            stored = read(name, encoded, channels=channels, max_pixels=self._max_pixels)
        elif pixel_type == "uint8":
            if encoded is not None and is_jpeg(encoded):
                raise ImageError(
                    "a JPEG in a data set with data.nodata. JPEG changes values, so it cannot mark pixels. Leave out "
                    "data.nodata, or save the images as PNG"
                )
            self._read(image, encoded)
            assert self._pixels is not None
            mask = missing(self._pixels.permute(1, 2, 0).numpy(), None if nodata == "auto" else nodata)
            self.absent = None if mask is None else _upright(mask, 1)
            return
        else:
            stored = _stored(image, encoded, pixel_type, channels, self._max_pixels)
        values, mark = stored.values, stored.nodata if nodata == "auto" else nodata
        bands = values.shape[2]
        if self._fewer and bands < channels:
            self._channels = channels = bands
        if bands != channels and (stored.mode is None or channels not in _CHANNELS):
            raise ImageError(
                f"a {(name or 'decoded').upper()} image with {bands} bands cannot be converted to {channels} channels. "
                f"Read its bands with data.channels {bands}"
            )
        mask = missing(values, mark)
        if pixel_type == "uint8":
            values = _converted_bands(_eight_bits_of(values), channels)
        else:
            values = to_channels(fitted(values, pixel_type, mask), stored.mode or "", channels)
        if mask is not None:
            mask = mask if bands == channels else np.repeat(mask.any(2, keepdims=True), channels, axis=2)
            self.absent = _upright(mask, stored.orientation)
        self._pixels = _upright(values, stored.orientation)

    def _read(self, image: Undecoded, encoded: bytes | None) -> None:
        """Read an image of 8 bits, or convert an image to 8 bits. A JPEG is decoded later."""
        channels, max_pixels = self._channels, self._max_pixels
        if encoded is None:
            self._pixels = _decoded_pixels(image, channels, max_pixels)
            self.size = self._pixels.shape[1], self._pixels.shape[2]
            return
        plain = _plain_jpeg(encoded)
        if plain is not None:
            self.plain = True
            _check(plain, channels, max_pixels)
            self.size = plain[1], plain[0]
            return
        opened = _open(encoded, channels, max_pixels)
        if opened.format not in ("PNG", "WEBP"):  # the format is JPEG, or MPO, which is a JPEG of several pictures
            width, height = opened.size
            self.size = (width, height) if _orientation(opened) in TRANSPOSED else (height, width)
        else:  # decode the pixels now, because the EXIF data with the orientation may follow the pixels
            self._pixels = _loaded(opened, channels, encoded=encoded)
            self.size = self._pixels.shape[1], self._pixels.shape[2]

    @property
    def held_bytes(self) -> int:
        """Size in bytes of the encoded image and of its pixels, if they are decoded already."""
        return len(self.encoded) + (0 if self._pixels is None else self._pixels.nbytes)

    def fraction(self, shrink: int) -> int:
        """Return the largest factor, at most `shrink`, by which the decoder can shrink the image.

        The factor is 1 for all formats except JPEG.
        """
        if self._pixels is not None:
            return 1
        # If `shrink` does not divide a side, libjpeg pads the last block of that side. Turning the image upright could
        # move the padded block to the beginning of the side, so a smaller factor is used.
        while not self.plain and any(side % shrink for side in self.size):
            shrink //= 2
        return shrink

    def pixels(self, shrink: int = 1) -> Tensor:
        """Return the decoded pixels (C, H, W), in the form that `decode` describes.

        A JPEG is decoded at 1 / `shrink` of its size, where `shrink` is 1, 2, 4 or 8. Sides are rounded up. Decoding at
        a smaller size is faster, because libjpeg transforms only the lower frequencies of each block. Each decoded
        pixel is about the mean of `shrink` x `shrink` pixels of the full image.

        Raises:
            ImageError: the file is damaged or truncated.
        """
        found = self._own_pixels(shrink)
        if self._channels == self._all_channels:
            return found
        pixels = found.new_zeros(*found.shape[1:], self._all_channels).permute(2, 0, 1)
        pixels[: self._channels] = found
        return pixels

    def _own_pixels(self, shrink: int) -> Tensor:
        """Return the decoded pixels (bands, H, W)."""
        if self._pixels is not None:
            return self._pixels
        pixels = self._plain_pixels(shrink) if self.plain and self._channels in (1, 3) else None
        if pixels is None:
            pixels = _loaded(_open(self.encoded, self._channels, self._max_pixels), self._channels, shrink)
        if tuple(pixels.shape[1:]) != tuple(-(-side // shrink) for side in self.size):
            raise ImageError("a damaged JPEG: the size in the header differs from the size of the decoded pixels")
        return pixels

    def _plain_pixels(self, shrink: int) -> Tensor | None:
        """Return the pixels (C, H, W) of a plain JPEG; None if simplejpeg cannot decode it, but Pillow may.

        Raises:
            ImageError: the file is truncated.
        """
        height, width = (-(-side // shrink) for side in self.size)
        color = "GRAY" if self._channels == 1 else "RGB"
        try:  # `strict` also refuses damage that libjpeg only warns of, such as an early end of the file
            pixels = simplejpeg.decode_jpeg(
                self.encoded, color, min_height=height, min_width=width, min_factor=shrink, strict=True
            )
        except ValueError as error:
            raise_lack_of_memory(error)
            if self.encoded.rfind(b"\xff\xd9") < self.encoded.rfind(b"\xff\xda"):  # no end after the last scan
                raise ImageError("a damaged JPEG: the file is truncated") from error
            return None
        return torch.from_numpy(pixels).permute(2, 0, 1)


def _encoded(image: Undecoded) -> bytes | None:
    """Return the content of an image file, or None for a decoded image."""
    check_kind(image)
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if isinstance(image, np.ndarray | Tensor) and image.ndim == 1:
        return np.asarray(image).tobytes()
    return None


def _bands_of(image: Undecoded, encoded: bytes | None) -> int:
    """Return the number of bands of a decoded image, or 1 for a gray and 3 for a colour JPEG, PNG or WebP."""
    if encoded is None and not isinstance(image, Image.Image):
        shape = np.shape(cast(Any, image))
        return 1 if len(shape) == 2 else shape[0 if isinstance(image, Tensor) else 2]
    if encoded is not None and is_png(encoded):
        return 1 if encoded[25:26] in (b"\0", b"\4") else 3
    if encoded is not None and is_jpeg(encoded):
        with suppress(HeaderError):  # the decoder reports the damage
            return 1 if read_jpeg(encoded).components == 1 else 3
    gray = isinstance(image, Image.Image) and image.mode in ("1", "L", "LA", "La", "I", "I;16", "F")
    return 1 if gray else 3


def _decoded_pixels(image: Undecoded, channels: int, max_pixels: int) -> Tensor:
    """Convert a decoded image to upright pixels (C, H, W) uint8, as the file of the image would be converted."""
    if isinstance(image, Image.Image):
        _check(image.size, channels, max_pixels)
        try:
            image.load()
        except Exception as error:  # Pillow raises many kinds of errors for damaged files
            raise_lack_of_memory(error)
            raise ImageError(f"a damaged image: {error}") from error
        return _upright(_converted(image, channels), _orientation_of_object(image))
    pixels = np.asarray(image)
    if pixels.dtype != np.uint8:
        raise ImageError(
            f"an image of the type {pixels.dtype} in a data set of the type uint8. Return values from 0 to 255, "
            "without transforms such as ToTensor and Normalize, or set data.pixel_type"
        )
    pixels = pixels if pixels.flags.writeable else pixels.copy()  # torch warns of arrays that are read-only
    if isinstance(image, Tensor) and pixels.ndim == 3:
        pixels = pixels.transpose(1, 2, 0)
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels  # (H, W, C)
    height, width, bands = pixels.shape
    try:
        check_sides(width, height, max_pixels)
    except HeaderError as error:
        raise ImageError(str(error)) from error
    if bands != channels:
        if bands not in _CHANNELS or channels not in _CHANNELS:
            raise ImageError(f"an image of the shape {tuple(image.shape)} cannot be converted to {channels} channels")
        pixels = _converted(Image.fromarray(np.ascontiguousarray(pixels[..., 0] if bands == 1 else pixels)), channels)
    return _upright(pixels, 1)


def _check(size: tuple[int, int], channels: int, max_pixels: int) -> None:
    """Check the header of an image.

    Raises:
        ImageError: the `size` (width, height) is not positive or exceeds a limit, or the image cannot be converted to
            `channels` channels.
    """
    try:
        check_sides(*size, max_pixels)
    except HeaderError as error:
        raise ImageError(str(error)) from error
    if channels not in _CHANNELS:
        raise ImageError(f"a JPEG, PNG or WebP image cannot be converted to {channels} channels")


def check_header(encoded: bytes, max_pixels: int) -> None:
    """Check the header of an image file without Pillow, in time linear in the size of the file.

    Raises:
        ImageError: the header is damaged or exceeds a limit, or the file is too short for its pixels. Headers of WebPs
            and of other formats are not checked.
    """
    try:
        if is_png(encoded):
            check_png(encoded, max_pixels)
        elif is_jpeg(encoded):
            header = read_jpeg(encoded)
            check_sides(header.width, header.height, max_pixels)
    except HeaderError as error:
        raise ImageError(str(error)) from error


def _plain_jpeg(encoded: bytes) -> tuple[int, int] | None:
    """Return (width, height) of a JPEG with one or three components that is stored upright; None for other files.

    Raises:
        ImageError: the file is a JPEG with a damaged header.
    """
    if not is_jpeg(encoded):
        return None
    try:
        header = read_jpeg(encoded)
    except HeaderError as error:
        raise ImageError(str(error)) from error
    plain = header.components in (1, 3) and all(map(_stands_upright, header.applications))
    return (header.width, header.height) if plain else None


def _stands_upright(segment: bytes) -> bool:
    """Return True if an APP1 segment of a JPEG does not ask to rotate or mirror the image."""
    if not segment.startswith(b"Exif\0\0"):
        # The segment holds XMP data. Pillow looks for an orientation there if the EXIF data has none.
        return b"tiff:Orientation" not in segment
    exif = Image.Exif()
    try:
        exif.load(segment)
        return exif.get(ORIENTATION, 1) == 1
    except MemoryError:
        raise
    except Exception:  # Pillow raises many kinds of errors for damaged EXIF data
        return False


def _open(encoded: bytes, channels: int, max_pixels: int) -> Image.Image:
    """Open an image with Pillow. Pillow reads only the header."""
    check_header(encoded, max_pixels)
    try:
        image = Image.open(BytesIO(encoded), formats=FORMATS)
        _check(image.size, channels, max_pixels)
        return image
    except ImageError:
        raise
    except UnidentifiedImageError as error:
        raise ImageError(
            f"the file is not a {known_formats()} image (convert to PNG), or its header is damaged"
        ) from error
    except Image.DecompressionBombError as error:
        raise ImageError(str(error)) from error
    except Exception as error:  # Pillow raises many kinds of errors for damaged files
        raise_lack_of_memory(error)
        raise ImageError(f"a damaged image: {error}") from error


def _loaded(image: Image.Image, channels: int, shrink: int = 1, encoded: bytes = b"") -> Tensor:
    """Decode an image that Pillow has opened from the file `encoded`. Return upright pixels (C, H, W) uint8."""
    try:
        if shrink > 1 or channels == 1:  # let the JPEG decoder shrink the image or decode only its luminance
            size = (image.width // shrink, image.height // shrink) if shrink > 1 else None
            image.draft("L" if channels == 1 else None, size)
        image.load()
        short = image.format == "PNG" and _ends_black(image, encoded) and not holds_all_pixels(encoded)
    except Exception as error:
        raise_lack_of_memory(error)
        raise ImageError(f"a damaged image: {error}") from error
    if short:
        raise ImageError("a damaged PNG: the pixel data is truncated")
    if image.format == "PNG":
        _check_png_values(image, encoded)
    orientation, pixels = _orientation(image), _converted(image, channels)
    image.close()  # free Pillow's pixels before `_upright` copies `pixels`
    return _upright(pixels, orientation)


def _check_png_values(image: Image.Image, encoded: bytes) -> None:
    """Check the values of a 16-bit colour PNG, and correct the transparent value of a gray PNG of 2 or 4 bits.

    Raises:
        ImageError: the image does not use the range of 16 bits, or has a transparent colour of 16 bits.
    """
    bits, color = encoded[24:26]
    key = image.info.get("transparency")
    if color == 0 and bits in (2, 4) and isinstance(key, int):
        image.info["transparency"] = key * (255 // (2**bits - 1))  # as Pillow scales the pixels
    if bits == 16 and image.mode in ("RGB", "RGBA", "LA"):
        if key is not None:
            raise ImageError(COLOUR_KEY)
        try:
            check_range(np.asarray(image)[..., : 1 if image.mode == "LA" else 3], upper_bytes=True)
        except HeaderError as error:
            raise ImageError(str(error)) from error


def _ends_black(image: Image.Image, encoded: bytes) -> bool:
    """Return True if a decoded PNG may lack rows, because it is interlaced or its last row holds only zeros."""
    interlaced = encoded[28] != 0
    last = image.crop((0, image.height - 1, image.width, image.height))
    return interlaced or last.getbbox(alpha_only=False) is None


def _has_bytes(image: Undecoded) -> bool:
    """Return True if a decoded image has values of 8 bits."""
    if isinstance(image, Image.Image):
        return not image.mode.startswith(_WIDE_MODES)
    return isinstance(image, np.ndarray | Tensor) and str(image.dtype).removeprefix("torch.") == "uint8"


def _has_16_bits(encoded: bytes) -> bool:
    """Return True if a file is a PNG of 16 bits."""
    return is_png(encoded) and encoded[24:25] == bytes([16])


def _array(image: Undecoded) -> np.ndarray:
    """Return the values of a decoded image as an array, (H, W) or (H, W, bands)."""
    values = np.asarray(image)
    return values.transpose(1, 2, 0) if isinstance(image, Tensor) and values.ndim == 3 else values


def _stored(image: Undecoded, encoded: bytes | None, pixel_type: PixelType, channels: int, max_pixels: int) -> Decoded:
    """Return the values of a decoded image or of a PNG, in their own type.

    Raises:
        HeaderError: the file is an image of 8 bits.
        ImageError: the file is damaged, or is not accepted.
    """
    if encoded is None:
        size = image.size if isinstance(image, Image.Image) else _array(image).shape[1::-1]
        try:
            check_sides(*size, max_pixels)
        except HeaderError as error:
            raise ImageError(str(error)) from error
        if isinstance(image, Image.Image):
            _load(image)
        values = _array(image)
        values = values if values.flags.writeable else values.copy()  # torch warns of arrays that are read-only
        values = values[..., None] if values.ndim == 2 else values
        orientation = _orientation_of_object(image) if isinstance(image, Image.Image) else 1
        return Decoded(values, orientation, {1: "L", 3: "RGB", 4: "RGBA"}.get(values.shape[2]))
    opened = _open(encoded, channels, max_pixels)
    if not _has_16_bits(encoded):
        raise mixed("uint8", pixel_type)
    mode, key = PNG_MODES[encoded[25]], opened.info.get("transparency")
    if mode == "L":
        pixels = _loaded_values(opened, encoded)
        if isinstance(key, int):
            pixels, mode = np.stack([pixels, np.where(pixels == key, 0, WHITE).astype(np.uint16)], axis=2), "LA"
        return Decoded(pixels.reshape(*pixels.shape[:2], -1), _orientation(opened), mode)
    if key is not None:
        raise ImageError(COLOUR_KEY)
    if any(part in encoded for part in _TURNS):
        _load(opened)  # the EXIF data may follow the pixels
    return Decoded(read_png(encoded), _orientation(opened), mode)


def _loaded_values(image: Image.Image, encoded: bytes) -> np.ndarray:
    """Return the values (H, W) uint16 of a 16-bit gray PNG that Pillow has opened."""
    _load(image)
    if _ends_black(image, encoded) and not holds_all_pixels(encoded):
        raise ImageError("a damaged PNG: the pixel data is truncated")
    return np.array(image, dtype=np.uint16)


def _load(image: Image.Image) -> None:
    """Decode the pixels of an image that Pillow has opened."""
    try:
        image.load()
    except Exception as error:  # Pillow raises many kinds of errors for damaged files
        raise_lack_of_memory(error)
        raise ImageError(f"a damaged image: {error}") from error


def _eight_bits_of(values: np.ndarray) -> np.ndarray:
    """Return values (H, W, bands) as 8 bits.

    Raises:
        HeaderError: the values are neither uint8 nor uint16, or do not use the range of 16 bits.
    """
    if values.dtype == np.uint16:
        check_range(values)
        return eight_bits(values)
    return fitted(values, "uint8")


def _converted_bands(pixels: np.ndarray, channels: int) -> np.ndarray:
    """Convert gray or RGB pixels (H, W, bands) uint8, with or without alpha, to `channels` channels."""
    bands = pixels.shape[2]
    if bands == channels:
        return pixels
    return _converted(Image.fromarray(pixels[..., 0] if bands == 1 else np.ascontiguousarray(pixels)), channels)


def _orientation_of_object(image: Image.Image) -> int:
    """Return the EXIF orientation that is applied to a Pillow image of the user (`decode`)."""
    if isinstance(image, ImageFile.ImageFile):
        return _orientation(image)
    if "exif" in image.info and _orientation(image) in range(2, 9):
        warnings.warn(
            "The EXIF orientation of a Pillow image in memory is not applied, because the image may have been turned "
            "already. Call PIL.ImageOps.exif_transpose on the opened file first.",
            stacklevel=2,
        )
    return 1


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation of an image; 1 (upright) if the image has no orientation."""
    try:
        exif = image.info.get("exif", b"")
        return image.getexif().get(ORIENTATION, 1) if len(exif) <= LARGEST_EXIF else 1
    except MemoryError:
        raise
    except Exception:  # an image with damaged EXIF data may still have good pixels
        return 1


def _upright(pixels: np.ndarray, orientation: int) -> Tensor:
    """Turn pixels (H, W, C) upright according to the EXIF orientation. Return (C, H, W)."""
    if orientation in TRANSPOSED:
        pixels = pixels.swapaxes(0, 1)
    if orientation in FLIPPED_ROWS:
        pixels = pixels[::-1]
    if orientation in FLIPPED_COLUMNS:
        pixels = pixels[:, ::-1]
    pixels = np.ascontiguousarray(pixels)
    pixels = pixels if pixels.flags.writeable else pixels.copy()  # torch warns of arrays that are read-only
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _converted(image: Image.Image, channels: int) -> np.ndarray:
    """Convert an image of any Pillow mode to gray, RGB or RGBA. Return pixels (H, W, C).

    Raises:
        ImageError: the image has values outside 16 bits, or does not use the range of 16 bits.
    """
    if image.mode == "F":
        raise ImageError(
            "a Pillow image of the mode F (float32) in a data set of the type uint8. Set data.pixel_type float32, or "
            "scale the values of the data set by one range, and save its images with 8 bits"
        )
    if image.mode.startswith("I"):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise ImageError(
                f"the values of an image of the mode {image.mode} are {values.min()} to {values.max()}, but 16 bits "
                "hold 0 to 65535. Scale the values of the data set by one range, and save its images with 8 bits"
            )
        try:
            check_range(values)
        except HeaderError as error:
            raise ImageError(str(error)) from error
    rows = max(ROWS_AT_ONCE // image.width, 1)
    if image.height <= rows:
        return _converted_rows(image, channels)
    pixels = np.empty((image.height, image.width, channels), dtype=np.uint8)
    for top in range(0, image.height, rows):
        bottom = min(top + rows, image.height)
        pixels[top:bottom] = _converted_rows(image.crop((0, top, image.width, bottom)), channels)
    return pixels


def _converted_rows(image: Image.Image, channels: int) -> np.ndarray:
    """Convert some rows of an image of any Pillow mode. Return pixels (H, W, C)."""
    image = _eight_bits(image)
    image = image.convert(_STRAIGHT[image.mode]) if image.mode in _STRAIGHT else image
    if channels == 4:
        return np.array(image.convert("RGBA"))
    if image.info.get("transparency") is not None or image.mode in ("LA", "PA", "RGBA"):
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    if channels == 1:
        gray = image if image.mode == "L" else image.convert("RGB").convert("L")
        return np.array(gray)[..., None]
    return np.array(image.convert("RGB"))


def _eight_bits(image: Image.Image) -> Image.Image:
    """Convert a 16-bit gray image to 8 bits, and keep its transparency. Return other images unchanged.

    Pillow's own conversion is not used, because it clips values above 255.
    """
    if not image.mode.startswith("I"):
        return image
    values, key = np.asarray(image).astype(np.int32), image.info.get("transparency")
    gray = Image.fromarray(eight_bits(values))
    if not isinstance(key, int):
        return gray
    return Image.merge("LA", (gray, Image.fromarray(np.where(values == key, 0, 255).astype(np.uint8))))
