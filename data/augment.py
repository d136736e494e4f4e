"""Colour augmentation of DINO (2104.14294): operations are drawn on the CPU and applied to batches on any device.

An operation has settings, draws parameters for each crop, and changes the crops of a batch (`Operation`).

The default settings are those of DINO's main_dino.py. Operations work on floats from 0 to 1 and are defined as in
torchvision: values are clamped after each change, contrast scales the distance of each value from the mean of the gray
image, and the hue is shifted in HSV. The gray image of a crop that is not RGB is the mean of its channels.

Shapes: N crops have C channels and H x W pixels. An operation changes n of the N crops. A blur kernel has D taps.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial, reduce
from itertools import groupby
from math import ceil
from typing import Annotated, Any, ClassVar, TypeVar
from zlib import crc32

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import AfterValidator, Field
from torch import Tensor

from tessera.data.batch import Batch, Colors, View
from tessera.encoders.base import IMAGENET, Preprocessing
from tessera.encoders.images import Images, PackedImages
from tessera.encoders.segments import copy_to_device
from tessera.runtime.settings import Section

SHARED_DRAWS = 13
"""Number of random values of a crop that DINO's operations share (`Operation.shared`). It never changes, because the
crops and colours of every run would change with it."""
HUE = 3
"""Index of the hue among the changes of `Jitter`: brightness (0), contrast (1), saturation (2), hue (3)."""
LUMINANCE = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in the gray image."""
RGB_ONLY = ("saturation", "hue", "grayscale")
"""Names of the colour settings whose operations need RGB images."""

CACHED = 2**20
"""Number of values that a CPU changes at a time, so that they stay in its cache from one operation to the next."""
BAND = 64
"""Number of lines that a CPU blurs with one matrix product. It skips the zeros of the matrix outside of these lines."""

Crops = Tensor | tuple[Tensor, ...]
"""Values of N crops: one tensor (N, C, H, W), or separate channels, which are one tensor (N, H, W) per channel.

With separate channels, torch's compiler fuses all operations into few kernels. Each operation then computes all crops
and selects the result by flags, because the number of changed crops is unknown at compile time. With one tensor, each
operation computes only the crops that it changes.
"""

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
    """Settings of the colour changes. The settings apply to all views."""

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


class Operation:
    """A random colour change. Its attributes are its settings. Operations must be picklable."""

    values: ClassVar[int] = 1
    """Number of random values per crop. They come from a stream of the operation's own (`own_rng`)."""
    shared: ClassVar[tuple[int, ...]] = ()
    """Indices of the operation's random values among the `SHARED_DRAWS` values of a crop, in place of `values`. Only
    DINO's operations share values."""
    fuses: ClassVar[bool] = True
    """True if `apply` accepts both forms of `Crops`, so that the compiler can fuse the operation with others; False if
    `apply` accepts only one tensor."""

    def draw(self, u: np.ndarray) -> np.ndarray:
        """Turn uniform random values into the parameters of n crops: (n, values) -> (n,) or (n, k)."""
        raise NotImplementedError

    def prepare(self, numbers: Tensor) -> tuple[Tensor, ...]:
        """Compute the arguments of `apply` on the CPU: parameters of N crops, (N,) or (N, k) -> tensors (N, ...)."""
        return (numbers,)

    apply: ClassVar[Callable[..., Crops]]
    """Static method that changes crops: `apply(crops, *arguments)` returns crops in the same form.

    Values are from 0 to 1. If `crops` is one tensor, it may be changed in place, and the arguments are on the CPU, so
    that the CPU can decide which crops need the operation without waiting for the device. If the channels are separate,
    the arguments are on the device.
    """


