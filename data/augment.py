"""The photometric part of DINO's augmentation (2104.14294): drawn for each crop, applied to batches on any device.

N crops of H x W pixels, n of them chosen; D taps of a blur. Probabilities and strengths are those of main_dino.py.
In between, colours are floats from 0 to 1. The definitions are torchvision's for floats: clamped after each factor,
contrast about the mean of the gray picture, hue turned in HSV.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import Annotated

import numpy as np
import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from data.batch import Batch, ColorParameters, View
from data.resample import cut_views, exact
from encoders.base import IMAGENET, Preprocessing
from encoders.images import Images, PackedImages
from runtime.settings import Section

COLOR_DRAWS = 13
"""random numbers a crop"""
BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)


def ascending(pair: tuple[float, float]) -> tuple[float, float]:
    """A range (low, high).

    Raises:
        ValueError: low is above high.
    """
    if not pair[0] <= pair[1]:
        raise ValueError(f"the range has to ascend: {pair[0]} is above {pair[1]}")
    return pair


Share = Annotated[float, Field(ge=0, le=1)]
Strength = Annotated[float, Field(ge=0)]
Sigmas = Annotated[tuple[Strength, Strength], AfterValidator(ascending)]


class ColorConfig(Section, frozen=True):
    """Photometric changes that are the same for all views."""

    brightness: Strength = 0.4
    """brightness factor, drawn from 1 - value to 1 + value"""
    contrast: Strength = 0.4
    """contrast factor, drawn from 1 - value to 1 + value"""
    saturation: Strength = 0.2
    """saturation factor, drawn from 1 - value to 1 + value"""
    hue: float = Field(default=0.1, ge=0, le=0.5)
    """largest shift of the hue, in turns of the colour circle"""
    jitter: Share = 0.8
    """probability of the four changes above, which come in random order"""
    grayscale: Share = 0.2
    """probability of a gray picture"""
    blur_sigma: Sigmas = (0.1, 2.0)
    """standard deviation of the Gaussian blur, in pixels of the crop: least, most"""


def draw_colors(
    rng: np.random.Generator, config: ColorConfig, blur: Sequence[float], solarize: Sequence[float]
) -> ColorParameters:
    """Photometric changes of N crops, with the probabilities `blur` and `solarize` of each crop.

    Takes N * `COLOR_DRAWS` numbers from `rng` whatever the settings, crop after crop.
    """
    u = rng.random((len(blur), COLOR_DRAWS))  # (N, COLOR_DRAWS)
    spread = np.array([config.brightness, config.contrast, config.saturation, config.hue])
    neutral = np.array([1.0, 1.0, 1.0, 0.0])
    low = np.maximum(neutral - spread, [0, 0, 0, -0.5])
    factors = np.where(u[:, :1] < config.jitter, low + (neutral + spread - low) * u[:, 1:5], neutral)  # (N, 4)
    least, most = config.blur_sigma
    sigma = np.where(u[:, 5] < blur, least + (most - least) * u[:, 6], 0)
    values = torch.from_numpy(np.column_stack([factors, sigma]).astype(np.float32))  # (N, 5)
    brightness, contrast, saturation, hue, sigmas = values.unbind(1)
    return ColorParameters(
        brightness=brightness,
        contrast=contrast,
        saturation=saturation,
        hue=hue,
        order=torch.from_numpy(u[:, 7:11].argsort(1)),  # (N, 4)
        grayscale=torch.from_numpy(u[:, 11] < config.grayscale),
        blur=sigmas,
        solarize=torch.from_numpy(u[:, 12] < solarize),
    )


@torch.no_grad()
def augment_colors(images: Tensor, p: ColorParameters, preprocessing: Preprocessing = IMAGENET) -> Tensor:
    """Apply colour changes, then normalise: (N, 3, H, W) uint8 -> (N, 3, H, W) float32.

    Order: jitter, gray, blur, solarise. The device is never waited for: `p` is on the CPU, and from there go one table
    of factors and one list of crops, while operations that no crop asks for are left out.
    """
    x = images.to(torch.float32, memory_format=torch.contiguous_format).div_(255)
    hue_places = [(p.order[:, place] == HUE) & (p.hue != 0) for place in range(4)]
    *hues, gray, blurred, solarized = _chosen([*hue_places, p.grayscale, p.blur > 0, p.solarize], x.device)
    blends = _blends(p)  # (3, 4, N)
    scale, to_gray, to_mean = _to_device(blends, x.device)[..., None, None, None]  # (4, N, 1, 1, 1)
    hue, sigma = _to_device(torch.stack([p.hue, p.blur]), x.device)  # (N,)
    for place in range(4):
        if (blends[0, place] != 1).any():
            shade = luminance(x)
            shade = shade * to_gray[place] + shade.mean((2, 3), keepdim=True) * to_mean[place]  # (N, 1, H, W)
            x.mul_(scale[place]).add_(shade).clamp_(0, 1)
        if len(hues[place]):
            x.index_copy_(0, hues[place], shift_hue(x[hues[place]], hue[hues[place]]))
    if len(gray):
        x.index_copy_(0, gray, luminance(x[gray]).expand(-1, 3, -1, -1))
    if len(blurred):
        x.index_copy_(0, blurred, gaussian_blur(x[blurred], sigma[blurred], radius=ceil(4 * float(p.blur.max()))))
    if len(solarized):
        y = x[solarized]
        x.index_copy_(0, solarized, torch.where(y >= 0.5, 1 - y, y))
    return _normalize(x, preprocessing)


@torch.no_grad()
def to_model_input(batch: Batch, dtype: torch.dtype = torch.float32) -> Batch:
    """Cut the crops if whole images came, apply the colour changes, and normalise: uint8 views -> float views.

    Raises:
        ValueError: the views are floats already, or packed images have colour changes.
    """
    if batch.raw is not None:
        batch = cut_views(batch)
    views = [replace(view, images=_finish(view, batch.preprocessing, dtype), color=None) for view in batch.views]
    return replace(batch, views=views, memory=None)


def _finish(view: View, preprocessing: Preprocessing, dtype: torch.dtype) -> Images:
    """Images of a view with colour changes applied, normalised."""
    images = view.images
    pixels = images.patches if isinstance(images, PackedImages) else images
    if pixels.is_floating_point():
        raise ValueError("The views of this batch are floats already. Pass the uint8 views of the loader.")
    if isinstance(images, PackedImages):
        if view.color is not None:
            raise ValueError("Packed images cannot have colour changes.")
        x = pixels.to(torch.float32).div_(255).view(-1, preprocessing.channels)  # channels vary fastest in a patch
        return replace(images, patches=_normalize(x, preprocessing).to(dtype).view_as(pixels))
    if view.color is not None:
        return augment_colors(images, view.color, preprocessing).to(dtype)
    x = images.to(torch.float32, memory_format=torch.contiguous_format).div_(255)
    return _normalize(x, preprocessing).to(dtype)


def luminance(x: Tensor) -> Tensor:
    """Gray value of colours (ITU-R 601): (N, 3, H, W) -> (N, 1, H, W)."""
    return (x[:, 0:1] * 0.299).add_(x[:, 1:2], alpha=0.587).add_(x[:, 2:3], alpha=0.114)


def shift_hue(x: Tensor, turns: Tensor) -> Tensor:
    """Move the hue by `turns` of the circle, keep value and saturation: (N, 3, H, W) from 0 to 1, (N,) -> same."""
    red, green, blue = x.unbind(1)  # (N, H, W)
    value, chroma = x.amax(1), x.amax(1) - x.amin(1)
    divisor = torch.where(chroma == 0, 1, chroma)
    sixth = torch.where(value == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor)
    sixth = torch.where(value == red, (green - blue) / divisor, sixth) + 6 * turns[:, None, None]
    out = torch.empty_like(x)
    for channel, start in enumerate((5, 3, 1)):  # a channel is full over two sixths, empty over two, a ramp between
        k = (sixth + start).remainder_(6)
        out[:, channel] = value - chroma * torch.minimum(k, 4 - k).clamp_(0, 1)
    return out


def gaussian_blur(x: Tensor, sigma: Tensor, radius: int) -> Tensor:
    """Blur with one standard deviation a crop, edges repeated: (N, 3, H, W), (N,) -> (N, 3, H, W).

    Weights end at four standard deviations and at `radius` pixels and sum to one.
    """
    with exact(x.device):
        rows, columns = (_blur_matrix(sigma, length, radius) for length in x.shape[-2:])  # (N, H, H), (N, W, W)
        x = (x.flatten(1, 2) @ columns.mT).view_as(x)
        return torch.stack([rows @ channel for channel in x.unbind(1)], dim=1)  # (N, 3, H, W)


def _blur_matrix(sigma: Tensor, length: int, radius: int) -> Tensor:
    """Blur of a line of `length` pixels as a matrix: (n,) -> (n, length, length)."""
    offsets = torch.arange(-radius, radius + 1, device=sigma.device)  # (D,)
    weights = torch.exp(-0.5 * (offsets / sigma[:, None]).square())  # (n, D)
    weights = weights * (offsets.abs() <= torch.ceil(4 * sigma[:, None]))
    weights = weights / weights.sum(1, keepdim=True)
    pixels = torch.arange(length, device=sigma.device)
    sources = (pixels + offsets[:, None]).clamp_(0, length - 1)  # (D, length)
    taps = (sources[:, :, None] == pixels).to(weights.dtype)  # (D, length, length): 1 where a tap reads a pixel
    return (weights @ taps.flatten(1)).unflatten(1, (length, length))


def _blends(p: ColorParameters) -> Tensor:
    """(3, 4, N): at each of four places in the order, the factors of the picture, of its gray, of the mean of its gray.

    All factors but hue are x * f + (1 - f) * r with r black, the gray picture or its mean, so that crops in different
    orders go through the same arithmetic. At the place of hue nothing changes.
    """
    factors = torch.stack([p.brightness, p.contrast, p.saturation, torch.ones_like(p.hue)], dim=1)  # (N, 4)
    factors = factors.gather(1, p.order)
    rest = 1 - factors
    return torch.stack([factors, rest * (p.order == SATURATION), rest * (p.order == CONTRAST)]).transpose(1, 2)


def _chosen(flags: list[Tensor], device: torch.device) -> list[Tensor]:
    """For each (N,) bool on the CPU the int64 list of its true places, on `device`; all go over in one copy."""
    places = [flag.nonzero().squeeze(1) for flag in flags]
    return list(_to_device(torch.cat(places), device).split([len(p) for p in places]))


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy without waiting: only from pinned memory does CUDA copy in the background."""
    return (
        tensor.contiguous().pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
    )


def _normalize(x: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Normalise (N, C, ...) in place, channel by channel."""
    for channel, (mean, std) in enumerate(zip(preprocessing.mean, preprocessing.std, strict=True)):
        x[:, channel].sub_(mean).div_(std)
    return x
