"""Prepare single images as the evaluations do."""

import os
from collections.abc import Callable

import torch
from PIL import Image
from torch import Tensor

from tessera.data.crops import CenterCrop
from tessera.data.decode import Picture
from tessera.data.resample import cut
from tessera.encoders.base import Encoder
from tessera.evaluation.features import EvaluationError, input_size, resize_size
from tessera.runtime.isolation import own_modes


def preparation(encoder: Encoder, side: int | None = None) -> Callable[[Image.Image], Tensor]:
    """Return the function that `tessera.transform` returns for the same arguments.

    Raises:
        ValueError: the encoder does not have 3 input channels, or takes images of more than 8 bits.
    """
    preprocessing = encoder.preprocessing
    if preprocessing.channels != 3:
        raise ValueError(
            f"The encoder takes {preprocessing.channels} channels, but `transform` prepares RGB images. Use an encoder "
            "with 3 input channels."
        )
    if preprocessing.pixel_type != "uint8":
        raise ValueError(
            f"The encoder takes {preprocessing.pixel_type} images, but `transform` prepares RGB images of 8 bits. Use "
            "`tessera embed`."
        )
    size = input_size(encoder, side)
    crop = CenterCrop(size, resize=resize_size(size, None))
    statistics = (*preprocessing.range, preprocessing.mean, preprocessing.std)

    @own_modes()
    def prepare(image: Image.Image) -> Tensor:
        try:
            picture = Picture(image, nodata=preprocessing.nodata, fill=preprocessing.fill)
        except TypeError as error:
            if isinstance(image, str | os.PathLike):
                raise EvaluationError(
                    f"A path was given. Give the image: PIL.Image.open({str(image)!r:.200})."
                ) from None
            raise EvaluationError(f"The image cannot be prepared: {error}".replace("Return", "Give")) from None
        (view,) = crop.draw(picture.size)
        out = torch.empty(1, size, size, 3, dtype=torch.uint8)
        cut(picture.pixels(), view, out)
        low, high, mean, std = (torch.tensor(values, dtype=torch.float32).view(3, 1, 1) for values in statistics)
        return (((out[0].permute(2, 0, 1).float() - low) / (high - low)).clamp_(0, 1) - mean) / std

    return prepare
