"""Encoded image in, upright RGB tensor out.

H x W pixels. JPEGs of one or three components, the bulk of every data set, go to libjpeg-turbo through torchvision; all
other images, and pictures that their EXIF data turns, go through Pillow, which gives the same pixels a little slower.
"""

import functools
from collections.abc import Callable
from io import BytesIO

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

FORMATS = ("JPEG", "PNG", "WEBP")
"""formats that are read, in Pillow's names"""
ORIENTATION = 0x0112
"""EXIF tag"""
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""what sets a picture of each orientation upright"""
SIDEWAYS = (TURNS[5], TURNS[6], TURNS[7], TURNS[8])
MAX_PIXELS = 178_956_970
"""Pillow's own limit"""


@functools.cache
def jpeg_decoder() -> Callable[[Tensor], Tensor] | None:
    """Return torchvision's JPEG decoder, or None if this torchvision has none. Pillow then decodes everything.

    torchvision deprecates its decoders in favour of torchcodec.
    """
    import torchvision.io  # loads torch's compiler, for which --help and data of other formats need not wait

    decode_jpeg = getattr(torchvision.io, "decode_jpeg", None)
    return decode_jpeg and functools.partial(decode_jpeg, mode=torchvision.io.ImageReadMode.RGB)


class ImageError(ValueError):
    """Bytes that are not a good image. The message is the reason."""


def decode(encoded: bytes, *, max_pixels: int = MAX_PIXELS) -> Tensor:
    """Pixels of a JPEG, PNG or WebP file as the eye sees them: (3, H, W) uint8, RGB, turned upright by its EXIF data.

    The memory order is row, column, channel. Transparent parts show white. Of an animation the first picture counts.
    16-bit gray is divided by 257; of 16-bit colours the upper byte is kept, which is at most one level less.
    `max_pixels` is compared with the header before anything is decoded; Pillow's own limit of the same size stays too.

    Raises:
        ImageError: another format, a damaged or truncated file, or more than `max_pixels` pixels.
    """
    return Picture(encoded, max_pixels=max_pixels).pixels()


