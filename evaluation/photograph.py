"""Prepare single images as the evaluations do, and the image with which exports are checked.

Shape letters: H x W pixels of an image, S x S pixels of a crop.
"""

import os
from collections.abc import Callable

import torch
from PIL import Image
from torch import Tensor

from tessera.data.crops import CenterCrop
from tessera.data.decode import Picture
from tessera.data.resample import cut
from tessera.encoders.base import Encoder
from tessera.encoders.certificate import Photograph
from tessera.encoders.preprocessing import image_size
from tessera.evaluation.features import EvaluationError, input_size, resize_size
from tessera.runtime.isolation import own_modes

HEIGHT, WIDTH = 427, 640
"""Height and width of `made_photograph` in pixels."""


def preparation(encoder: Encoder, side: int | None = None) -> Callable[[Image.Image], Tensor]:
    """Return the function that `tessera.transform` returns for the same arguments.

    Raises:
        ValueError: the encoder does not have 3 input channels.
    """
    preprocessing = encoder.preprocessing
    if preprocessing.channels != 3:
        raise ValueError(
            f"The encoder takes {preprocessing.channels} channels, but `transform` prepares RGB images. Use an encoder "
            "with 3 input channels."
        )
    size = input_size(encoder, side)
    crop = CenterCrop(size, resize=resize_size(size, None))
    statistics = preprocessing.mean, preprocessing.std

    @own_modes()
    def prepare(image: Image.Image) -> Tensor:
        try:
            picture = Picture(image)
        except TypeError as error:
            if isinstance(image, str | os.PathLike):
                raise EvaluationError(
                    f"A path was given. Give the image: PIL.Image.open({str(image)!r:.200})."
                ) from None
            raise EvaluationError(f"The image cannot be prepared: {error}".replace("Return", "Give")) from None
        (view,) = crop.draw(picture.size)
        out = torch.empty(1, size, size, 3, dtype=torch.uint8)
        cut(picture.pixels(), view, out)
        mean, std = (torch.tensor(values, dtype=torch.float32).view(3, 1, 1) for values in statistics)
        return (out[0].permute(2, 0, 1).float() / 255 - mean) / std

    return prepare


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

    The encoder takes another number of channels than 3, or images that are not square.
    """
    height, width = image_size(encoder)
    if encoder.channels != 3 or encoder.preprocessing.channels != 3 or height != width:
        return None
    image = made_photograph()
    return Photograph(image, preparation(encoder)(image))
