"""Batches and pixels made by hand, and cells of pictures."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tessera.data.batch import Batch, View
from tessera.encoders.images import Images, Mask


def batch_of(images: Sequence[Images], crops: Sequence[int] = (1,), mask: Mask | None = None, **fields: Any) -> Batch:
    """Batch with one view for each entry of `images`; `mask` belongs to the first."""
    views = [View(each, n) for each, n in zip(images, crops, strict=True)]
    if mask is not None:
        views[0].masks = (mask,)
    return Batch(views, **fields)


def crops_of(batch: Batch) -> list[int]:
    """Crops per image of each view."""
    return [view.crops for view in batch.views]


GAP = 2
"""Width in pixels of the white lines between the cells of a picture."""


def cell(picture: np.ndarray, row: int, column: int, side: int) -> np.ndarray:
    """One cell of a picture whose cells have `side` pixels."""
    top, left = row * (side + GAP), column * (side + GAP)
    return picture[top : top + side, left : left + side]


def pixels(*shape: int) -> Tensor:
    """Random uint8 pixels."""
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
