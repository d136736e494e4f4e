"""Arithmetic of pixel values on batches: gray images, hues, blurs and normalisation, in both forms of crops.

Values are floats from 0 to 1. The gray image of a crop that is not RGB is the mean of its channels.

Shapes: N crops have C channels and H x W pixels. An operation changes n of the N crops. A blur kernel has D taps.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.data.resample import to_type
from tessera.encoders.base import Preprocessing
from tessera.encoders.segments import copy_to_device

LUMINANCE = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in the gray image."""
BAND = 64
"""Number of lines that a CPU blurs with one matrix product. It skips the zeros of the matrix outside of these lines."""

Crops = Tensor | tuple[Tensor, ...]
"""Values of N crops: one tensor (N, C, H, W), or separate channels, which are one tensor (N, H, W) per channel.

With separate channels, torch's compiler fuses all operations into few kernels. Each operation then computes all crops
and selects the result by flags, because the number of changed crops is unknown at compile time. With one tensor, each
operation computes only the crops that it changes.
"""


def changed(crops: Crops, chosen: Tensor, change: Callable[..., Crops], *numbers: Tensor) -> Crops:
    """Return crops in which the crops selected by `chosen` (N,) bool are replaced by `change(crops, *numbers)`.

    Each tensor of `numbers` holds one parameter, (N, ...), of the N crops. `change` may return a single channel, which
    then replaces all channels. If `crops` is one tensor, `change` receives only the chosen crops, and these crops are
    replaced in place. In this case, `chosen` and `numbers` must be on the CPU.
    """
    if not isinstance(crops, Tensor):
        flags, new = per_crop(chosen, crops[0]), change(crops, *numbers)
        channels = (new,) * len(crops) if isinstance(new, Tensor) else new
        return tuple(torch.where(flags, one, x) for one, x in zip(channels, crops, strict=True))
    indices = chosen.nonzero().squeeze(1)  # (n,)
    if not len(indices):
        return crops
    if len(indices) == len(crops):
        new = change(crops, *(copy_to_device(number, crops.device) for number in numbers))
        return new if isinstance(new, Tensor) and new.shape == crops.shape else crops.copy_(new)
    places = copy_to_device(indices, crops.device)
    own = (copy_to_device(number[indices], crops.device) for number in numbers)
    new = change(crops.index_select(0, places), *own)
    assert isinstance(new, Tensor)
    return crops.index_copy_(0, places, new.expand(-1, *crops.shape[1:]))


def each(crops: Crops, change: Callable[[Tensor], Tensor]) -> Crops:
    """Apply a function to the tensor of crops, or to each channel if the channels are separate."""
    return change(crops) if isinstance(crops, Tensor) else tuple(change(channel) for channel in crops)


def each_band(crops: Crops, change: Callable[..., Tensor], *numbers: Tensor) -> Crops:
    """Apply `change(x, band, *numbers)` to crops, where `band` is the index of the band of each value of `x`.

    If `crops` is one tensor, `x` holds all bands and `band` is (C, 1, 1). Otherwise `change` is called once for each
    band, and `band` is a number. `numbers` hold one parameter (n,) per crop, and are broadcast to the values of `x`.
    """
    if isinstance(crops, Tensor):
        bands = torch.arange(crops.shape[1], dtype=torch.int32, device=crops.device)[:, None, None]
        return change(crops, bands, *(per_crop(number, crops) for number in numbers))
    return tuple(change(x, band, *(per_crop(number, x) for number in numbers)) for band, x in enumerate(crops))


def _hashed(seeds: Tensor, places: Tensor | int) -> Tensor:
    """Return int32 random numbers that depend on `seeds` + `places` only. Both are int32.

    Numbers that are computed from the place are the same on every device, for every batch, and in compiled code. The
    function is a bijection of 32 bits (C. Wellons, "Prospecting for Hash Functions", 2018). Products wrap.
    """
    x = seeds + places
    x ^= (x >> 16).bitwise_and_(0xFFFF)  # without the mask, the shift would repeat the sign
    x *= 0x21F0AAAD
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= 0x735A2D97
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    return x


def seeded_uniform(seeds: Tensor, places: Tensor | int) -> Tensor:
    """Return float32 random values from 0 to below 1 that depend on the int32 `seeds` and `places` only."""
    return (_hashed(seeds, places) >> 8).bitwise_and_(0xFFFFFF).float() * 2.0**-24


def normal_noise(seeds: Tensor, places: Tensor) -> Tensor:
    """Return float32 values of a standard normal distribution that depend on the int32 `seeds` and `places` only.

    The values are quantiles of 2**23 equidistant probabilities. The largest is 5.3.
    """
    numbers = (_hashed(seeds, places) >> 9).bitwise_and_(0x7FFFFF)
    return (numbers.float() + 0.5).mul_(2.0**-22).sub_(1).erfinv_().mul_(sqrt(2))


