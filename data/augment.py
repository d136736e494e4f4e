"""Colour changes and normalisation of batches, on any device.

`data.colors` draws the changes on the CPU. Here they are applied to crops, which become the input of a model.

Shapes: N crops have C channels and H x W pixels.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tessera.data.batch import Batch, Colors, View
from tessera.data.pixels import (
    normalize,
    normalized_channels,
    to_unit,
)
from tessera.encoders.base import IMAGENET, Preprocessing
from tessera.encoders.images import Images, PackedImages
from tessera.encoders.segments import copy_to_device

CACHED = 2**20
"""Number of values that a CPU changes at a time, so that they stay in its cache from one operation to the next."""


@torch.no_grad()
def augment_colors(
    images: Tensor, colors: Colors, preprocessing: Preprocessing = IMAGENET, *, compile: bool = False
) -> Tensor:
    """Apply colour changes, then normalise: (N, C, H, W) of the images' type -> (N, C, H, W) float32.

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
        x = to_unit(images[part], preprocessing)
        for _, apply, arguments in steps:
            x = apply(x, *(argument[part] for argument in arguments))
        x = normalize(x, preprocessing, out=x if out is None else out[part])
    return x.contiguous() if out is None else out


def _compiled_steps(images: Tensor, steps: Sequence[tuple], preprocessing: Preprocessing) -> Tensor:
    """Apply the functions of `augment_colors`, with neighbouring functions compiled together."""
    x = images
    steps = [(True, to_unit, (preprocessing,)), *steps, (True, normalized_channels, (preprocessing,))]
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


@torch.no_grad()
def to_model_input(batch: Batch, dtype: torch.dtype = torch.float32, *, compile: bool = False) -> Batch:
    """Apply the colour changes to the views of a batch, then normalise. Return a batch with float views.

    Args:
        compile: compile the colour changes with torch's compiler (`augment_colors`).

    Raises:
        ValueError: the views are already floats, or a view of packed images has colour changes.
    """
    if batch.memory is None and batch.preprocessing.pixel_type == "float32":
        raise ValueError("The views of this batch are normalised already. Pass a batch of the loader.")
    views = [
        replace(view, images=_finish(view, batch.preprocessing, dtype, compile), colors=()) for view in batch.views
    ]
    if batch.bands is not None:
        views = [replace(view, images=_without_missing(view, batch.bands)) for view in views]
    return replace(batch, views=views, memory=None)


def _without_missing(view: View, bands: np.ndarray) -> Images:
    """Set the channels that images do not have to NaN. `bands` (B,) are the channels that they have."""
    if isinstance(view.images, PackedImages):
        raise ValueError("Packed images cannot have fewer channels. Use crops of one size.")
    numbers = torch.arange(view.images.shape[1])
    missing = (numbers >= torch.from_numpy(bands)[:, None]).repeat(view.crops, 1)  # (n * B, C)
    return view.images.masked_fill_(copy_to_device(missing, view.images.device)[:, :, None, None], float("nan"))


def _finish(view: View, preprocessing: Preprocessing, dtype: torch.dtype, compile: bool) -> Images:
    """Return the images of a view with colour changes applied and values normalised."""
    images = view.images
    pixels = images.patches if isinstance(images, PackedImages) else images
    if pixels.dtype != preprocessing.dtype:
        raise ValueError(
            f"The views of this batch have the type {pixels.dtype}, not {preprocessing.dtype}. Pass a batch of the "
            "loader, whose views are not normalised."
        )
    if isinstance(images, PackedImages):
        if view.colors:
            raise ValueError("Packed images cannot have colour changes. Use a transform that draws no colour changes.")
        # Within a patch, the channel index varies fastest, so the last axis of the result of `view` is the channel.
        x = to_unit(pixels.view(-1, preprocessing.channels), preprocessing)
        assert isinstance(x, Tensor)
        return replace(images, patches=normalize(x, preprocessing).to(dtype).view_as(pixels))
    return augment_colors(images, view.colors, preprocessing, compile=compile and len(view.colors) > 0).to(dtype)