class Picture:
    """An encoded image whose header was read. A JPEG is not decoded before its pixels are asked for.

    Raises:
        ImageError: another format, a damaged header, or more than `max_pixels` pixels; of all but JPEGs also a file
            that is damaged anywhere.
    """

    encoded: bytes
    plain: bool
    """whether it is a JPEG, gray or in colour, that stands upright"""
    size: tuple[int, int]
    """height and width, upright"""

    def __init__(self, encoded: bytes, *, max_pixels: int = MAX_PIXELS):
        if not encoded:
            raise ImageError("the file is empty")
        self.encoded, self._max_pixels, self._pixels = encoded, max_pixels, None
        plain = _plain_jpeg(encoded)
        self.plain = plain is not None
        if plain is not None:
            _check(plain, max_pixels)
            self.size = plain[1], plain[0]
            return
        opened = _open(encoded, max_pixels)
        if opened.format not in ("PNG", "WEBP"):  # Pillow has another name for JPEGs of many pictures
            width, height = opened.size
            self.size = (width, height) if _turn(opened) in SIDEWAYS else (height, width)
        else:  # how a PNG is turned may stand at its end
            self._pixels = _loaded(opened)
            self.size = self._pixels.shape[1], self._pixels.shape[2]

    def fraction(self, shrink: int) -> int:
        """The most, up to `shrink`, by which it can be shrunk while it is decoded; 1 for all but JPEGs."""
        if self._pixels is not None:
            return 1
        # libjpeg fills up the last blocks: once a picture is turned they may be the first, if its sides do not divide
        while not self.plain and any(side % shrink for side in self.size):
            shrink //= 2
        return shrink

    def pixels(self, shrink: int = 1) -> Tensor:
        """(3, H, W) uint8; see `decode`.

        A JPEG comes at 1 / `shrink` of its size, 1, 2, 4 or 8, sides rounded up: libjpeg then transforms only the
        lower frequencies of each block, which costs less than all of them and gives about the mean over each square.

        Raises:
            ImageError: a damaged or truncated file.
        """
        if self._pixels is not None:
            return self._pixels
        if self.plain and shrink == 1 and (decode_jpeg := jpeg_decoder()):
            try:
                pixels = decode_jpeg(as_tensor(self.encoded))
            except RuntimeError as error:
                raise ImageError(f"a damaged JPEG: {str(error).rpartition(', ')[2]}") from error
        else:
            pixels = _loaded(_open(self.encoded, self._max_pixels), shrink)
        if tuple(pixels.shape[1:]) != tuple(-(-side // shrink) for side in self.size):
            raise ImageError("a damaged JPEG: its header and its pixels disagree about its size")
        return pixels


def as_tensor(encoded: bytes) -> Tensor:
    """(bytes,) uint8, a copy: tensors can be written to, and `bytes` cannot."""
    return torch.frombuffer(bytearray(encoded), dtype=torch.uint8)


def _check(size: tuple[int, int], max_pixels: int) -> None:
    """Refuse a size (width, height) above the limit, or without a pixel."""
    if min(size) < 1:
        raise ImageError(f"its header says {size[0]} x {size[1]} pixels")
    if size[0] * size[1] > max_pixels:
        raise ImageError(f"{size[0]} x {size[1]} pixels are more than the limit of {max_pixels}")


def _plain_jpeg(encoded: bytes) -> tuple[int, int] | None:
    """(width, height) of a JPEG that is gray or in colour and stands upright; None for everything else."""
    if encoded[:3] != b"\xff\xd8\xff":
        return None
    place = 2
    while 0 <= (place := encoded.find(b"\xff", place)) < len(encoded) - 9:
        marker = encoded[place + 1]
        if marker in (0x00, 0x01, 0xFF) or 0xD0 <= marker <= 0xD8:  # stuffing, and markers without a segment
            place += 1 if marker == 0xFF else 2
            continue
        length = int.from_bytes(encoded[place + 2 : place + 4], "big")
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # start of frame
            height = int.from_bytes(encoded[place + 5 : place + 7], "big")
            width = int.from_bytes(encoded[place + 7 : place + 9], "big")
            return (width, height) if encoded[place + 9] in (1, 3) else None
        if marker in (0xD9, 0xDA):  # pixels, or the end, before any frame
            return None
        if marker == 0xE1 and not _stands_upright(encoded[place + 4 : place + 2 + length]):
            return None
        place += 2 + length
    return None


def _stands_upright(segment: bytes) -> bool:
    """Whether an APP1 segment of a JPEG surely asks for no turning."""
    if not segment.startswith(b"Exif\0\0"):
        return b"tiff:Orientation" not in segment  # XMP, which Pillow heeds where EXIF is silent
    exif = Image.Exif()
    try:
        exif.load(segment)
        return exif.get(ORIENTATION, 1) == 1
    except Exception:  # Pillow's parser fails in many ways on a damaged block
        return False


def _open(encoded: bytes, max_pixels: int) -> Image.Image:
    """The header, read by Pillow."""
    try:
        image = Image.open(BytesIO(encoded), formats=FORMATS)
        _check(image.size, max_pixels)
        return image
    except (ImageError, MemoryError):
        raise
    except UnidentifiedImageError as error:
        raise ImageError("not a JPEG, PNG or WebP image, or its header is damaged") from error
    except Image.DecompressionBombError as error:
        raise ImageError(str(error)) from error
    except Exception as error:  # damaged files end in OSError, SyntaxError, struct.error, IndexError, zlib.error, ...
        raise ImageError(f"a damaged image: {error}") from error


def _loaded(image: Image.Image, shrink: int = 1) -> Tensor:
    """(3, H, W) of an opened image, turned upright."""
    try:
        if shrink > 1:
            image.draft(None, (image.width // shrink, image.height // shrink))
        image.load()
    except MemoryError:
        raise
    except Exception as error:
        raise ImageError(f"a damaged image: {error}") from error
    upright = _rgb(image)
    if (turn := _turn(image)) is not None:
        upright = upright.transpose(turn)
    return torch.from_numpy(np.array(upright)).permute(2, 0, 1)


def _turn(image: Image.Image) -> Image.Transpose | None:
    """What its EXIF data asks for."""
    try:
        return TURNS.get(image.getexif().get(ORIENTATION, 1))
    except Exception:  # all pixels are there: damaged EXIF data does not make a picture bad
        return None


def _rgb(image: Image.Image) -> Image.Image:
    """Any of Pillow's modes as RGB."""
    key = image.info.get("transparency")
    if image.mode.startswith("I"):  # 16-bit gray, of which Pillow's own conversion clips all above 255
        values = np.asarray(image).astype(np.int32)
        gray = np.where(values == key, 255, (values + 128) // 257) if isinstance(key, int) else (values + 128) // 257
        return Image.fromarray(gray.astype(np.uint8)).convert("RGB")
    if key is None and image.mode not in ("LA", "PA", "RGBA"):
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