def to_unit(images: Crops, preprocessing: Preprocessing) -> Crops:
    """Return images of the type and range of `preprocessing` as contiguous float32 values from 0 to 1.

    `images` may have any memory order. A value `v` becomes `(v - low) / (high - low)`, limited to the range 0 to 1.
    """
    if preprocessing.low is None and preprocessing.pixel_type == "uint8":
        return from_bytes(images)
    lows, highs = preprocessing.range
    spans = tuple(high - low for low, high in zip(lows, highs, strict=True))
    if not isinstance(images, Tensor):
        each = zip(images, lows, spans, strict=True)
        return tuple(((channel.float() - low) / span).clamp(0, 1) for channel, low, span in each)
    x = torch.empty(images.shape, device=images.device).copy_(images)
    return x.sub_(per_channel(lows, x)).div_(per_channel(spans, x)).clamp_(0, 1)


def from_bytes(images: Crops) -> Crops:
    """Return uint8 images of any memory order as contiguous float32 values from 0 to 1."""
    if not isinstance(images, Tensor):
        return tuple(channel.float() / 255 for channel in images)
    x = torch.empty(images.shape, device=images.device)
    if x.device.type == "cpu":
        return x.copy_(images).div_(255)
    return torch.div(images, 255, out=x)  # convert, divide and reorder in one pass over memory