@dataclass(frozen=True)
class Jitter(Operation):
    """Changes brightness, contrast, saturation and hue in random order, like torchvision's ColorJitter.

    The eight parameters of a crop are the factors of brightness, contrast and saturation (1 for no change), the hue
    shift from -0.5 to 0.5 turns of the colour circle (0 for no change), and the indices of the four changes in the
    order in which they are applied.
    """

    shared = (0, 1, 2, 3, 4, 7, 8, 9, 10)

    brightness: float
    contrast: float
    saturation: float
    hue: float
    probability: float

    def draw(self, u: np.ndarray) -> np.ndarray:
        spread = np.array([self.brightness, self.contrast, self.saturation, self.hue])
        neutral = np.array([1.0, 1.0, 1.0, 0.0])
        low = np.maximum(neutral - spread, [0, 0, 0, -0.5])
        factors = np.where(u[:, :1] < self.probability, low + (neutral + spread - low) * u[:, 1:5], neutral)  # (n, 4)
        return np.concatenate([factors, u[:, 5:].argsort(1)], axis=1).astype(np.float32)  # (n, 8)

    def prepare(self, numbers: Tensor) -> tuple[Tensor, ...]:
        """Return the weights of three blends, the place of the hue shift, and the hue shift: (N, 3, 3), (N,), (N,).

        Brightness, contrast and saturation compute x * f + (1 - f) * r, where r is black for brightness, the mean of
        the gray image for contrast, and the gray image for saturation. The three changes have the same form, so one
        blend can apply a different change to each crop.

        Axis 1 of the weights selects one of the three blends, in the order in which they are applied to the crop. Axis
        2 selects the image, its gray image, or the mean of its gray image. The place of the hue shift is the number of
        blends before the shift; -1 for no shift. The hue shift is in sixths of the colour circle.
        """
        hue, order = numbers[:, HUE], numbers[:, 4:].long()  # (N,), (N, 4)
        is_hue = order == HUE
        blends = order[~is_hue].view(-1, 3)  # (N, 3): brightness, contrast and saturation in their order
        factors = numbers.gather(1, blends)
        rest = 1 - factors
        stacked = torch.stack([factors, rest * (blends == 2), rest * (blends == 1)], dim=2)  # (N, 3, 3)
        return stacked, torch.where(hue != 0, is_hue.int().argmax(1), -1), 6 * hue

    @staticmethod
    def apply(crops: Crops, blends: Tensor, hue_place: Tensor, sixths: Tensor) -> Crops:
        if isinstance(crops, Tensor):
            mixing, shading = _mixing(blends, crops.shape[1])
            jittered = (blends[:, :, 0] != 1).any(1) | (hue_place >= 0)
            for place in range(-1, 4):  # crops whose hue changes at the same place are changed together
                chosen, change = jittered & (hue_place == place), partial(_jittered_with_hue_at, place)
                crops = changed(crops, chosen, change, mixing, shading, sixths)
            return crops
        # Contrast needs the mean of all pixels, so compiled code computes the changes twice: first for the mean alone.
        _, gray = _jittered(crops, blends, hue_place, sixths, torch.zeros_like(crops[0][:, :1, :1]))
        return _jittered(crops, blends, hue_place, sixths, gray.mean((1, 2), keepdim=True))[0]


