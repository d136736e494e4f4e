"""Colour augmentation of DINO (2104.14294): parameters are drawn on the CPU and applied to batches on any device.

The default settings are those of DINO's main_dino.py. Operations work on floats from 0 to 1 and are defined as in
torchvision: values are clamped after each change, contrast scales the distance of each value from the mean of the gray
image, and the hue is shifted in HSV. The gray image of a crop that is not RGB is the mean of its channels.

Shapes: N crops have C channels and H x W pixels. An operation changes n of the N crops. A blur kernel has D taps.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import Annotated, TypeVar

import numpy as np
import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from tessera.data.batch import Batch, ColorParameters, View
from tessera.data.fused_colors import LUMINANCE, compiled, jitter_and_gray, solarize_and_normalize
from tessera.data.resample import cut_views, exact
from tessera.encoders.base import IMAGENET, Preprocessing
from tessera.encoders.images import Images, PackedImages
from tessera.runtime.settings import Section

COLOR_DRAWS = 13
"""Number of random values that are drawn for the colour changes of each crop."""
BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
RGB_ONLY = ("saturation", "hue", "grayscale")
"""Names of the colour settings whose operations need RGB images."""

log = logging.getLogger(__name__)


def ascending(pair: tuple[float, float]) -> tuple[float, float]:
    """Check that `pair` is a range (low, high), and return `pair` unchanged.

    Raises:
        ValueError: the first value is greater than the second value.
    """
    if not pair[0] <= pair[1]:
        raise ValueError(f"The range starts at {pair[0]} and ends at {pair[1]}. Give the smaller value first.")
    return pair


Share = Annotated[float, Field(ge=0, le=1)]
Strength = Annotated[float, Field(ge=0)]
Sigmas = Annotated[tuple[Strength, Strength], AfterValidator(ascending)]
BLUR_SIGMA = (0.1, 2.0)
"""Smallest and largest standard deviation of the Gaussian blur in DINO (2104.14294), in pixels of a crop."""


class ColorConfig(Section, frozen=True):
    """Settings of the colour changes that all views share."""

    brightness: Strength = 0.4
    """strength of the brightness change: the brightness factor is drawn from 1 - strength to 1 + strength"""
    contrast: Strength = 0.4
    """strength of the contrast change: the contrast factor is drawn from 1 - strength to 1 + strength"""
    saturation: Strength = 0.2
    """strength of the saturation change: the saturation factor is drawn from 1 - strength to 1 + strength"""
    hue: float = Field(default=0.1, ge=0, le=0.5)
    """largest shift of the hue in either direction, in turns of the colour circle"""
    jitter: Share = 0.8
    """probability that the brightness, contrast, saturation and hue of a crop are changed; their order is random"""
    grayscale: Share = 0.2
    """probability that a crop is converted to gray"""


ColorConfigT = TypeVar("ColorConfigT", bound=ColorConfig)


def colors_for(config: ColorConfigT, channels: int) -> ColorConfigT:
    """Return the colour settings for images of `channels` channels.

    If the images are not RGB, the settings that need RGB images (`RGB_ONLY`) are set to 0.

    Raises:
        ValueError: the images are not RGB, but the user asked for an operation that needs RGB images.
    """
    names = [name for name in RGB_ONLY if getattr(config, name) > 0] if channels != 3 else []
    if given := [name for name in names if name in config.model_fields_set]:
        raise ValueError(
            f"The number of image channels is {channels}, but these settings need RGB images: {', '.join(given)}. "
            "Set them to 0, or leave them out."
        )
    if names:
        log.warning(
            "Images of %d channels are not RGB. These colour changes are turned off: %s", channels, ", ".join(names)
        )
    return config.model_copy(update=dict.fromkeys(names, 0.0))


def draw_colors(
    rng: np.random.Generator,
    config: ColorConfig,
    blur: Sequence[float],
    solarize: Sequence[float],
    *,
    blur_sigma: tuple[float, float] = BLUR_SIGMA,
) -> ColorParameters:
    """Draw the colour changes of N crops.

    Crop i is blurred with probability `blur[i]`, by a standard deviation in the range `blur_sigma`, and solarised with
    probability `solarize[i]`. For any settings, the function draws N * `COLOR_DRAWS` values from `rng`, one crop after
    another.
    """
    u = rng.random((len(blur), COLOR_DRAWS))  # (N, COLOR_DRAWS)
    spread = np.array([config.brightness, config.contrast, config.saturation, config.hue])
    neutral = np.array([1.0, 1.0, 1.0, 0.0])
    low = np.maximum(neutral - spread, [0, 0, 0, -0.5])
    factors = np.where(u[:, :1] < config.jitter, low + (neutral + spread - low) * u[:, 1:5], neutral)  # (N, 4)
    least, most = blur_sigma
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
def augment_colors(
    images: Tensor, p: ColorParameters, preprocessing: Preprocessing = IMAGENET, *, compile: bool = False
) -> Tensor:
    """Apply colour changes, then normalise: (N, C, H, W) uint8 -> (N, C, H, W) float32.

    The operations are applied in the order jitter, gray, blur, solarise. Operations that no crop needs are skipped. The
    parameters are in CPU memory, so that the CPU decides which crops need which operation without waiting for the
    device. Only factors and crop indices are sent to the device.

    Args:
        compile: compile all operations but the blur with torch's compiler, once for each shape of `images`. They are
            computed for every crop and chosen by flags. The values differ by rounding.

    Raises:
        ValueError: a colour change needs RGB images, but the images are not RGB.
    """
    if images.shape[1] != 3 and bool(((p.saturation != 1) | (p.hue != 0) | p.grayscale).any()):
        raise ValueError(
            f"Saturation, hue and grayscale need RGB images, but these images have {images.shape[1]} channels."
        )
    # The hue is shifted before, between or after the three blends.
    is_hue = p.order == HUE  # (N, 4)
    hue_place = torch.where(p.hue != 0, is_hue.int().argmax(1), -1)  # (N,)
    blends = _blends(p, p.order[~is_hue].view(-1, 3))  # (3, 3, N)
    if compile:
        [blurred] = _chosen([p.blur > 0], images.device)
        places, gray, solarize = _to_device(torch.stack([hue_place, p.grayscale, p.solarize]), images.device)
        factors = _to_device(torch.stack([*blends.flatten(0, 1), p.hue, p.blur]), images.device)
        x = compiled(jitter_and_gray)(images, factors[:9].view(3, 3, -1), places, factors[9], gray != 0)
        _blur(x, blurred, p.blur, factors[10])
        return compiled(solarize_and_normalize)(x, solarize != 0, preprocessing.mean, preprocessing.std)
    x = _from_bytes(images)
    *hues, gray, blurred, solarized = _chosen(
        [*(hue_place == place for place in range(4)), p.grayscale, p.blur > 0, p.solarize], x.device
    )
    hue, sigma = _to_device(torch.stack([p.hue, p.blur]), x.device)  # (N,)
    x = _jitter(x, hues, hue, blends)
    if len(gray):
        x.index_copy_(0, gray, gray_image(x[gray]).expand(-1, x.shape[1], -1, -1))
    _blur(x, blurred, p.blur, sigma)
    if len(solarized):
        y = x[solarized]
        x.index_copy_(0, solarized, torch.minimum(y, 1 - y))  # which is 1 - y if y is at least 0.5
    return normalize(x, preprocessing)


def _jitter(x: Tensor, hues: Sequence[Tensor], hue: Tensor, blends: Tensor) -> Tensor:
    """Change the brightness, contrast, saturation and hue of crops: (N, C, H, W) values from 0 to 1. May change `x`.

    Args:
        hues: indices of the crops whose hue is shifted before, between or after the three blends, on the device.
        hue: (N,) shift of the hue in turns, on the device.
        blends: factors of `_blends`, on the CPU.
    """
    scale, to_gray, to_mean = _to_device(blends, x.device)[..., None, None, None]  # (3, N, 1, 1, 1)
    for place in range(4):
        if len(hues[place]):
            x.index_copy_(0, hues[place], shift_hue(x[hues[place]], hue[hues[place]]))
        if place < 3 and (blends[0, place] != 1).any():
            shade = gray_image(x)  # (N, 1, H, W)
            shade = torch.addcmul(shade.mean((2, 3), keepdim=True) * to_mean[place], shade, to_gray[place])
            x = torch.addcmul(shade, x, scale[place]).clamp_(0, 1)
    return x


def _blur(x: Tensor, blurred: Tensor, known: Tensor, sigma: Tensor) -> None:
    """Blur crops in place: (N, C, H, W).

    Args:
        blurred: (n,) indices of the crops, on the device.
        known: (N,) standard deviations on the CPU, which bound the reach of the kernel.
        sigma: (N,) the same on the device.
    """
    if len(blurred):
        # (n, H, C, W), the memory order in which the blur copies nothing
        lines = x.transpose(1, 2).index_select(0, blurred)
        y = gaussian_blur(lines.transpose(1, 2), sigma[blurred], radius=ceil(4 * float(known.max())))
        x.index_copy_(0, blurred, y)


@torch.no_grad()
def to_model_input(batch: Batch, dtype: torch.dtype = torch.float32, *, compile: bool = False) -> Batch:
    """Convert the uint8 views of a batch to normalised float views.

    If the batch holds whole images, the crops are cut first. Then colours are changed and values are normalised.

    Args:
        compile: compile the colour changes with torch's compiler (`augment_colors`).

    Raises:
        ValueError: the views are already floats, or a view of packed images has colour changes.
    """
    if batch.raw is not None:
        batch = cut_views(batch)
    views = [
        replace(view, images=_finish(view, batch.preprocessing, dtype, compile), color=None) for view in batch.views
    ]
    return replace(batch, views=views, memory=None)


def _finish(view: View, preprocessing: Preprocessing, dtype: torch.dtype, compile: bool) -> Images:
    """Return the images of a view with colour changes applied and values normalised."""
    images = view.images
    pixels = images.patches if isinstance(images, PackedImages) else images
    if pixels.is_floating_point():
        raise ValueError("The views of this batch are floats already. Pass a batch of the loader, with uint8 views.")
    if isinstance(images, PackedImages):
        if view.color is not None:
            raise ValueError("Packed images cannot have colour changes. Use a transform that draws no colour changes.")
        # Within a patch, the channel index varies fastest, so that the last axis after `view` is the channel.
        x = pixels.to(torch.float32).div_(255).view(-1, preprocessing.channels)
        return replace(images, patches=normalize(x, preprocessing).to(dtype).view_as(pixels))
    if view.color is not None:
        return augment_colors(images, view.color, preprocessing, compile=compile).to(dtype)
    return normalize(_from_bytes(images), preprocessing).to(dtype)


def _from_bytes(images: Tensor) -> Tensor:
    """Return uint8 images of any memory order as contiguous float32 values from 0 to 1, in one operation."""
    return torch.div(images, 255, out=torch.empty(images.shape, device=images.device))


def gray_image(x: Tensor) -> Tensor:
    """Return the ITU-R 601 luminance of RGB images, or the channel mean of other images.

    Shapes: (N, C, H, W) -> (N, 1, H, W).
    """
    if x.shape[1] != 3:
        return x.mean(1, keepdim=True)
    weights = x.new_empty(1, 1, 3)
    for channel, weight in enumerate(LUMINANCE):
        weights[..., channel] = weight
    with exact(x.device):
        return torch.bmm(weights.expand(len(x), 1, 3), x.flatten(2)).view_as(x[:, :1])


def shift_hue(x: Tensor, turns: Tensor) -> Tensor:
    """Shift the hue of crop i by `turns[i]` turns of the colour circle: (N, 3, H, W), (N,) -> (N, 3, H, W).

    In HSV, only the hue changes. Saturation and value stay constant.
    """
    red, green, blue = x.unbind(1)  # (N, H, W)
    value = x.amax(1)
    chroma = value - x.amin(1)
    # the hue in sixths of the circle times the chroma, from -1 to 5 times the chroma
    sixth = torch.where(value == green, (blue - red).add_(chroma, alpha=2), (red - green).add_(chroma, alpha=4))
    sixth = torch.where(value == red, green - blue, sixth).div_(chroma.clamp(min=torch.finfo(x.dtype).tiny))
    sixth = sixth.add_(6 * turns[:, None, None]).remainder_(6)
    # As the hue goes round the colour circle, each channel stays at its maximum for two sixths of the circle, stays at
    # its minimum for two sixths, and is linear in between. The distance of the hue from that of red, green or blue,
    # clamped to a range from 1 to 2, thus says how far the channel is from its maximum. The distance from red, which is
    # at 0 and 6, is 3 less the distance from 3.
    far = torch.empty_like(x)
    for channel, other in enumerate((3, 2, 4)):
        torch.sub(sixth, other, out=far[:, channel])
    far.abs_().clamp_(1, 2)[:, 0].neg_().add_(3)
    return torch.addcmul((value + chroma)[:, None], chroma[:, None], far, value=-1)


def gaussian_blur(x: Tensor, sigma: Tensor, radius: int) -> Tensor:
    """Apply a Gaussian blur of standard deviation `sigma[i]` to crop i: (N, C, H, W), (N,) -> (N, C, H, W).

    The kernel reaches four standard deviations to each side, but at most `radius` pixels. The kernel weights sum to
    one. Outside the crop, the kernel sees repeated edge pixels.
    """
    lines = x.transpose(1, 2)  # (N, H, C, W)
    height, _, width = lines.shape[1:]
    with exact(x.device):
        rows = _blur_matrix(sigma, height, radius)  # (N, H, H)
        columns = rows if width == height else _blur_matrix(sigma, width, radius)  # (N, W, W)
        lines = (rows @ lines.flatten(2)).view(len(x), -1, width) @ columns.mT  # (N, H * C, W)
    return lines.unflatten(1, (height, -1)).transpose(1, 2)  # (N, C, H, W)


def _blur_matrix(sigma: Tensor, length: int, radius: int) -> Tensor:
    """Return for each standard deviation a matrix that blurs lines of `length` pixels: (n,) -> (n, length, length)."""
    offsets = torch.arange(-radius, radius + 1, device=sigma.device)  # (D,)
    weights = torch.exp(-0.5 * (offsets / sigma[:, None]).square())  # (n, D)
    weights = weights * (offsets.abs() <= torch.ceil(4 * sigma[:, None]))
    weights = weights / weights.sum(1, keepdim=True)
    pixels = torch.arange(length, device=sigma.device)
    sources = (pixels + offsets[:, None]).clamp_(0, length - 1)  # (D, length)
    # (D, length, length): entry [d, i, j] is 1 if tap d of output pixel i takes its value from input pixel j.
    taps = (sources[:, :, None] == pixels).to(weights.dtype)
    return (weights @ taps.flatten(1)).unflatten(1, (length, length))


def _blends(p: ColorParameters, order: Tensor) -> Tensor:
    """Return the factors of brightness, contrast and saturation of each crop, in the order in which they are applied.

    The result is (3, 3, N). Its first axis holds the factor of the image, the factor of its gray image, and the factor
    of the mean of the gray image. The three changes compute x * f + (1 - f) * r, where r is black for brightness, the
    gray image for saturation, and the mean of the gray image for contrast. Because they have the same form, one
    operation can change crops that have different orders of changes.

    Args:
        order: (N, 3) changes without the hue, in the order in which they are applied.
    """
    factors = torch.stack([p.brightness, p.contrast, p.saturation], dim=1).gather(1, order)  # (N, 3)
    rest = 1 - factors
    return torch.stack([factors, rest * (order == SATURATION), rest * (order == CONTRAST)]).transpose(1, 2)


def _chosen(flags: list[Tensor], device: torch.device) -> list[Tensor]:
    """Return one tensor on `device` for each tensor in `flags`: the indices of the true values.

    Each tensor in `flags` is (N,) bool on the CPU. A single copy moves the indices of all tensors to the device.
    """
    places = [flag.nonzero().squeeze(1) for flag in flags]
    return list(_to_device(torch.cat(places), device).split([len(p) for p in places]))


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device without waiting for the end of the copy.

    For CUDA, the tensor is pinned first, because a copy from memory that is not pinned blocks the CPU.
    """
    return (
        tensor.contiguous().pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
    )


def to_pixels(images: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Return the pixels of normalised images: (N, C, H, W) -> (N, C, H, W) float32, whole numbers from 0 to 255."""
    x = images.clone()
    for channel, (mean, std) in enumerate(zip(preprocessing.mean, preprocessing.std, strict=True)):
        x[:, channel].mul_(std).add_(mean)
    return x.mul_(255).round_().clamp_(0, 255)


def normalize(x: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Normalise a tensor (N, C, ...) of values from 0 to 1 in place, one channel at a time."""
    for channel, (mean, std) in enumerate(zip(preprocessing.mean, preprocessing.std, strict=True)):
        x[:, channel].sub_(mean).div_(std)
    return x
