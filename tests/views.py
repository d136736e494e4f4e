"""Batches made by hand."""

from collections.abc import Sequence
from typing import Any

from data.batch import Batch, View
from encoders.images import Images, Mask


def batch_of(images: Sequence[Images], crops: Sequence[int] = (1,), mask: Mask | None = None, **fields: Any) -> Batch:
    """Batch with one view for each entry of `images`; `mask` belongs to the first."""
    views = [View(each, n) for each, n in zip(images, crops, strict=True)]
    if mask is not None:
        views[0].masks = (mask,)
    return Batch(views, **fields)


def crops_of(batch: Batch) -> list[int]:
    """Crops per image of each view."""
    return [view.crops for view in batch.views]
