"""Pictures of the input of a run, as (H, W, 3) uint8 arrays.

Images are shown with their original colours, so the normalisation is undone. One band is shown as gray, two as red and
green, and three as red, green and blue. By default these are the first bands. Images with a range (`Preprocessing.low`)
are often dark, so their bands are stretched between two quantiles, which are the same for all images of a picture.

Shape letters: N images, C channels, K shown bands.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from tessera.data.batch import Batch
from tessera.encoders.base import Preprocessing
from tessera.encoders.images import PackedImages

Bands = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1, max_length=3)]
"""Type of a setting: numbers of the bands that are shown, counted from 1."""
QUANTILES = (0.02, 0.98)
"""Quantiles of a band that are shown as black and as full brightness."""
MOST_VALUES = 2**20
"""Number of values of a band from which quantiles are computed."""


def crops(batch: Batch, images: int = 8, side: int = 112, bands: Sequence[int] | None = None) -> np.ndarray:
    """Return a picture of the crops of the first `images` images of a batch, as the encoder receives them.

    Each row holds the crops of one image, global crops first.
    """
    columns: list[Tensor] = []
    shown = min(images, len(batch))
    found = None
    for view in batch.views:
        if isinstance(view.images, PackedImages):  # packed images have one crop per image, and the crops differ in size
            return panels([[image] for image in view.images.unpack()[:shown]], batch.preprocessing, side, bands)
        per_crop = view.images.unflatten(0, (view.crops, -1))[:, :shown].float()  # (n, shown, C, H, W)
        found = limits(per_crop.flatten(0, 1), batch.preprocessing, bands) if found is None else found
        columns += [resized(colours(crop, batch.preprocessing, bands, found), side) for crop in per_crop]
    return grid(torch.stack(columns, dim=1))


def panels(
    rows: list[list[Tensor]], preprocessing: Preprocessing, side: int = 112, bands: Sequence[int] | None = None
) -> np.ndarray:
    """Join rows of normalised images (C, H, W) of any size into one picture.

    Each image is scaled to fit a square of `side` pixels. The first images of the rows determine the limits.
    """
    found = limits([row[0] for row in rows], preprocessing, bands)
    cells = [[resized(colours(one[None], preprocessing, bands, found), side)[0] for one in row] for row in rows]
    return grid(torch.stack([torch.stack(row) for row in cells]))


def colours(
    images: Tensor, preprocessing: Preprocessing, bands: Sequence[int] | None = None, limits: Tensor | None = None
) -> Tensor:
    """Undo the normalisation of images and return them as RGB: (N, C, H, W) -> (N, 3, H, W) in [0, 1].

    Args:
        bands: numbers of the bands that are shown, counted from 1; None for the first three.
        limits: values that are shown as 0 and 1, as `limits` returns them; None for 0 and 1.
    """
    return as_rgb(unit(images, preprocessing).clamp(0, 1).nan_to_num(0), bands, limits)  # a missing channel is black


def unit(images: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Undo the normalisation of images: (N, C, H, W) -> (N, C, H, W) of about 0 to 1."""
    mean, std = (torch.tensor(v, device=images.device).view(-1, 1, 1) for v in (preprocessing.mean, preprocessing.std))
    return images.float() * std + mean


def as_rgb(values: Tensor, bands: Sequence[int] | None = None, limits: Tensor | None = None) -> Tensor:
    """Return some bands of images as RGB: (N, C, H, W) -> (N, 3, H, W) in [0, 1].

    Args:
        bands: as for `colours`.
        limits: values that are shown as 0 and 1, (2, K); None for 0 and 1. With limits, NaN is shown as 0.
    """
    pixels = shown_bands(values, bands)
    if limits is not None:
        low, high = limits.to(pixels)[:, :, None, None]
        pixels = ((pixels - low) / (high - low).clamp(min=1e-12)).nan_to_num(0).clamp(0, 1)
    if pixels.shape[1] == 1:
        return pixels.expand(-1, 3, -1, -1)
    if pixels.shape[1] == 2:
        return torch.cat([pixels, torch.zeros_like(pixels[:, :1])], dim=1)
    return pixels


def shown_bands(values: Tensor, bands: Sequence[int] | None = None) -> Tensor:
    """Return the bands of images that are shown: (N, C, H, W) -> (N, K, H, W)."""
    return values[:, :3] if bands is None else values[:, [band - 1 for band in bands]]


def limits(images: Iterable[Tensor], preprocessing: Preprocessing, bands: Sequence[int] | None = None) -> Tensor | None:
    """Return the limits of the shown bands of normalised images (C, H, W): (2, K), or None if they have no range."""
    if preprocessing.low is None:
        return None
    return quantiles([shown_bands(unit(image[None], preprocessing), bands)[0] for image in images])


def quantiles(images: Sequence[Tensor]) -> Tensor:
    """Return two quantiles of each band over images (K, H, W): (2, K). NaN does not count."""
    values = torch.cat([image.flatten(1).float().cpu() for image in images], dim=1)
    values = values[:, :: -(-values.shape[1] // MOST_VALUES)]
    return values.nanquantile(torch.tensor(QUANTILES), dim=1)


def resized(images: Tensor, side: int) -> Tensor:
    """Scale images to a longer side of `side` pixels, and pad them with white: (N, 3, H, W) -> (N, 3, side, side)."""
    scale = side / max(images.shape[-2:])
    height, width = (max(round(s * scale), 1) for s in images.shape[-2:])
    scaled = F.interpolate(images, size=(height, width), mode="nearest")
    return F.pad(scaled, (0, side - width, 0, side - height), value=1.0)


def grid(cells: Tensor, gap: int = 2) -> np.ndarray:
    """Join cells (rows, columns, 3, H, W) in [0, 1] into one picture (H', W', 3) uint8 with white gaps."""
    padded = F.pad(cells, (0, gap, 0, gap), value=1.0)
    picture = torch.cat([torch.cat(list(row), dim=2) for row in padded], dim=1)  # (3, H', W')
    return (picture.permute(1, 2, 0) * 255).round().byte().cpu().numpy()
