"""Patch tokens of a frozen encoder."""

import weakref
from typing import Any

import torch
from torch import Tensor

from tessera.encoders.base import Encoder
from tessera.evaluation.features import encoding
from tessera.evaluation.memory import images_at_once

_at_once: "weakref.WeakKeyDictionary[Encoder, dict[Any, int]]" = weakref.WeakKeyDictionary()
"""Number of images that each encoder encodes at once, by the form of the images."""


def patch_tokens(encoder: Encoder, images: Tensor, precision: str) -> Tensor:
    """Return the tokens of normalised images on their grid: (b, C, S, S) -> (b, D, h, w) float32.

    Images that need much memory are encoded in several parts (`evaluation.memory`).

    Raises:
        EvaluationError: the encoder does not accept images of this size.
    """

    def encode(images: Tensor) -> Tensor:
        with encoding(encoder, images, precision):
            features = encoder(images)
        rows, columns = features.grids[0].tolist()  # all images have one size
        return features.tokens.float().unflatten(0, (-1, rows, columns)).permute(0, 3, 1, 2)  # (T, D) -> (b, D, h, w)

    known = _at_once.setdefault(encoder, {})
    case = images.shape[1:], images.device, precision
    if case not in known:
        known[case] = images_at_once(encode, torch.zeros_like(images[:1]))
    with torch.no_grad():
        parts = [encode(part) for part in images.split(known[case])]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
