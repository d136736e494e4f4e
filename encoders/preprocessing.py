"""Sizes of an image that is prepared for an encoder as in the evaluations.

The short side is resized to `short_side(S)` pixels by an antialiased bicubic filter, and the square of S x S pixels at
the centre is cut out.
"""

from tessera.encoders.base import Encoder

WITH_MARGIN = 128
"""Smallest side of a crop, in pixels, around which the resized image has a margin."""


def short_side(size: int) -> int:
    """Return the short side in pixels to which an image is resized before a centre crop of `size` pixels.

    The ratio of short side to crop is that of DINO (256 to 224) for crops of 128 pixels or more. For smaller crops, the
    short side equals the crop.
    """
    return round(size * 256 / 224) if size >= WITH_MARGIN else size


def image_size(encoder: Encoder) -> tuple[int, int]:
    """Return the height and width in pixels of the images that an encoder is built for."""
    size = encoder.settings["image_size"]
    return (size, size) if isinstance(size, int) else (size[0], size[1])
