"""The colour changes of `data.augment`, written for torch's compiler, which fuses each function into few kernels.

The functions compute each change for every crop, and keep the old values where a crop does not need the change. A GPU
then reads the bytes of all crops twice (first for the mean of the contrast) and writes their values once, where the
functions in `data.augment` read and write the crops for each change.

Shapes: N crops have C channels and H x W pixels.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

LUMINANCE = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in the gray image."""


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function compiled by torch, which compiles it once for each shape of its arguments."""
    from torch._inductor import list_options  # imported here, because the import takes seconds

    # By default, a GPU gets a kernel of its own for the channels, which reads and writes all values again.
    separate = ("max_pointwise_cat_inputs", "max_complex_pointwise_cat_inputs")
    return torch.compile(function, dynamic=False, options={name: 1 for name in separate if name in list_options()})


def jitter_and_gray(images: Tensor, blends: Tensor, hue_place: Tensor, hue: Tensor, grayscale: Tensor) -> Tensor:
    """Change brightness, contrast, saturation and hue, then convert crops to gray: uint8 -> float32 from 0 to 1.

    Args:
        images: (N, C, H, W) uint8.
        blends: (3, 3, N) factors of the image, its gray image and the mean of the gray image, for three changes.
        hue_place: (N,) number of blends before the hue is shifted, -1 for no shift.
        hue: (N,) shift in turns of the colour circle.
        grayscale: (N,) bool.
    """
    scale, to_gray, to_mean = blends[..., None, None]  # (3, N, 1, 1)
    place, turns, is_gray = hue_place[:, None, None], hue[:, None, None], grayscale[:, None, None]

    def changed(mean: Tensor | None) -> tuple[list[Tensor], Tensor]:
        """Return the channels, and the gray image that is the reference of the contrast.

        Without `mean`, the contrast is not changed, so that only the gray image is meaningful.
        """
        channels = [images[:, c].float() / 255 for c in range(images.shape[1])]
        reference = torch.zeros_like(channels[0])
        for number in range(4):
            if len(channels) == 3:
                shifted = _shift_hue(*channels, turns)
                channels = [torch.where(place == number, s, c) for s, c in zip(shifted, channels, strict=True)]
            if number < 3:
                gray = _gray(channels)
                reference = torch.where(to_mean[number] != 0, gray, reference)
                rest = gray * to_gray[number]
                if mean is not None:
                    rest = rest + mean * to_mean[number]
                channels = [(rest + c * scale[number]).clamp(0, 1) for c in channels]
        return channels, reference

    _, reference = changed(None)
    channels, _ = changed(reference.mean((1, 2), keepdim=True))
    gray = _gray(channels)
    return torch.stack([torch.where(is_gray, gray, c) for c in channels], dim=1)


def solarize_and_normalize(x: Tensor, solarize: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Solarise crops, then normalise each channel: (N, C, H, W) -> (N, C, H, W) float32.

    Args:
        x: values from 0 to 1.
        solarize: (N,) bool.
    """
    x = torch.where(solarize[:, None, None, None], torch.minimum(x, 1 - x), x)
    channel = torch.arange(x.shape[1], device=x.device)[:, None, None]
    return (x - _by_channel(channel, mean)) / _by_channel(channel, std)


def _by_channel(channel: Tensor, values: Sequence[float]) -> Tensor:
    """Return the value of each channel. A tensor of `values` would be copied from the CPU at each call."""
    chosen = torch.zeros(channel.shape, device=channel.device)
    for number, value in enumerate(values):
        chosen = torch.where(channel == number, value, chosen)
    return chosen


def _gray(channels: list[Tensor]) -> Tensor:
    """Return the luminance of RGB, or the mean of other channels: C x (N, H, W) -> (N, H, W)."""
    weights = LUMINANCE if len(channels) == 3 else [1 / len(channels)] * len(channels)
    return sum((w * c for w, c in zip(weights, channels, strict=True)), start=torch.zeros_like(channels[0]))


def _shift_hue(red: Tensor, green: Tensor, blue: Tensor, turns: Tensor) -> list[Tensor]:
    """Shift the hue in HSV by the formula of `data.augment.shift_hue`, channel by channel."""
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    sixth = torch.where(value == green, blue - red + 2 * chroma, red - green + 4 * chroma)
    sixth = torch.where(value == red, green - blue, sixth) / chroma.clamp(min=torch.finfo(chroma.dtype).tiny)
    sixth = torch.remainder(sixth + 6 * turns, 6)
    far = [3 - (sixth - 3).abs().clamp(1, 2), (sixth - 2).abs().clamp(1, 2), (sixth - 4).abs().clamp(1, 2)]
    return [value + chroma - chroma * f for f in far]