def _mixing(blends: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """Return blends as matrices and shades: (N, 3, 3) -> (N, 3, C, C), (N, 3, 1, C).

    A blended pixel is the product of the matrix and the pixel, plus the product of the shade and the mean pixel.
    """
    scale, to_gray, to_mean = blends[..., None, None].unbind(2)  # (N, 3, 1, 1) each
    luminance = torch.tensor(gray_weights(channels))
    return scale * torch.eye(channels) + to_gray * luminance, to_mean * luminance


def _jittered_with_hue_at(place: int, crops: Tensor, mixing: Tensor, shading: Tensor, sixths: Tensor) -> Tensor:
    """Return crops (n, C, H, W) after three blends and a hue shift, which follows `place` blends; -1 for no shift."""
    for blend in range(4):
        if blend == place and crops.shape[1] == 3:  # only RGB has a hue
            crops = shift_hue(crops, sixths)
        if blend < 3:
            with exact(crops.device):
                mixed = torch.bmm(mixing[:, blend], crops.flatten(2))  # (n, C, H * W)
                if crops.device.type != "cpu" or bool(shading[:, blend].any()):  # values on a device are not read
                    mixed.add_(shading[:, blend] @ crops.mean((2, 3))[:, :, None])  # (n, 1, 1)
            crops = mixed.clamp_(0, 1).view_as(crops)
    return crops


def _jittered(
    channels: tuple[Tensor, ...], blends: Tensor, hue_place: Tensor, sixths: Tensor, mean: Tensor
) -> tuple[Crops, Tensor]:
    """Return jittered crops, and the gray images from whose means the contrast change is computed.

    Args:
        channels: separate channels of the crops, with values from 0 to 1.
        blends: first result of `Jitter.prepare`. `hue_place` and `sixths` are the other two results.
        mean: means of the gray images, (N, 1, 1).
    """
    reference, crops = torch.empty(0), channels
    for place in range(4):
        if len(crops) == 3:  # only RGB has a hue
            crops = changed(crops, hue_place == place, shift_hue, sixths)
        if place < 3:
            gray = gray_image(crops)
            scale, to_gray, to_mean = (per_crop(factor, gray) for factor in blends[:, place].unbind(1))
            reference = gray if place == 0 else torch.where(to_mean != 0, gray, reference)
            shade = torch.addcmul(mean * to_mean, gray, to_gray)
            crops = each(crops, lambda x, shade=shade, scale=scale: torch.addcmul(shade, x, scale).clamp_(0, 1))
    return crops, reference


@dataclass(frozen=True)
class Grayscale(Operation):
    """Converts crops to gray. The parameter of a crop is True if the crop is converted."""

    shared = (11,)

    probability: float

    def draw(self, u: np.ndarray) -> np.ndarray:
        return u[:, 0] < self.probability

    @staticmethod
    def apply(crops: Crops, flags: Tensor) -> Crops:
        return changed(crops, flags, gray_image)


@dataclass(frozen=True)
class Blur(Operation):
    """Blurs crops. The parameter of a crop is the standard deviation of the Gaussian in pixels; 0 for no blur."""

    shared = (5, 6)
    fuses = False

    probability: tuple[float, ...]
    """Probability of the blur, for each crop of an image."""
    sigma: tuple[float, float]
    """Smallest and largest standard deviation, in pixels."""

    def draw(self, u: np.ndarray) -> np.ndarray:
        least, most = self.sigma
        return np.where(u[:, 0] < self.probability, least + (most - least) * u[:, 1], 0).astype(np.float32)

    def prepare(self, numbers: Tensor) -> tuple[Tensor, ...]:
        return numbers > 0, blur_weights(numbers, radius=ceil(4 * float(numbers.max())))

    @staticmethod
    def apply(crops: Tensor, blurred: Tensor, weights: Tensor) -> Tensor:
        # `gaussian_blur` needs the axes in the order (N, H, C, W), in which it can merge axes without a copy.
        lines = changed(crops.transpose(1, 2), blurred, gaussian_blur, weights)
        assert isinstance(lines, Tensor)
        return lines.transpose(1, 2)


@dataclass(frozen=True)
class Solarize(Operation):
    """Inverts values of 0.5 and above. The parameter of a crop is True if the crop is solarised."""

    shared = (12,)

    probability: tuple[float, ...]
    """Probability of the solarisation, for each crop of an image."""

    def draw(self, u: np.ndarray) -> np.ndarray:
        return u[:, 0] < self.probability

    @staticmethod
    def apply(crops: Crops, flags: Tensor) -> Crops:
        # The minimum is 1 - x if x is at least 0.5, and x otherwise.
        return changed(crops, flags, lambda some: each(some, lambda x: torch.minimum(x, 1 - x)))


def color_operations(
    config: ColorConfig,
    blur: Sequence[float],
    solarize: Sequence[float],
    *,
    blur_sigma: tuple[float, float] = BLUR_SIGMA,
) -> list[Operation]:
    """Return the colour changes of a view of n crops, in the order in which they are applied.

    Crop i is blurred with probability `blur[i]`, and solarised with probability `solarize[i]`. The standard deviation
    of the blur is in the range `blur_sigma`.
    """
    return [
        Jitter(config.brightness, config.contrast, config.saturation, config.hue, config.jitter),
        Grayscale(config.grayscale),
        Blur(tuple(blur), blur_sigma),
        Solarize(tuple(solarize)),
    ]


def own_rng(rng: np.random.Generator, operation: str) -> np.random.Generator:
    """Return a random generator for one operation of a sample. `rng` does not advance.

    The random numbers depend only on the state of `rng` and the name of the operation, so that an operation changes no
    random numbers of other operations, and none of theirs changes its own.
    """
    key = rng.bit_generator.jumped(1 + crc32(operation.encode())).random_raw(2)
    return np.random.Generator(np.random.Philox(key=key))


def draw_colors(rng: np.random.Generator, operations: Sequence[Operation], crops: int) -> Colors:
    """Draw the parameters of colour changes for the crops of one image.

    `rng` always advances by `crops` * `SHARED_DRAWS` values, one crop after another. The number does not depend on
    `operations`. The name of its class selects the stream of an operation that shares no values (`own_rng`).
    """
    shared = rng.random((crops, SHARED_DRAWS))

    def values(one: Operation) -> np.ndarray:
        return shared[:, one.shared] if one.shared else own_rng(rng, type(one).__name__).random((crops, one.values))

    return [(operation, operation.draw(values(operation))) for operation in operations]


@torch.no_grad()
def augment_colors(
    images: Tensor, colors: Colors, preprocessing: Preprocessing = IMAGENET, *, compile: bool = False
) -> Tensor:
    """Apply colour changes, then normalise: (N, C, H, W) uint8 -> (N, C, H, W) float32.

    Args:
        colors: operations in the order in which they are applied, with their parameters for each crop.
        compile: fuse neighbouring operations with torch's compiler, which compiles once for each shape of `images`.
            The results differ from those without compilation by rounding errors.
    """
    steps = [(one.fuses, one.apply, one.prepare(torch.from_numpy(numbers))) for one, numbers in colors]
    if compile:
        return _compiled_steps(images, steps, preprocessing)
    size = max(1, CACHED // images[:1].numel()) if images.device.type == "cpu" else len(images)
    parts = [slice(start, start + size) for start in range(0, len(images), size)]
    out = torch.empty(images.shape, device=images.device) if len(parts) > 1 else None
    for part in parts:
        x = _from_bytes(images[part])
        for _, apply, arguments in steps:
            x = apply(x, *(argument[part] for argument in arguments))
        x = normalize(x, preprocessing, out=x if out is None else out[part])
    return x.contiguous() if out is None else out


def _compiled_steps(images: Tensor, steps: Sequence[tuple], preprocessing: Preprocessing) -> Tensor:
    """Apply the functions of `augment_colors`, with neighbouring functions compiled together."""
    x = images
    steps = [(True, _from_bytes, ()), *steps, (True, _normalized, (preprocessing,))]
    for fuses, group in groupby(steps, key=lambda step: step[0]):
        _, functions, arguments = zip(*group, strict=True)
        if fuses:
            moved = [[copy_to_device(a, x.device) if isinstance(a, Tensor) else a for a in one] for one in arguments]
            x = compiled(fused)(x, functions, moved)
        else:
            for function, one in zip(functions, arguments, strict=True):
                x = function(x, *one)
    return x


def fused(x: Tensor, functions: Sequence[Callable[..., Any]], arguments: Sequence[Sequence[Any]]) -> Tensor:
    """Apply functions, each with its own arguments, to the separate channels of crops: (N, C, H, W) -> (N, C, H, W)."""
    channels = x.unbind(1)
    for function, one in zip(functions, arguments, strict=True):
        channels = function(channels, *one)
    return torch.stack(channels, dim=1)


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled version of a function. torch compiles it once for each shape of the arguments."""
    from torch._inductor import list_options  # imported here, because the import takes seconds

    # With torch's default options, a separate GPU kernel would stack the channels, and read and write all values again.
    separate = ("max_pointwise_cat_inputs", "max_complex_pointwise_cat_inputs")
    return torch.compile(function, dynamic=False, options={name: 1 for name in separate if name in list_options()})


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


@torch.no_grad()
def to_model_input(batch: Batch, dtype: torch.dtype = torch.float32, *, compile: bool = False) -> Batch:
    """Apply the colour changes to the uint8 views of a batch, then normalise. Return a batch with float views.

    Args:
        compile: compile the colour changes with torch's compiler (`augment_colors`).

    Raises:
        ValueError: the views are already floats, or a view of packed images has colour changes.
    """
    views = [
        replace(view, images=_finish(view, batch.preprocessing, dtype, compile), colors=()) for view in batch.views
    ]
    return replace(batch, views=views, memory=None)


def _finish(view: View, preprocessing: Preprocessing, dtype: torch.dtype, compile: bool) -> Images:
    """Return the images of a view with colour changes applied and values normalised."""
    images = view.images
    pixels = images.patches if isinstance(images, PackedImages) else images
    if pixels.is_floating_point():
        raise ValueError("The views of this batch are floats already. Pass a batch of the loader, with uint8 views.")
    if isinstance(images, PackedImages):
        if view.colors:
            raise ValueError("Packed images cannot have colour changes. Use a transform that draws no colour changes.")
        # Within a patch, the channel index varies fastest, so the last axis of the result of `view` is the channel.
        x = pixels.to(torch.float32).div_(255).view(-1, preprocessing.channels)
        return replace(images, patches=normalize(x, preprocessing).to(dtype).view_as(pixels))
    return augment_colors(images, view.colors, preprocessing, compile=compile and len(view.colors) > 0).to(dtype)


def _from_bytes(images: Crops) -> Crops:
    """Return uint8 images of any memory order as contiguous float32 values from 0 to 1."""
    if not isinstance(images, Tensor):
        return tuple(channel.float() / 255 for channel in images)
    x = torch.empty(images.shape, device=images.device)
    if x.device.type == "cpu":
        return x.copy_(images).div_(255)
    return torch.div(images, 255, out=x)  # convert, divide and reorder in one pass over memory


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
    """Undo the normalisation of images: (N, C, H, W) -> (N, C, H, W) float32, whole numbers from 0 to 255."""
    x = images.clone()
    for channel, (mean, std) in enumerate(zip(preprocessing.mean, preprocessing.std, strict=True)):
        x[:, channel].mul_(std).add_(mean)
    return x.mul_(255).round_().clamp_(0, 255)


def normalize(x: Tensor, preprocessing: Preprocessing, *, out: Tensor | None = None) -> Tensor:
    """Normalise a tensor (N, C, ...) of values from 0 to 1, in place or into `out`."""
    return torch.sub(x, per_channel(preprocessing.mean, x), out=x if out is None else out).div_(
        per_channel(preprocessing.std, x)
    )


def _normalized(channels: tuple[Tensor, ...], preprocessing: Preprocessing) -> Crops:
    return tuple((x - m) / s for x, m, s in zip(channels, preprocessing.mean, preprocessing.std, strict=True))