def from_unit(x: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Return images of the type and range of `preprocessing` with values `x` (N, C, H, W) from 0 to 1."""
    lows, highs = preprocessing.range
    spans = [high - low for low, high in zip(lows, highs, strict=True)]
    return to_type(x * per_channel(spans, x) + per_channel(lows, x), preprocessing.dtype)


def gray_image(crops: Crops) -> Tensor:
    """Return the ITU-R 601 luminance of RGB crops, or the channel mean of other crops.

    The shape is (N, 1, H, W), or (N, H, W) for separate channels.
    """
    if not isinstance(crops, Tensor):
        return reduce(torch.add, (w * x for w, x in zip(gray_weights(len(crops)), crops, strict=True)))
    weights = copy_to_device(torch.tensor(gray_weights(crops.shape[1])), crops.device)
    with exact(crops.device):
        return torch.bmm(weights.expand(len(crops), 1, -1), crops.flatten(2)).view_as(crops[:, :1])


def gray_weights(channels: int) -> tuple[float, ...]:
    """Return the weights of the channels in the gray image."""
    return LUMINANCE if channels == 3 else (1 / channels,) * channels


def shift_hue(crops: Crops, sixths: Tensor) -> Crops:
    """Shift the hue of each RGB crop by its entry in `sixths` (N,), in sixths of the colour circle.

    In HSV, only the hue changes. Saturation and value stay constant.
    """
    red, green, blue = crops.split(1, dim=1) if isinstance(crops, Tensor) else crops
    value = torch.maximum(red, green).clamp_(min=blue)
    low = torch.minimum(red, green).clamp_(max=blue)
    chroma = value - low
    # The distance from red on the colour circle, in sixths (0 to 3), is
    # (value - red + green - low + blue - low) / chroma for each order of the channels. The hue is on the side of green
    # if green is greater than blue, and on the side of blue otherwise. Without a choice between values, this takes a
    # CPU a third of the time.
    hue = low.neg_().add_(blue).add_(green).sub_(red).add_(chroma)
    hue.div_(chroma.clamp(min=torch.finfo(chroma.dtype).tiny)).copysign_(green - blue).add_(per_crop(sixths, hue))
    hue.sub_((hue / 6).floor_(), alpha=6)  # `remainder_`, but faster; 0 to 6
    # Around the colour circle, each channel stays at its maximum for two sixths of the circle, stays at its minimum for
    # two sixths, and is linear in between. The value of a channel is therefore a linear function of the hue's distance
    # from the channel's pure colour (0 or 6 for red, 2 for green, 4 for blue), if this distance is first clamped to the
    # range 1 to 2. The distance from red is 3 - |hue - 3|.
    if isinstance(crops, Tensor):
        far: Crops = (hue - per_channel((3, 2, 4), crops)).abs_()
        far[:, :1].neg_().add_(3)
    else:
        far = (3 - (hue - 3).abs(), (hue - 2).abs(), (hue - 4).abs())
    top = value.add_(chroma)
    return each(far, lambda x: torch.addcmul(top, chroma, x.clamp_(1, 2), value=-1, out=x))


def per_crop(numbers: Tensor, x: Tensor) -> Tensor:
    """Reshape one value per crop to (N, 1, ...), so that it broadcasts over a tensor `x` (N, ...)."""
    return numbers.view(-1, *(1,) * (x.ndim - 1))


def per_channel(values: Sequence[float], x: Tensor) -> Tensor:
    """Reshape one value per channel to (C, 1, ...), so that it broadcasts over `x` (N, C, ...), on its device."""
    return copy_to_device(torch.tensor(values), x.device).view(-1, *(1,) * (x.ndim - 2))


def exact(device: torch.device) -> AbstractContextManager:
    """Return a context that turns autocast off, because a lower precision than float32 would change pixel values."""
    return torch.autocast(device.type, enabled=False) if device.type in ("cpu", "cuda") else nullcontext()


def blur_weights(sigma: Tensor, radius: int) -> Tensor:
    """Return the taps of Gaussian kernels: (N,) -> (N, D), D = 2 * `radius` + 1.

    A kernel reaches four standard deviations to each side, but at most `radius` pixels. Its weights sum to one.
    """
    offsets, sigma = torch.arange(-radius, radius + 1), sigma.clamp(min=torch.finfo(sigma.dtype).tiny)[:, None]
    weights = torch.exp(-0.5 * (offsets / sigma).square()) * (offsets.abs() <= torch.ceil(4 * sigma))
    return weights / weights.sum(1, keepdim=True)


def gaussian_blur(lines: Tensor, weights: Tensor) -> Tensor:
    """Blur crop i in both directions by the kernel `weights[i]`: (n, H, C, W), (n, D) -> (n, H, C, W).

    The edge pixels are repeated outside the crop.
    """
    height, _, width = lines.shape[1:]
    radius, cpu = weights.shape[1] // 2, lines.device.type == "cpu"

    def bands(length: int) -> list[tuple[slice, slice]]:
        """Split the output lines into bands. Return each band, and the input lines that it needs."""
        band = BAND if cpu else length
        starts = range(0, length, band)
        return [(slice(i, i + band), slice(max(0, i - radius), i + band + radius)) for i in starts]

    with exact(lines.device):
        rows = _blur_matrix(weights, height)  # (n, H, H)
        columns = rows if width == height else _blur_matrix(weights, width)  # (n, W, W)
        x = lines.flatten(2)
        x = _joined([rows[:, to, of] @ x[:, of] for to, of in bands(height)], 1).view(len(lines), -1, width)
        x = _joined([x[:, :, of] @ columns[:, to, of].mT for to, of in bands(width)], 2)  # (n, H * C, W)
    return x.unflatten(1, (height, -1))


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)  # `cat` copies a single tensor


def _blur_matrix(weights: Tensor, length: int) -> Tensor:
    """Return one matrix per kernel that blurs lines of `length` pixels: (n, D) -> (n, length, length)."""
    radius = weights.shape[1] // 2
    rows = F.pad(weights, (0, length))[:, None].expand(-1, length, -1).flatten(1)  # (n, length * (length + D))
    # A row that is one value shorter moves the kernel of each row one place to the right of the row above.
    reach = rows[:, : length * (length + 2 * radius)].unflatten(1, (length, -1))  # (n, length, length + D - 1)
    matrix = reach[:, :, radius : radius + length].clone()
    matrix[:, :, 0] += reach[:, :, :radius].sum(2)  # pixels outside the line have the values of the edges
    matrix[:, :, -1] += reach[:, :, radius + length :].sum(2)
    return matrix


def to_pixels(images: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Undo the normalisation of images: (N, C, H, W) -> (N, C, H, W) float32, whole numbers from 0 to 255.

    0 and 255 are the ends of the range of the images. Images of more than 8 bits lose levels.
    """
    x = images.clone()
    for channel, (mean, std) in enumerate(zip(preprocessing.mean, preprocessing.std, strict=True)):
        x[:, channel].mul_(std).add_(mean)
    return x.mul_(255).round_().clamp_(0, 255)


def normalize(x: Tensor, preprocessing: Preprocessing, *, out: Tensor | None = None) -> Tensor:
    """Normalise a tensor (N, C, ...) of values from 0 to 1, in place or into `out`."""
    out = x if out is None else out
    if x.device.type != "cpu":
        return _normalized_at_once(x, preprocessing, out)
    return torch.sub(x, per_channel(preprocessing.mean, x), out=out).div_(per_channel(preprocessing.std, x))


def _normalized_at_once(x: Tensor, preprocessing: Preprocessing, out: Tensor) -> Tensor:
    """Normalise in one pass over memory. The result differs by rounding errors."""
    shifts = [-mean / std for mean, std in zip(preprocessing.mean, preprocessing.std, strict=True)]
    factors = [1 / std for std in preprocessing.std]
    return torch.addcmul(per_channel(shifts, x), x, per_channel(factors, x), out=out)


def normalized_channels(channels: tuple[Tensor, ...], preprocessing: Preprocessing) -> Crops:
    return tuple((x - m) / s for x, m, s in zip(channels, preprocessing.mean, preprocessing.std, strict=True))
