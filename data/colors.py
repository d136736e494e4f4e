"""Colour changes of crops: their settings, and what is drawn for each crop.

RGB images have the colour changes of DINO (2104.14294). Images of other bands have changes that treat each band alone.
An operation has settings, draws parameters for each crop, and changes the crops of a batch (`Operation`). A new
operation is a subclass, a setting in `ColorConfig` and a line in `color_operations`.

The default settings are those of DINO's main_dino.py. Operations work on floats from 0 to 1 and are defined as in
torchvision: values are clamped after each change, contrast scales the distance of each value from the mean of the gray
image, and the hue is shifted in HSV.

Shapes: N crops have C channels and H x W pixels. An operation changes n of the N crops.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Annotated, Any, ClassVar, Literal, TypeVar
from zlib import crc32

import numpy as np
import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from tessera.data.batch import Colors
from tessera.data.pixels import (
    Crops,
    blur_weights,
    changed,
    each,
    each_band,
    exact,
    gaussian_blur,
    gray_image,
    gray_weights,
    normal_noise,
    per_crop,
    seeded_uniform,
    shift_hue,
)
from tessera.encoders.segments import copy_to_device
from tessera.runtime.settings import Section

SHARED_DRAWS = 13
"""Number of random values of a crop that DINO's operations share (`Operation.shared`). It never changes, because the
crops and colours of every run would change with it."""
HUE = 3
"""Index of the hue among the changes of `Jitter`: brightness (0), contrast (1), saturation (2), hue (3)."""
RGB_ONLY = ("saturation", "hue", "grayscale")
"""Names of the colour settings whose operations need RGB images."""
BANDS_OFF = (*RGB_ONLY, "solarize_global2")
"""Names of the colour settings whose operations have no meaning for bands that are not colours."""
BANDS_DEFAULTS = {"brightness": 0.2, "contrast": 0.2, "noise": 0.05, "band_drop": 0.1}
"""Defaults of settings if `colors` is `bands`. Each band changes alone, so the changes also shift the ratios of bands,
in which spectral images hold their content. They are therefore half as strong as those of RGB images."""


ALL_BANDS = 2**30
"""Number of bands of an image that has all channels."""


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

    colors: Literal["auto", "rgb", "bands"] = "auto"
    """rgb: the colour changes of DINO; bands: brightness and contrast of each band alone, blur, noise and dropped
    bands, without hue, saturation, gray and solarisation; auto: rgb for 3 channels if no image has fewer, else bands"""
    brightness: Strength = 0.4
    """strength of the brightness change: the brightness factor is drawn from 1 - strength to 1 + strength; default:
    0.4, or 0.2 if colors is bands"""
    contrast: Strength = 0.4
    """strength of the contrast change: the contrast factor is drawn from 1 - strength to 1 + strength; default: 0.4, or
    0.2 if colors is bands"""
    saturation: Strength = 0.2
    """strength of the saturation change: the saturation factor is drawn from 1 - strength to 1 + strength"""
    hue: float = Field(default=0.1, ge=0, le=0.5)
    """largest shift of the hue in either direction, in turns of the colour circle"""
    jitter: Share = 0.8
    """probability that the brightness, contrast, saturation and hue of a crop are changed; their order is random"""
    grayscale: Share = 0.2
    """probability that a crop is converted to gray"""
    noise: Strength = 0.0
    """largest standard deviation of the Gaussian noise of a crop, for values from 0 to 1; default: 0, or 0.05 if colors
    is bands"""
    band_drop: Share = 0.0
    """probability that a band of a crop is set to 0, the lowest value; at least one band is kept; default: 0, or 0.1 if
    colors is bands"""


ColorConfigT = TypeVar("ColorConfigT", bound=ColorConfig)


def colors_for(config: ColorConfigT, channels: int, fewer: bool = False) -> ColorConfigT:
    """Return the colour settings for images of `channels` channels, in which `colors` is `rgb` or `bands`.

    Images that may have fewer channels (`data.fewer_channels`) are not RGB images, unless `colors` says so.

    Settings that do not fit the images, or have another default for bands, get their values, unless they are given.

    Raises:
        ValueError: a given setting does not fit the images.
    """
    kind = config.colors if config.colors != "auto" else "rgb" if channels == 3 and not fewer else "bands"
    off = BANDS_OFF if kind == "bands" else RGB_ONLY if channels != 3 else ()
    off = [name for name in off if getattr(config, name, 0) > 0]
    if given := [name for name in off if name in config.model_fields_set]:
        raise ValueError(
            f"The number of image channels is {channels} and colors is {kind}, but these settings need RGB images: "
            f"{', '.join(given)}. Set them to 0, or leave them out."
            + (" Images that may have fewer channels have bands, unless colors is rgb." if fewer else "")
        )
    values: dict[str, Any] = {"colors": kind, **dict.fromkeys(off, 0.0)}
    if kind == "bands":
        values |= {name: value for name, value in BANDS_DEFAULTS.items() if name not in config.model_fields_set}
    if kind == "bands" and channels == 1 and "band_drop" not in config.model_fields_set:
        values["band_drop"] = 0.0  # the only band is always kept
    return config.model_copy(update=values)


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


@dataclass(frozen=True)
class BandJitter(Operation):
    """Changes brightness and then contrast of each band alone. The parameter of a crop is a seed; -1 for no change.

    The seed determines a factor of the brightness and a factor of the contrast for each band, so that nothing here
    depends on the number of bands. The contrast scales the distance of each value from the mean of its band.
    """

    values = 2

    brightness: float
    contrast: float
    probability: float

    def draw(self, u: np.ndarray) -> np.ndarray:
        return np.where(u[:, 0] < self.probability, seeds(u[:, 1]), -1)

    def prepare(self, numbers: Tensor) -> tuple[Tensor, ...]:
        ranges = [(max(1 - s, 0), 1 + s - max(1 - s, 0)) for s in (self.brightness, self.contrast)]
        return numbers >= 0, numbers.int(), torch.tensor(ranges).flatten().expand(len(numbers), 4)

    @staticmethod
    def apply(crops: Crops, chosen: Tensor, seeds: Tensor, ranges: Tensor) -> Crops:
        return changed(crops, chosen, _band_jittered, seeds, *ranges.unbind(1))


def _band_jittered(crops: Crops, seeds: Tensor, *ranges: Tensor) -> Crops:
    """Return crops with new brightness and contrast. `ranges` are the lowest factor of the brightness, the width of its
    range, and the same of the contrast, (n,) each."""

    def change(x: Tensor, band: Tensor | int, seed: Tensor, *ranges: Tensor) -> Tensor:
        low, width, low_contrast, width_contrast = ranges
        brightness = low + width * seeded_uniform(seed, 2 * band)
        contrast = low_contrast + width_contrast * seeded_uniform(seed, 2 * band + 1)
        x = (x * brightness).clamp_(0, 1)
        mean = x.mean((-2, -1), keepdim=True)
        return torch.addcmul(mean, x - mean, contrast).clamp_(0, 1)

    return each_band(crops, change, seeds, *ranges)


@dataclass(frozen=True)
class Noise(Operation):
    """Adds Gaussian noise. The two parameters of a crop are the standard deviation of the noise and a seed."""

    values = 2

    strength: float

    def draw(self, u: np.ndarray) -> np.ndarray:
        return np.stack([self.strength * u[:, 0], seeds(u[:, 1])], axis=1)  # float64 holds the seeds exactly

    def prepare(self, numbers: Tensor) -> tuple[Tensor, ...]:
        return numbers[:, 0].float(), numbers[:, 1].long().int()

    @staticmethod
    def apply(crops: Crops, sigma: Tensor, seeds: Tensor) -> Crops:
        return changed(crops, sigma > 0, _with_noise, sigma, seeds)


def _with_noise(crops: Crops, sigma: Tensor, seeds: Tensor) -> Crops:
    def change(x: Tensor, band: Tensor | int, sigma: Tensor, seed: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        rows, columns = (torch.arange(side, dtype=torch.int32, device=x.device) for side in (height, width))
        places = (band * height + rows[:, None]) * width + columns
        return torch.addcmul(x, sigma, normal_noise(seed, places)).clamp_(0, 1)

    return each_band(crops, change, sigma, seeds)


@dataclass(frozen=True)
class BandDrop(Operation):
    """Sets bands to 0. At least one band is kept. The parameters of a crop are a seed, which determines the bands, and
    the number of bands that its image has (`of_bands`)."""

    probability: float

    def draw(self, u: np.ndarray) -> np.ndarray:
        return np.stack([seeds(u[:, 0]), np.full(len(u), ALL_BANDS)], axis=1)

    def prepare(self, numbers: Tensor) -> tuple[Tensor, ...]:
        return numbers[:, 0].int(), torch.full((len(numbers),), self.probability), numbers[:, 1].int()

    @staticmethod
    def apply(crops: Crops, seeds: Tensor, probability: Tensor, own: Tensor) -> Crops:
        bands = crops.shape[1] if isinstance(crops, Tensor) else len(crops)
        device = crops.device if isinstance(crops, Tensor) else crops[0].device
        places = torch.arange(bands, dtype=torch.int32, device=device)
        u = seeded_uniform(copy_to_device(seeds, device)[:, None], places)  # (N, bands)
        u = u.masked_fill(places >= copy_to_device(own, device)[:, None], -1)  # a band that an image lacks is not kept
        kept = (u >= copy_to_device(probability, device)[:, None]) | (u == u.amax(1, keepdim=True))
        if isinstance(crops, Tensor):
            return crops.mul_(kept[:, :, None, None])
        return tuple(x * per_crop(one, x) for x, one in zip(crops, kept.unbind(1), strict=True))


def of_bands(colors: Colors, bands: int) -> Colors:
    """Return colour changes of the crops of an image that has only the first `bands` channels."""
    return [(one, np.where([False, True], bands, n) if isinstance(one, BandDrop) else n) for one, n in colors]


def seeds(u: np.ndarray) -> np.ndarray:
    """Turn uniform random values into seeds of `data.pixels.seeded_uniform`: int64 from 0 to 2**32 - 1, whose lowest 32
    bits are the seed."""
    return (u * 2.0**32).astype(np.int64)


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
    added = [Noise(config.noise)] if config.noise else []
    added += [BandDrop(config.band_drop)] if config.band_drop else []
    if config.colors == "bands":
        return [BandJitter(config.brightness, config.contrast, config.jitter), Blur(tuple(blur), blur_sigma), *added]
    return [
        Jitter(config.brightness, config.contrast, config.saturation, config.hue, config.jitter),
        Grayscale(config.grayscale),
        Blur(tuple(blur), blur_sigma),
        Solarize(tuple(solarize)),
        *added,
    ]


def own_rng(rng: np.random.Generator, operation: str) -> np.random.Generator:
    """Return a random generator for one operation of a sample. `rng` does not advance.

    The random numbers depend only on the state of `rng` and the name of the operation, so that an operation changes no
    random numbers of other operations, and none of theirs changes its own.
    """
    bits: Any = rng.bit_generator  # the type of NumPy's stubs lacks `jumped`
    key = bits.jumped(1 + crc32(operation.encode())).random_raw(2)
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
