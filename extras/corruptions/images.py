"""The fifteen corruptions of ImageNet-C (1903.12261) at five severities, generated for each image.

Noise, defocus, zoom blur, brightness, contrast and JPEG have the strengths of ImageNet-C for images of 224 pixels. The
other corruptions are made in another way: for example, frost is a random texture instead of a photograph. All lengths
are fractions of the side of the image, so the corruptions suit images of any size. Accuracies are therefore comparable
with each other, but not with those on the published images of ImageNet-C.

The seed of a corruption depends only on its name and on the name of the image. All severities use this seed.

Shapes: an image has C channels and H x W pixels. Values are float32 from 0 to 1.
"""

import hashlib
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from tessera.data.batch import ViewParameters
from tessera.data.collate import CutView, ViewShape
from tessera.data.crops import CenterCrop
from tessera.data.pixels import blur_weights, from_unit, gaussian_blur, to_unit
from tessera.data.resample import cut
from tessera.encoders.base import Preprocessing

SEVERITIES = 5
SIDE = 224
"""Side in pixels of the images for which the lengths in `CORRUPTIONS` are given."""


class CorruptedCrop(CenterCrop):
    """Draws the centre crop of an image at each severity of a corruption. `cut_for` corrupts the crops.

    Args:
        name: key of `CORRUPTIONS`.
        size: side of the crop in pixels.
        resize: shorter side of the resized image in pixels.
        preprocessing: type and range of the images.
    """

    def __init__(self, name: str, size: int, resize: int, preprocessing: Preprocessing) -> None:
        super().__init__(size, resize)
        self.name, self.views, self.preprocessing = name, (ViewShape(SEVERITIES, size),), preprocessing

    def draw(self, size: tuple[int, int], rng: np.random.Generator | None = None) -> list[ViewParameters]:
        """Return the parameters of `SEVERITIES` equal crops of an image of `size` (H, W)."""
        (view,) = super().draw(size)
        return [replace(view, boxes=view.boxes.repeat(SEVERITIES, 0), flips=view.flips.repeat(SEVERITIES))]

    def cut_for(self, key: str) -> CutView:
        """Return the function that cuts the corrupted crops of the sample of a name."""

        def cut_crops(image: Tensor, number: int, view: ViewParameters, out: Tensor) -> None:
            cut(image, replace(view, boxes=view.boxes[:1], flips=view.flips[:1]), out[:1])
            crop = out[0].permute(2, 0, 1).clone(memory_format=torch.contiguous_format)
            for severity, place in enumerate(out, 1):
                place.copy_(corrupt(crop, self.name, severity, key, self.preprocessing).permute(1, 2, 0))

        return cut_crops


def corrupt(image: Tensor, name: str, severity: int, key: str, preprocessing: Preprocessing | None = None) -> Tensor:
    """Return a corrupted copy of an image (C, H, W). Values outside of its range are limited to the range.

    Args:
        image: the image.
        name: key of `CORRUPTIONS`.
        severity: severity from 1 to 5.
        key: name of the image, which determines the random values.
        preprocessing: type and range of the image; None for uint8 from 0 to 255.
    """
    given = preprocessing or Preprocessing((0.5,) * len(image), (0.5,) * len(image))
    function, levels = CORRUPTIONS[name]
    digest = hashlib.blake2b(f"{name}/{key}".encode("utf-8", "surrogateescape"), digest_size=16).digest()
    rng = np.random.default_rng(int.from_bytes(digest))
    unit = min(image.shape[1:]) / SIDE
    (x,) = to_unit(image[None], given)
    found = function(x, levels[severity - 1], unit, rng)
    return from_unit(found.clamp(0, 1)[None], given)[0]


def gaussian_noise(x: Tensor, sigma: float, unit: float, rng: np.random.Generator) -> Tensor:
    """Add normal noise of standard deviation `sigma`."""
    return x + sigma * torch.from_numpy(rng.standard_normal(x.shape, np.float32))


def shot_noise(x: Tensor, photons: float, unit: float, rng: np.random.Generator) -> Tensor:
    """Replace each value by a Poisson count. A value of 1 has `photons` counts on average."""
    return torch.from_numpy(rng.poisson(x.numpy() * photons)).float() / photons


def impulse_noise(x: Tensor, share: float, unit: float, rng: np.random.Generator) -> Tensor:
    """Replace a share of the values, one half of it by 0 and one half by 1."""
    u = _uniform(rng, *x.shape)
    return torch.where(u < share, (u < share / 2).float(), x)


def defocus_blur(x: Tensor, radius: float, unit: float, rng: np.random.Generator) -> Tensor:
    """Blur with a disk."""
    return convolved(x, disk(radius * unit))


