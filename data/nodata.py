"""Pixels without data: values that are not finite, and a value of the data set or of the file that marks them.

Satellite images hold such a value outside of their swath, and microscopes NaN where nothing was measured. Such pixels
get the mean of their band right after decoding. They are then about 0 after normalisation, and no resize mixes the mark
into its neighbours.

Shapes: an image has C bands and H x W pixels.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tessera.data.headers import HeaderError


def missing(values: np.ndarray, nodata: float | None) -> np.ndarray | None:
    """Return which values (H, W, C) hold no data, as bool (H, W, C), or None if all hold data.

    Args:
        values: values of an image, of any type of numbers.
        nodata: value that marks pixels without data; None for no such value. NaN and infinite values never hold data.

    Raises:
        HeaderError: no pixel holds data.
    """
    found = None
    if values.dtype.kind == "f":
        with np.errstate(over="ignore", invalid="ignore"):
            finite = bool(np.isfinite(values.sum()))  # much faster than a test of every value
        found = None if finite else ~np.isfinite(values)
        mark = None if nodata is None else values.dtype.type(nodata)
    else:
        limits = np.iinfo(values.dtype)
        whole = nodata is not None and float(nodata).is_integer() and limits.min <= nodata <= limits.max
        mark = values.dtype.type(int(nodata)) if whole and nodata is not None else None
    if mark is not None:
        equal = values == mark
        found = equal if found is None else found | equal
    if found is None or not found.any():
        return None
    if found.all():
        raise HeaderError("no pixel of the image holds data")
    return found


def filled(pixels: Tensor, absent: Tensor, fill: Sequence[float]) -> Tensor:
    """Return a copy of pixels (C, H, W) with the value of `fill` (C,) where `absent` (C, H, W) bool is true."""
    found = pixels.permute(1, 2, 0).numpy().copy()  # NumPy, because torch lacks masks of uint16
    np.copyto(found, np.array(fill, dtype=found.dtype), where=absent.permute(1, 2, 0).numpy())
    return torch.from_numpy(found).permute(2, 0, 1)
