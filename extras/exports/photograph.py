"""The image with which the preparation of images is compared."""

import torch
from PIL import Image

from tessera.encoders.base import Encoder
from tessera.encoders.preprocessing import image_size
from tessera.evaluation.transform import preparation
from tessera.extras.exports.certificate import Photograph
from tessera.extras.exports.preparation import byte_moments

HEIGHT, WIDTH = 427, 640
"""Height and width of `made_photograph` in pixels."""


def made_photograph() -> Image.Image:
    """Return a made RGB image with the size, gradients, edges and textures of a photograph."""
    y, x = torch.arange(HEIGHT)[:, None] / HEIGHT, torch.arange(WIDTH)[None] / WIDTH
    tiles = ((y * 13).floor() + (x * 29).floor()) % 2
    rings = (400 * ((y - 0.4) ** 2 + (x - 0.6) ** 2)).sin()
    texture = (211 * x * y).sin() * (97 * y).cos()
    channels = [
        0.5 * y + 0.2 * tiles + 0.1 * rings,
        0.6 * x * (1 - tiles) + 0.2 * texture,
        0.7 * (1 - y) * x + 0.2 * rings,
    ]
    pixels = torch.stack([torch.broadcast_to(channel, (HEIGHT, WIDTH)) for channel in channels], -1)
    pixels = (255 * (0.15 + pixels)).clamp(0, 255).to(torch.uint8)
    return Image.frombytes("RGB", (WIDTH, HEIGHT), pixels.contiguous().numpy().tobytes())


def photograph(encoder: Encoder) -> Photograph | None:
    """Return the photograph of `certificate.certify`, or None if the evaluations cannot prepare it for the encoder.

    The encoder takes another number of channels than 3, images of more than 8 bits or with a range, or images that are
    not square.
    """
    height, width = image_size(encoder)
    if not byte_moments(encoder.preprocessing):
        return None
    if encoder.channels != 3 or encoder.preprocessing.channels != 3 or height != width:
        return None
    image = made_photograph()
    return Photograph(image, preparation(encoder)(image))
