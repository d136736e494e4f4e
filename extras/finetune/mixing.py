"""Mixing and erasing of images in supervised training: mixup (1710.09412), CutMix (1905.04899) and random erasing
(1708.04896).

The random numbers of an image are a function of its key (`encoders.randomness`). Images are mixed in pairs of
neighbours: image 2i with image 2i + 1. Both are on the same process (`Method.together`), so the pairs and their
parameters do not depend on the number of processes. Parameters are drawn on the CPU and applied on any device.

Shapes: B images with C channels and H x W pixels. A box is top, bottom, left and right, with bottom and right
exclusive. An empty box is all zeros.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tessera.encoders.randomness import BITS, hashed
from tessera.encoders.segments import copy_to_device

ERASED_AREA = (0.02, 1 / 3)
"""Smallest and largest area of an erased box, as a share of the image's area."""
ERASED_RATIO = 0.3
"""Smallest ratio of height to width of an erased box. Ratios are log-uniform between this number and its inverse."""
TRIES = 10
"""Number of random boxes that are tried. If none of them fits into the image, nothing is erased."""


@dataclass(frozen=True)
class MixParameters:
    """Parameters for mixing each of B images with its partner. The two images of a pair have equal parameters.

    A pixel inside the box comes from the partner. A pixel outside the box is `weight * own + (1 - weight) * partner`.
    """

    boxes: Tensor
    """(B, 4) int64: box of each image. Mixup has empty boxes."""
    weight: Tensor
    """(B,) float32: weight of the image's own pixels outside the box. CutMix has the weight 1."""
    share: Tensor
    """(B,) float32: weight of the image's own label. The partner's label has the weight 1 - share."""


def generators(keys: Tensor) -> list[np.random.Generator]:
    """Return a random generator for each key: (B,) int64."""
    return [np.random.Generator(np.random.Philox(key=key)) for key in keys.tolist()]


def partners(images: int, device: torch.device) -> Tensor:
    """Return the index of each image's partner: (B,) int64. With an odd B, the last image is its own partner."""
    return (torch.arange(images, device=device) ^ 1).clamp_(max=images - 1)


def draw_mix(rngs: Sequence[np.random.Generator], size: tuple[int, int], mixup: float, cutmix: float) -> MixParameters:
    """Draw the mixing parameters of B images of `size` (H, W).

    The share of each pair is drawn from Beta(a, a). If both methods are enabled, each pair is mixed by one of them,
    with equal probability. For CutMix, the share is then set to the fraction of the image outside the box. These are
    timm's rules; timm calls this mode `pair`.

    Args:
        rngs: generator of each image. The generator of the first image of a pair is used.
        size: height and width of the images in pixels.
        mixup: parameter a of the Beta distribution of mixup; 0 for no mixup.
        cutmix: parameter a of the Beta distribution of CutMix; 0 for no CutMix.
    """
    rows = []
    for rng in rngs[::2]:
        cut = rng.random() < 0.5 if mixup and cutmix else bool(cutmix)
        alpha = cutmix if cut else mixup
        share, box = rng.beta(alpha, alpha) if alpha else 1.0, (0, 0, 0, 0)
        if cut:
            box = _cut_box(rng, size, share)
            share = 1 - (box[1] - box[0]) * (box[3] - box[2]) / (size[0] * size[1])
        rows += [(*box, 1.0 if cut else share, share)] * 2
    columns = torch.tensor(rows[: len(rngs)], dtype=torch.float64).view(-1, 6)  # (B, 6)
    return MixParameters(columns[:, :4].long(), columns[:, 4].float(), columns[:, 5].float())


def _cut_box(rng: np.random.Generator, size: tuple[int, int], share: float) -> tuple[int, int, int, int]:
    """Draw a box with a uniform centre that covers about 1 - `share` of the image. The box is clipped to the image."""
    edges: list[int] = []
    for side in size:
        length, centre = int(side * math.sqrt(1 - share)), int(rng.integers(side))
        edges += [max(centre - length // 2, 0), min(centre + (length + 1) // 2, side)]
    return edges[0], edges[1], edges[2], edges[3]


def mix_images(images: Tensor, parameters: MixParameters) -> Tensor:
    """Mix each image with its partner: (B, C, H, W) -> (B, C, H, W)."""
    weight = copy_to_device(parameters.weight, images.device).view(-1, 1, 1, 1)
    own = weight * ~inside(parameters.boxes, images)  # (B, 1, H, W)
    return own * images + (1 - own) * images.index_select(0, partners(len(images), images.device))


def draw_erased(rngs: Sequence[np.random.Generator], size: tuple[int, int], probability: float) -> Tensor:
    """Draw the box that is erased in each image of `size` (H, W), by timm's rules: (B, 4) int64.

    The box is empty if the image is not erased.
    """
    return torch.tensor([_erased_box(rng, size, probability) for rng in rngs]).view(-1, 4)


def _erased_box(rng: np.random.Generator, size: tuple[int, int], probability: float) -> tuple[int, int, int, int]:
    if rng.random() >= probability:
        return 0, 0, 0, 0
    for _ in range(TRIES):
        area = size[0] * size[1] * rng.uniform(*ERASED_AREA)
        ratio = math.exp(rng.uniform(math.log(ERASED_RATIO), -math.log(ERASED_RATIO)))
        height, width = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if height < size[0] and width < size[1]:
            top, left = int(rng.integers(size[0] - height + 1)), int(rng.integers(size[1] - width + 1))
            return top, top + height, left, left + width
    return 0, 0, 0, 0


def erase(images: Tensor, boxes: Tensor, keys: Tensor) -> Tensor:
    """Replace the pixels of each box by normal noise: (B, C, H, W) -> (B, C, H, W).

    Args:
        images: normalised images.
        boxes: box of each image, (B, 4) int64 on the CPU.
        keys: key of each image, from which its noise is computed, (B,) int64 on the CPU.
    """
    erased = boxes.any(1).nonzero().squeeze(1)  # (n,), on the CPU, to avoid waiting for the device
    if not len(erased):
        return images
    chosen, own = copy_to_device(erased, images.device), copy_to_device(keys[erased], images.device)
    some = images.index_select(0, chosen)  # (n, C, H, W)
    noise = normal_noise(own, some[0].numel()).to(images.dtype).view_as(some)
    return images.index_copy(0, chosen, torch.where(inside(boxes[erased], some), noise, some))


def normal_noise(keys: Tensor, numbers: int) -> Tensor:
    """Return `numbers` standard normal values for each key: (n,) -> (n, numbers) float64."""
    bits = hashed(keys[:, None], torch.arange(numbers, device=keys.device))  # (n, numbers)
    return torch.special.ndtri((bits.double() + 0.5) / 2**BITS)


def inside(boxes: Tensor, images: Tensor) -> Tensor:
    """Return True for each pixel inside the image's box: (B, 4) on the CPU, (B, C, H, W) -> (B, 1, H, W)."""
    height, width = images.shape[-2:]
    top, bottom, left, right = copy_to_device(boxes, images.device).view(-1, 4, 1, 1, 1).unbind(1)  # (B, 1, 1, 1)
    rows = torch.arange(height, device=images.device)[:, None]
    columns = torch.arange(width, device=images.device)
    return (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
