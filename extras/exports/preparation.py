"""Preparation of an image for an encoder as the evaluations do it, stated in the terms of other libraries."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tessera.encoders.base import Encoder, Preprocessing
from tessera.encoders.errors import EncoderError
from tessera.encoders.preprocessing import image_size, short_side

BICUBIC = 3
"""Pillow's number of the bicubic filter."""


def description(encoder: Encoder) -> dict[str, Any]:
    """Return the preparation of an image for an encoder, for certificates, model cards and metadata.

    An encoder for images that are not square has no resize and no crop, because the evaluations prepare square images.
    """
    preprocessing, (height, width) = encoder.preprocessing, image_size(encoder)
    moments = byte_moments(preprocessing)
    found: dict[str, Any] = {"mode": "RGB"} if preprocessing.channels == 3 and moments else {}
    if height == width:
        found |= {"resize": short_side(height), "crop": height, "interpolation": "bicubic", "antialias": True}
    if moments:
        return found | {"pixels": "0 to 1", "mean": list(moments[0]), "std": list(moments[1])}
    found |= {"pixels": "clamp((value - low) / (high - low), 0, 1)", "pixel_type": preprocessing.pixel_type}
    found |= dict(zip(("low", "high"), map(list, preprocessing.range), strict=True))
    found |= {} if preprocessing.nodata is None else {"nodata": preprocessing.nodata}
    return found | {"mean": list(preprocessing.mean), "std": list(preprocessing.std)}


def byte_moments(preprocessing: Preprocessing) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Return mean and std for values of 8 bits divided by 255; None if they cannot state the preparation of images.

    A range that clamps no value of 8 bits is a part of mean and std.
    """
    low, high = preprocessing.range
    if preprocessing.pixel_type != "uint8" or preprocessing.nodata is not None or max(low) > 0 or min(high) < 255:
        return None
    if preprocessing.low is None:
        return preprocessing.mean, preprocessing.std
    each = list(zip(preprocessing.mean, preprocessing.std, low, high, strict=True))
    mean = tuple((start + one * (end - start)) / 255 for one, _, start, end in each)
    return mean, tuple(one * (end - start) / 255 for _, one, start, end in each)


def absent_values(described: Mapping[str, Any]) -> str:
    """Return a sentence about values without data for a `description`, or "" if there are none."""
    marks = [f"nodata ({described['nodata']})"] if "nodata" in described else []
    marks += ["NaN"] if described["pixel_type"] == "float32" else []
    return f"Before an image is resized, {' and '.join(marks)} become the mean of their channel." if marks else ""


def ranged_sentence(encoder: Encoder) -> str:
    """Return a sentence for other libraries, whose transforms cannot prepare the images of an encoder."""
    described = description(encoder)
    low, high = (", ".join(f"{value:g}" for value in described[name]) for name in ("low", "high"))
    return (
        f"This encoder takes {described['pixel_type']} images, which the transforms of timm and transformers do not "
        f"prepare: x = clamp((value - low) / (high - low), 0, 1), then (x - mean) / std, where low is {low} and high "
        f"is {high}. {absent_values(described)}"
    ).rstrip()


def prepare(image: Any, described: dict[str, Any]) -> Tensor:
    """Prepare a Pillow image as `description` states, with Pillow's resize: an RGB image -> (3, S, S) float32."""
    short, size = described["resize"], described["crop"]
    width, height = (short * side // min(image.size) for side in image.size)
    left, top = (round((side - size) / 2) for side in (width, height))
    crop = image.resize((width, height), BICUBIC).crop((left, top, left + size, top + size))
    pixels = torch.frombuffer(bytearray(crop.tobytes()), dtype=torch.uint8).view(size, size, 3).permute(2, 0, 1)
    mean, std = (torch.tensor(described[name]).view(3, 1, 1) for name in ("mean", "std"))
    return (pixels / 255 - mean) / std


def pretrained_cfg(encoder: Encoder) -> dict[str, Any]:
    """Return the values that `timm.data.resolve_data_config` reads from a model's `pretrained_cfg`.

    timm's transforms take images of 8 bits. For other images, `notes` says how to prepare them.

    Raises:
        EncoderError: the number of channels differs between the preprocessing and the encoder.
    """
    preprocessing = encoder.preprocessing
    if preprocessing.channels != encoder.channels:
        raise EncoderError(
            f"The preprocessing has {preprocessing.channels} channels, but the encoder has {encoder.channels}. "
            'Write the mean and std of each channel into "preprocessing" of the .json file of the encoder.'
        )
    height, width = image_size(encoder)
    moments = byte_moments(preprocessing)
    mean, std = moments or (preprocessing.mean, preprocessing.std)
    return {
        "input_size": (encoder.channels, height, width),
        "interpolation": "bicubic",
        "crop_pct": _crop_pct(min(height, width)),
        "crop_mode": "center",
        "mean": mean,
        "std": std,
        **({} if moments else {"notes": (ranged_sentence(encoder),)}),
    }


def _crop_pct(size: int) -> float:
    """Return the share `crop_pct` with which timm resizes the short side to `short_side(size)`.

    timm rounds `size / crop_pct` down. The share is 0.875, as in most models, or else the shortest decimal number.
    """
    short = short_side(size)
    shares = [
        size / short if short == size else 224 / 256,
        *(round(size / (short + 0.5), digits) for digits in range(3, 9)),
    ]
    return next(share for share in shares if math.floor(size / share) == short)
