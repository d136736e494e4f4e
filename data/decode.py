"""Encoded image in, upright RGB tensor out.

H x W pixels. JPEGs of one or three components, the bulk of every data set, go to libjpeg-turbo through torchvision; all
other images, and pictures that their EXIF data turns, go through Pillow, which gives the same pixels a little slower.
"""

from io import BytesIO

import numpy as np
import torch
import torchvision.io
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

FORMATS = ("JPEG", "PNG", "WEBP")
"""formats that are read, in Pillow's names"""
ORIENTATION = 0x0112
"""EXIF tag"""

# torchvision deprecates its decoders in favour of torchcodec: without them Pillow decodes everything.
_decode_jpeg = getattr(torchvision.io, "decode_jpeg", None)


class ImageError(ValueError):
    """Bytes that are not a good image. The message is the reason."""


def decode(encoded: bytes, *, max_pixels: int = 178_956_970) -> Tensor:
    """Pixels of a JPEG, PNG or WebP file as the eye sees them: (3, H, W) uint8, RGB, turned upright by its EXIF data.

    The memory order is row, column, channel. Transparent parts show white. Of an animation the first picture counts.
    16-bit gray is divided by 257; of 16-bit colours the upper byte is kept, which is at most one level less.
    `max_pixels` is compared with the header before anything is decoded; Pillow's own limit of the same size stays too.

    Raises:
        ImageError: another format, a damaged or truncated file, or more than `max_pixels` pixels.
    """
    if not encoded:
        raise ImageError("the file is empty")
    if _decode_jpeg is not None and (size := _plain_jpeg(encoded)):
        _check(size, max_pixels)
        buffer = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)  # a copy: tensors over `bytes` are writable
        try:
            return _decode_jpeg(buffer, mode=torchvision.io.ImageReadMode.RGB)
        except RuntimeError as error:
            raise ImageError(f"a damaged JPEG: {str(error).rpartition(', ')[2]}") from error
    pixels = np.array(_rgb(_open(encoded, max_pixels)))
    return torch.from_numpy(pixels).permute(2, 0, 1)  # (3, H, W)


def _check(size: tuple[int, int], max_pixels: int) -> None:
    """Refuse a size (width, height) above the limit."""
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
    """Read by Pillow, turned upright."""
    try:
        image = Image.open(BytesIO(encoded), formats=FORMATS)
        _check(image.size, max_pixels)
        image.load()
    except (ImageError, MemoryError):
        raise
    except UnidentifiedImageError as error:
        raise ImageError("not a JPEG, PNG or WebP image, or its header is damaged") from error
    except Image.DecompressionBombError as error:
        raise ImageError(str(error)) from error
    except Exception as error:  # damaged files end in OSError, SyntaxError, struct.error, IndexError, zlib.error, ...
        raise ImageError(f"a damaged image: {error}") from error
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # all pixels are there: damaged EXIF data does not make a picture bad
        return image


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
