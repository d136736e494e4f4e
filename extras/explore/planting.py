"""Copies planted on purpose: changed versions of the user's own images, to measure how well copies are found.

Shape letters: B images, D features per image, S x S pixels.
"""

import io
import zlib

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from tessera.data.pictures import unit
from tessera.encoders.base import Encoder
from tessera.extras.explore.embedding import mirrored_mean

KINDS = ("re-encoded", "mirrored", "cropped", "recoloured")
"""Kinds of planted copies."""


def planted(encoder: Encoder, images: Tensor) -> Tensor:
    """Return the features of a copy of each kind: (B, C, S, S) -> (B, 4 * D).

    The strength of a change depends only on the pixels of the image.
    """
    form = {"device": images.device, "dtype": torch.float32}
    mean, std = (
        torch.tensor(v, **form).view(-1, 1, 1) for v in (encoder.preprocessing.mean, encoder.preprocessing.std)
    )
    copies: list[list[Tensor]] = [[] for _ in KINDS]
    for image in unit(images, encoder.preprocessing):
        values = image.nan_to_num(0.0).clamp(0, 1)
        rng = np.random.default_rng(zlib.crc32((values * 255).to(torch.uint8).cpu().numpy().tobytes()))
        changed = (
            _encoded(_smaller(values, rng), int(rng.integers(30, 61))),
            _encoded(values.flip(-1), 75),
            _encoded(_cropped(values, rng), 75),
            _encoded(_recoloured(values, rng), 75),
        )
        for kind, copy in zip(copies, changed, strict=True):
            kind.append(torch.where(image.isfinite(), copy, image))
    return torch.cat([mirrored_mean(encoder, (torch.stack(kind) - mean) / std) for kind in copies], 1)


def _encoded(image: Tensor, quality: int) -> Tensor:
    """Encode an image (C, S, S) in [0, 1] as JPEG and decode it. Each channel is encoded alone if there are not 3."""
    pixels = (image.clamp(0, 1) * 255).round().to(torch.uint8).cpu()
    if len(pixels) == 3:
        decoded = np.moveaxis(_through_jpeg(pixels.permute(1, 2, 0).numpy(), quality), 2, 0)
    else:
        decoded = np.stack([_through_jpeg(channel.numpy(), quality) for channel in pixels])
    return torch.from_numpy(decoded.copy()).to(image) / 255


def _through_jpeg(pixels: np.ndarray, quality: int) -> np.ndarray:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file))


def _resized(image: Tensor, side: int) -> Tensor:
    return F.interpolate(image[None], size=(side, side), mode="bilinear", antialias=True)[0]


def _smaller(image: Tensor, rng: np.random.Generator) -> Tensor:
    """Return the image resized to 50 % to 100 % of its side, and back."""
    side = image.shape[-1]
    return _resized(_resized(image, max(round(side * rng.uniform(0.5, 1)), 1)), side)


def _cropped(image: Tensor, rng: np.random.Generator) -> Tensor:
    """Return a crop of 70 % to 90 % of the area, resized to the size of the image."""
    side = image.shape[-1]
    kept = max(round(side * rng.uniform(0.7, 0.9) ** 0.5), 1)
    top, left = rng.integers(0, side - kept + 1, 2)
    return _resized(image[:, top : top + kept, left : left + kept], side)


def _recoloured(image: Tensor, rng: np.random.Generator) -> Tensor:
    """Return the image with other contrast, brightness and balance of the channels, each by up to 30 %."""
    contrast, brightness = rng.uniform(0.7, 1.3, 2)
    balance = torch.from_numpy(rng.uniform(0.85, 1.15, (len(image), 1, 1))).to(image)
    mean = image.mean()
    return (((image - mean) * contrast + mean) * brightness * balance).clamp(0, 1)