def glass_blur(x: Tensor, length: float, unit: float, rng: np.random.Generator) -> Tensor:
    """Take each pixel from a random place at most `length` away in each direction, and blur."""
    shift = (2 * _uniform(rng, 2, *x.shape[1:]) - 1) * length * unit
    return blurred(displaced(x, shift), length * unit / 4)


def motion_blur(x: Tensor, length: float, unit: float, rng: np.random.Generator) -> Tensor:
    """Blur by a motion over 2 * `length` pixels, at an angle from -45 to 45 degrees."""
    return convolved(x, line(length * unit, rng.uniform(-45, 45)))


def zoom_blur(x: Tensor, largest: float, unit: float, rng: np.random.Generator) -> Tensor:
    """Return the mean of the image enlarged by factors from 1 to `largest`."""
    places = torch.stack(torch.meshgrid(*(torch.arange(n) - (n - 1) / 2 for n in x.shape[1:]), indexing="ij"))
    zoomed = [displaced(x, places * float(1 / factor - 1)) for factor in np.linspace(1, largest, 12)]
    return torch.stack(zoomed).mean(0)


def snow(x: Tensor, share: float, unit: float, rng: np.random.Generator) -> Tensor:
    """Whiten the image by half of `share`, and add flakes that cover this share of it before they are blurred."""
    size = max(3 * unit, 1.0)
    cells = _uniform(rng, 1, *(math.ceil(n / size) for n in x.shape[1:]))
    flakes = _resized((1 - cells / share).clamp(min=0), x.shape[1:])
    fallen = convolved(flakes, line(4 * unit, 90 + rng.uniform(-45, 45)))
    return x + share / 2 * (1 - x) + 2 * fallen


def frost(x: Tensor, shares: tuple[float, float], unit: float, rng: np.random.Generator) -> Tensor:
    """Return a weighted sum of the image and of a texture of bright ridges, with the two given weights."""
    ridges = 1 - (2 * plasma(x.shape[1:], 1.5, rng) - 1).abs()
    return shares[0] * x + shares[1] * ridges**2


def fog(x: Tensor, height: float, unit: float, rng: np.random.Generator) -> Tensor:
    """Add clouds of values up to `height`, and scale the sum to the range of the image."""
    most = float(x.max())
    return (x + height * plasma(x.shape[1:], 2, rng)) * most / (most + height)


def brightness(x: Tensor, change: float, unit: float, rng: np.random.Generator) -> Tensor:
    """Raise the largest channel of each pixel, the V of HSV, and keep hue and saturation."""
    value = x.amax(0)
    raised = (value + change).clamp(max=1)
    return torch.where(value > 0, x * (raised / value), raised)


def contrast(x: Tensor, factor: float, unit: float, rng: np.random.Generator) -> Tensor:
    """Scale the distance of each value from the mean of its channel."""
    mean = x.mean((1, 2), keepdim=True)
    return mean + factor * (x - mean)


def elastic(x: Tensor, length: float, unit: float, rng: np.random.Generator) -> Tensor:
    """Displace each pixel by a smooth random field, whose root mean square is `length` in each direction."""
    field = blurred(2 * _uniform(rng, 2, *x.shape[1:]) - 1, 5 * unit)
    return displaced(x, field / field.square().mean().sqrt() * length * unit)


def pixelate(x: Tensor, factor: float, unit: float, rng: np.random.Generator) -> Tensor:
    """Reduce the image by a factor to the means of its pixels, and enlarge it again without interpolation."""
    small = [max(int(n * factor), 1) for n in x.shape[1:]]
    return F.interpolate(F.adaptive_avg_pool2d(x, small)[None], x.shape[1:], mode="nearest-exact")[0]


def jpeg(x: Tensor, quality: int, unit: float, rng: np.random.Generator) -> Tensor:
    """Compress the image as JPEG. The channels of an image that is not RGB are compressed one by one."""
    pixels = x.mul(255).round().to(torch.uint8).numpy()
    images = [pixels.transpose(1, 2, 0)] if len(pixels) == 3 else list(pixels)
    found = []
    for one in images:
        file = io.BytesIO()
        Image.fromarray(one).save(file, "JPEG", quality=quality)
        found.append(np.atleast_3d(np.asarray(Image.open(file))))
    return torch.from_numpy(np.concatenate(found, 2).transpose(2, 0, 1)) / 255


def convolved(x: Tensor, kernel: Tensor) -> Tensor:
    """Convolve each channel with a symmetric kernel (k, k). The image is mirrored at its edges."""
    radius = len(kernel) // 2
    padded = F.pad(x[:, None], (radius,) * 4, mode="reflect")
    return F.conv2d(padded, kernel[None, None])[:, 0]


