"""Value range of a data set: the type of its pixels, and the quantiles and moments of their values.

A model gets `x = clamp((v - low) / (high - low), 0, 1)` for a value v, with one `low` and one `high` per channel for
the whole data set. If they are not given, they are quantiles (`QUANTILES`) of the values of a sample of the images.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tessera.encoders.base import PixelType

QUANTILES = (0.001, 0.999)
"""Shares of the values of a channel that are at most `low` and at most `high`.

A thousandth leaves out hot and dead pixels, glints and the edges of saturated areas, which are fewer in most data sets.
Larger shares, such as the 2 % of displays, would clip structures that fill a small part of the images, such as clouds
or stained cells.
"""
FLOAT_STEP = 2**12
"""Number of neighbouring float32 values that are counted as one: the first and last differ by at most 1 / 2048 of the
value. Numbers of up to 12 significant bits, such as the integers up to 4096, are counted exactly."""
VALUES_AT_ONCE = 2**22
"""Number of values that are counted at once. Counting all at once would need ten times the memory of the image."""
_LARGEST = (0x7F800000 // FLOAT_STEP) - 1  # code of the largest finite float32 value
_ZERO = {"uint8": 0, "uint16": 0, "int16": 2**15, "float32": _LARGEST}
"""Code of the value 0 by pixel type."""


@dataclass
class ValueCounts:
    """Number of pixels of each value in each of C channels.

    The counts are integers, so they do not depend on the order of the images. A value has a code: the integers of a
    type in their order, or float32 values in steps of `FLOAT_STEP`. The memory is 8 bytes for each channel and each
    code between the smallest and the largest value, at most 17 MB per channel.
    """

    pixel_type: PixelType
    first: int = 0
    """Code of the first column of `counts`."""
    counts: np.ndarray | None = None
    """(C, codes) int64; None before the first image."""

    def add(self, pixels: np.ndarray, absent: np.ndarray | None = None) -> None:
        """Count the values of an image (C, H, W) of the pixel type.

        Values where `absent` (C, H, W) is True, NaN and infinite values do not count.
        """
        if self.counts is None:
            self.counts = np.zeros((len(pixels), 0), dtype=np.int64)
        rows = max(VALUES_AT_ONCE // pixels.shape[2], 1)
        for channel, top in itertools.product(range(len(pixels)), range(0, pixels.shape[1], rows)):
            part = channel, slice(top, top + rows)
            values = pixels[part] if absent is None else pixels[part][~absent[part]]
            self._add(channel, values[np.isfinite(values)] if self.pixel_type == "float32" else values.ravel())

    def _add(self, channel: int, values: np.ndarray) -> None:
        codes = _codes(values, self.pixel_type)
        if not len(codes):
            return
        first = int(codes.min())
        found = np.bincount(codes - first)
        self._widen(first, first + len(found))
        assert self.counts is not None
        self.counts[channel, first - self.first : first - self.first + len(found)] += found

    def bytes(self) -> np.ndarray:
        """Return the counts of all 256 values of uint8: (C, 256) int64; zeros before the first image."""
        counts = np.zeros((1, 0), dtype=np.int64) if self.counts is None else self.counts
        return np.pad(counts, ((0, 0), (self.first, 256 - self.first - counts.shape[1])))

    def merge(self, other: "ValueCounts") -> None:
        """Add the counts of other images of the same type."""
        if other.counts is None or not other.counts.shape[1]:
            return
        if self.counts is None:
            self.first, self.counts = other.first, other.counts.copy()
            return
        self._widen(other.first, other.first + other.counts.shape[1])
        start = other.first - self.first
        self.counts[:, start : start + other.counts.shape[1]] += other.counts

    def _widen(self, start: int, end: int) -> None:
        """Add columns, so that the counts cover the codes `start` to `end` - 1."""
        assert self.counts is not None
        width = self.counts.shape[1]
        if not width:
            self.first = start
        left, right = max(self.first - start, 0), max(end - self.first - width, 0)
        if left or right:
            self.counts = np.pad(self.counts, ((0, 0), (left, right)))
            self.first -= left


class ValueRange(NamedTuple):
    """Range of a data set, and the moments of its values in this range."""

    low: tuple[float, ...]
    high: tuple[float, ...]
    mean: tuple[float, ...]
    """Mean of each channel of the values `x` from 0 to 1."""
    std: tuple[float, ...]
    levels: int | None
    """Largest number of different values of a channel; None for float32."""


def range_of(
    counted: Sequence[ValueCounts], weights: Sequence[float], given: tuple[tuple[float, ...], ...] | None = None
) -> ValueRange | None:
    """Return the range of a data set and the moments of its values; None if a channel has no values.

    Args:
        counted: counts of the images of each source.
        weights: share of each source in the data set. They have no effect if there is one source.
        given: `low` and `high` of each channel; None to measure them.
    """
    total = ValueCounts(counted[0].pixel_type)
    for one in counted:
        if one.counts is None or not one.counts.shape[1]:
            return None
        total.merge(one)
    assert total.counts is not None
    if not total.counts.sum(axis=1).all():
        return None
    codes = np.arange(total.first, total.first + total.counts.shape[1])
    values = _values(codes, total.pixel_type)  # (codes,) float64
    shares: np.ndarray = total.counts  # integers, whose sums are exact
    if len(counted) > 1:
        shares = np.zeros(total.counts.shape)
        for one, weight in zip(counted, weights, strict=True):
            assert one.counts is not None
            start = one.first - total.first
            shares[:, start : start + one.counts.shape[1]] += (
                weight * one.counts / np.maximum(one.counts.sum(1, keepdims=True), 1)
            )
    bounds = given or tuple(zip(*(_bounds(channel, values) for channel in shares), strict=True))
    low, high = (np.array(bound, dtype=np.float64)[:, None] for bound in bounds)
    x = np.clip((values - low) / (high - low), 0, 1)  # (C, codes)
    sums = shares.sum(axis=1)
    mean = (shares * x).sum(axis=1) / sums
    std = np.sqrt((shares * (x - mean[:, None]) ** 2).sum(axis=1) / sums)
    levels = None if total.pixel_type == "float32" else int(np.count_nonzero(total.counts, axis=1).max())
    own_low, own_high, own_mean, own_std = (tuple(map(float, one)) for one in (low[:, 0], high[:, 0], mean, std))
    return ValueRange(own_low, own_high, own_mean, own_std, levels)


def shown_range(kind: PixelType, low: Sequence[float], high: Sequence[float]) -> str:
    """Return a range for messages: that of all channels, or the smallest `low` and the largest `high`."""
    text = f"{kind}, range {min(low):,g} to {max(high):,g}"
    return text if len({*low}) == len({*high}) == 1 else f"{text}, one per channel"


def _bounds(shares: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    """Return the quantiles of one channel: the smallest value that at least this share of the values do not exceed.

    If both quantiles are one value, because few pixels have another one, return the smallest and the largest value, or
    this value and the next integer if there is no other value.
    """
    sums = np.cumsum(shares)
    low, high = (float(values[np.searchsorted(sums, share * sums[-1])]) for share in QUANTILES)
    if low == high:
        found = values[shares > 0]
        low, high = float(found[0]), float(found[-1])
    return (low, high) if low < high else (low, low + 1)


def _codes(values: np.ndarray, pixel_type: PixelType) -> np.ndarray:
    """Return the code of each value: (N,) int64."""
    if pixel_type != "float32":
        return values.astype(np.int64) + _ZERO[pixel_type]
    bits = values.astype(np.float32, copy=False).view(np.int32).astype(np.int64)
    rounded = np.minimum(((bits & 0x7FFFFFFF) + FLOAT_STEP // 2) // FLOAT_STEP, _LARGEST)
    return _LARGEST + np.where(bits < 0, -rounded, rounded)


def _values(codes: np.ndarray, pixel_type: PixelType) -> np.ndarray:
    """Return the value of each code: (N,) float64."""
    offsets = codes - _ZERO[pixel_type]
    if pixel_type != "float32":
        return offsets.astype(np.float64)
    sizes = (np.abs(offsets) * FLOAT_STEP).astype(np.int32).view(np.float32).astype(np.float64)
    return np.where(offsets < 0, -sizes, sizes)