def blurred(x: Tensor, sigma: float) -> Tensor:
    """Blur each channel with a Gaussian of standard deviation `sigma` in pixels. The edge pixels are repeated."""
    weights = blur_weights(torch.tensor([float(sigma)]), math.ceil(4 * sigma))
    return gaussian_blur(x.transpose(0, 1)[None], weights)[0].transpose(0, 1)


def displaced(x: Tensor, shift: Tensor) -> Tensor:
    """Take each pixel from a place `shift` (2, H, W) away, in pixels down and right, with bilinear interpolation."""
    grids = torch.meshgrid(*(torch.arange(n) for n in x.shape[1:]), indexing="ij")
    down, right = (
        (2 * (places + moved) + 1) / n - 1 for places, moved, n in zip(grids, shift, x.shape[1:], strict=True)
    )
    places = torch.stack([right, down], 2)[None]
    return F.grid_sample(x[None], places, padding_mode="reflection", align_corners=False)[0]


def disk(radius: float) -> Tensor:
    """Return the kernel (k, k) of a disk with smooth edges, whose sum is 1."""
    steps = torch.arange(-math.ceil(radius), math.ceil(radius) + 1)
    kernel = (radius + 0.5 - torch.hypot(steps[:, None], steps[None].float())).clamp(0, 1)
    return kernel / kernel.sum()


def line(length: float, degrees: float) -> Tensor:
    """Return the kernel (k, k) of a line through the centre, `length` pixels to each side, whose sum is 1."""
    radius, angle = math.ceil(length), math.radians(degrees)
    along, steps = torch.linspace(-length, length, 8 * radius + 1), torch.arange(-radius, radius + 1)
    down, right = (
        (1 - (steps[:, None] - along * one).abs()).clamp(min=0) for one in (math.sin(angle), math.cos(angle))
    )  # (k, places on the line): weights of bilinear interpolation
    kernel = down @ right.T
    return kernel / kernel.sum()


def plasma(size: Sequence[int], smoothness: float, rng: np.random.Generator) -> Tensor:
    """Return a fractal cloud (1, H, W) with values from 0 to 1.

    It is a sum of octaves, each with cells of half the size and with an amplitude that is divided by `smoothness`.
    """
    octaves = range(1, max(math.ceil(math.log2(max(size))), 1) + 1)
    cloud = sum(_resized(_uniform(rng, 1, 2**n + 1, 2**n + 1), size) / smoothness**n for n in octaves)
    assert isinstance(cloud, Tensor)
    return (cloud - cloud.min()) / (cloud.max() - cloud.min()).clamp(min=1e-6)


def _uniform(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.random(shape, np.float32))


def _resized(x: Tensor, size: Sequence[int]) -> Tensor:
    """Resize (C, h, w) to (C, H, W). The corners of both lie on each other."""
    return F.interpolate(x[None], tuple(size), mode="bilinear", align_corners=True)[0]


CORRUPTIONS: dict[str, tuple[Callable[[Tensor, Any, float, np.random.Generator], Tensor], Sequence[Any]]] = {
    "gaussian_noise": (gaussian_noise, (0.08, 0.12, 0.18, 0.26, 0.38)),
    "shot_noise": (shot_noise, (60, 25, 12, 5, 3)),
    "impulse_noise": (impulse_noise, (0.03, 0.06, 0.09, 0.17, 0.27)),
    "defocus_blur": (defocus_blur, (3, 4, 6, 8, 10)),
    "glass_blur": (glass_blur, (2, 3, 4, 6, 8)),
    "motion_blur": (motion_blur, (3, 5, 8, 12, 15)),
    "zoom_blur": (zoom_blur, (1.11, 1.15, 1.2, 1.24, 1.3)),
    "snow": (snow, (0.05, 0.1, 0.15, 0.2, 0.3)),
    "frost": (frost, ((0.9, 0.3), (0.8, 0.45), (0.7, 0.6), (0.6, 0.7), (0.5, 0.8))),
    "fog": (fog, (1, 1.5, 2, 2.5, 3)),
    "brightness": (brightness, (0.1, 0.2, 0.3, 0.4, 0.5)),
    "contrast": (contrast, (0.4, 0.3, 0.2, 0.1, 0.05)),
    "elastic": (elastic, (1, 1.5, 2.25, 3, 4)),
    "pixelate": (pixelate, (0.5, 0.4, 0.3, 0.25, 0.2)),
    "jpeg": (jpeg, (25, 18, 15, 10, 7)),
}
"""Maps the name of a corruption to its function and to its strength at each severity. Lengths are in pixels of an image
of `SIDE` pixels."""
