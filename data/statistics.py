"""Statistics of shards: type, range, mean and standard deviation of their pixels, and the number of classes.

Images have C channels and H x W pixels.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tessera.data.decode import MAX_PIXELS, MOST_BANDS, ImageError, Picture, stored_type
from tessera.data.decoders import DECODERS, decoder_of
from tessera.data.failures import DroppedError
from tessera.data.headers import HeaderError
from tessera.data.shards import ShardError, Source, Sources
from tessera.data.shards.index import Statistics
from tessera.data.shards.source import shared_class_names
from tessera.data.value_range import QUANTILES, ValueCounts, range_of, shown_range
from tessera.data.values import ONE_TYPE
from tessera.encoders.base import PixelType, Preprocessing

READ_TOGETHER = 64
"""Number of images that are downloaded at a time."""
SAMPLED = 1000
"""Number of images of a source whose pixels are measured."""
PROBED, PROBED_REMOTE = 16, 2
"""Number of images of a source whose type is read: local ones over the whole source, or those of the first shard."""
LEAST_STD = 1 / 255
"""Lower limit for standard deviations. A constant channel, such as the alpha channel of opaque images, has a standard
deviation of 0, and normalisation would divide by 0."""


def histogram(pixels: Tensor) -> np.ndarray:
    """Count the values of each channel: (C, H, W) uint8 -> (C, 256) int64."""
    return np.array([Image.fromarray(channel.contiguous().numpy()).histogram() for channel in pixels], dtype=np.int64)


def moments(counts: np.ndarray) -> tuple[list[float], list[float]] | None:
    """Return mean and standard deviation of each channel over all pixels, in [0, 1]; None if there are no pixels.

    mean = sum(n_v v) / N and var = sum(n_v v^2) / N - mean^2, where n_v is the number of pixels with the value v (0 to
    255), and N is the number of all pixels. Mean and standard deviation are then divided by 255. The sums are integers,
    so the result does not depend on the order of the images.

    Args:
        counts: (C, 256) int64 histograms.
    """
    means, deviations = [], []
    for channel in counts.tolist():
        total, first, second = (sum(count * value**power for value, count in enumerate(channel)) for power in range(3))
        if not total:
            return None
        means.append(first / total / 255)
        deviations.append(((second * total - first * first) / total**2) ** 0.5 / 255)
    return means, deviations


class PixelSettings(NamedTuple):
    """Settings of the pixels of a data set; see `pretrain.config.DataConfig`."""

    channels: int
    pixel_type: PixelType | Literal["auto"] = "auto"
    range: tuple[tuple[float, ...], tuple[float, ...]] | Literal["auto"] | None = None
    """`low` and `high` of each channel; auto to measure them; None for 0 and 255 of uint8, and auto for other types."""
    nodata: float | Literal["auto"] | None = None
    moments: bool = False
    """True if mean and std are needed for uint8 without a range; False if the values of ImageNet may serve."""
    given_moments: bool = False
    """True if mean and std are given as numbers, so that they need not be measured for any type."""
    fewer_channels: bool = False
    """True if images may have fewer channels."""


class MeasuredPixels(NamedTuple):
    """Type, range and normalisation of a data set."""

    preprocessing: Preprocessing
    """`mean` is 0 and `std` is 1 if both are given."""
    summary: str
    """Type and range in words, such as `uint16, range 0 to 4,095`. The log and the plan of a run show them. Empty for
    uint8 without a range."""


def measure_pixels(sources: Sources, settings: PixelSettings) -> MeasuredPixels | None:
    """Return the type, range and normalisation of the images; None for uint8 if nothing else has to be measured.

    What the settings give is not measured. The result depends only on the shards, their weights at the first step and
    the settings, not on the order of the images or the number of processes.

    Raises:
        ShardError: the shards cannot be read, none of the images can be decoded, or images have 8 and more bits.
    """
    channels, nodata = settings.channels, settings.nodata
    kind = found_type(sources) if settings.pixel_type == "auto" else settings.pixel_type
    usual = kind == "uint8" and settings.range is None
    if usual and nodata is None:
        fewer = settings.fewer_channels
        return MeasuredPixels(pixel_statistics(sources, channels, fewer=fewer), "") if settings.moments else None
    given = ((0.0,) * channels, (255.0,) * channels) if usual else settings.range
    given = given if isinstance(given, tuple) else None
    if given is not None and settings.given_moments:
        unused = (0.0,) * channels, (1.0,) * channels
        found = Preprocessing(*unused, kind, *given, nodata)
        return MeasuredPixels(found, f"{shown_range(kind, *given)}, as given")
    if (stored := _stored(sources, kind, settings)) is not None:
        return MeasuredPixels(stored, f"{shown_range(kind, *stored.range)}, from index.json" if stored.low else "")
    counted, images = list[ValueCounts](), 0
    for source in sources.lists:
        counted.append(counts := ValueCounts(kind))
        for pixels, absent in _sampled(source, channels, kind, nodata, fewer=settings.fewer_channels):
            counts.add(pixels.numpy(), None if absent is None else absent.numpy())
            images += 1
    measured = range_of(counted, _weights(sources), given)
    if measured is None:
        raise ShardError("a channel of the sampled images has no data. Leave out images without data.")
    low, high, mean, std, levels = measured
    found = Preprocessing(mean, tuple(max(one, LEAST_STD) for one in std), kind, low, high, nodata)
    shares = " and ".join(f"{100 * share:g} %" for share in QUANTILES)
    summary = shown_range(kind, low, high)
    summary += ", as given" if given else f", the quantiles {shares} of {images:,} images"
    summary += f"; {levels:,} different values" if levels else ""
    if nodata is None and (named := _named_nodata(sources)) is not None:
        summary += f"; files name nodata {named:g}, which counts as a value without --data.nodata auto"
    return MeasuredPixels(found, "" if usual else summary)


def _named_nodata(sources: Sources) -> float | None:
    """Return the nodata value that the first image of a source names; None if none does."""
    for source in sources.lists:
        with suppress(DroppedError, HeaderError, ShardError):
            image = source.image(0)
            if not isinstance(image, bytes) or (name := decoder_of(image)) is None:
                continue
            found = DECODERS[name].read(image, most_bands=MOST_BANDS, max_pixels=MAX_PIXELS)
            if found.nodata is not None:
                return found.nodata
    return None


def _stored(sources: Sources, kind: PixelType, settings: PixelSettings) -> Preprocessing | None:
    """Return the range and normalisation that the index.json of the only source states for the settings, or None."""
    mean, std, stored, low, high, nodata = sources.lists[0].statistics
    if len(sources.lists) > 1 or mean is None or std is None:
        return None
    if (stored, len(mean), nodata) != (kind, settings.channels, settings.nodata):
        return None
    ranged = settings.range is not None or kind != "uint8"
    if ranged != (low is not None) or settings.range not in (None, "auto", (low, high)):
        return None
    return Preprocessing(mean, tuple(max(one, LEAST_STD) for one in std), kind, low, high, nodata)


def statistics_of(counts: ValueCounts) -> Statistics:
    """Return statistics for `index.json`: with a measured range, except for uint8."""
    kind = counts.pixel_type
    if kind == "uint8":
        found = moments(counts.bytes())
        return Statistics(tuple(found[0]), tuple(found[1]), kind) if found else Statistics(pixel_type=kind)
    measured = range_of([counts], [1])
    if measured is None:
        return Statistics(pixel_type=kind)
    return Statistics(measured.mean, measured.std, kind, measured.low, measured.high)


def found_type(sources: Sources) -> PixelType:
    """Return the smallest type that holds the values of a sample of the images; uint8 if none can be read.

    The type of a source is read from its `index.json`, or else from some of its images: of local shards, `PROBED`
    images that are evenly spread, and of remote ones, `PROBED_REMOTE` images of the first shard.

    Raises:
        ShardError: images of 8 bits and others are mixed.
    """
    found: dict[PixelType, str] = {}
    for source in sources.lists:
        if source.statistics.pixel_type is not None:
            found.setdefault(source.statistics.pixel_type, f"index.json of {source.shards[0].path}")
            continue
        remote = any(shard.downloads for shard in source.shards)
        count, last = (PROBED_REMOTE, int(source.counts[0])) if remote else (PROBED, source.images)
        probe = replace(source)  # a copy, so that a shard that cannot be read is reported when the run reads it
        for number in np.unique(np.linspace(0, last - 1, count).astype(np.int64)).tolist():
            try:
                found.setdefault(stored_type(probe.image(number)), probe.name(number))
            except (DroppedError, ImageError, ShardError):
                continue
    if "uint8" in found and len(found) > 1:
        other, name = next((kind, name) for kind, name in found.items() if kind != "uint8")
        raise ShardError(
            f"images of 8 bits and of other types are mixed: {found['uint8']} is uint8, and {name} is {other}. "
            f"{ONE_TYPE}."
        )
    if not found:
        return "uint8"
    return next(iter(found)) if len(found) == 1 else "float32"


def pixel_statistics(sources: Sources, channels: int, images: int = SAMPLED, *, fewer: bool = False) -> Preprocessing:
    """Return mean and standard deviation of each channel over all pixels, in [0, 1].

    The statistics of a source come from its `index.json`. If the index has no statistics for `channels` channels, the
    statistics are computed from `images` images, which are evenly spread over the source. Corrupt images are left out.
    The result depends only on the shards and their weights at the first step. With `fewer`, images may have fewer
    channels, and a channel has the statistics of the images that have it.

    Raises:
        ShardError: the shards cannot be read, none of the images can be decoded, or no image has a channel.
    """
    found = [_source_statistics(source, channels, images, fewer) for source in sources.lists]
    means, stds = (np.array(values) for values in zip(*found, strict=True))  # (S, C) each
    weights = np.array(_weights(sources))[:, None] * ~np.isnan(means)  # (S, C)
    if not weights.any(0).all():
        raise ShardError(
            f"no sampled image has {channels} channels. Give data.channels the largest number of channels."
        )
    means, stds = np.nan_to_num(means), np.nan_to_num(stds)
    mean = np.average(means, axis=0, weights=weights)
    std = np.sqrt(np.average(stds**2 + (means - mean) ** 2, axis=0, weights=weights))
    return Preprocessing(tuple(mean.tolist()), tuple(np.maximum(std, LEAST_STD).tolist()))


def count_classes(sources: Sources) -> int:
    """Return the number of classes: the number of names in classes.json, or the largest label plus 1.

    Without a classes.json, all labels are read.

    Raises:
        ShardError: the sources have different class names; there are no class names, and a shard is remote, in which
            case all labels would have to be downloaded; or a label is missing, negative or not an integer.
    """
    names = shared_class_names([shard for source in sources.lists for shard in source.shards])
    if names is not None:
        return len(names)
    largest = 0
    for source in sources.lists:
        if remote := next((shard.path for shard in source.shards if shard.is_remote), None):
            raise ShardError(
                f"the classes cannot be counted, because {remote} is remote. Set the number of classes, "
                "such as --classes 1000 of an evaluation or --METHOD.classes 1000 of a training with labels."
            )
        for number in range(source.images):
            try:
                label = source.label(number)
            except DroppedError:
                continue
            if label < 0:
                raise ShardError(f"the label of {source.name(number)} is {label}. Number the classes from 0.")
            largest = max(largest, label)
    return largest + 1


def _weights(sources: Sources) -> list[float]:
    """Return the weight of each source at the first step."""
    return [weight[0] if isinstance(weight, Mapping) else weight for weight in sources.weights]


def _source_statistics(
    source: Source, channels: int, images: int, fewer: bool
) -> Sequence[Sequence[float]] | np.ndarray:
    """Return the mean and the standard deviation of each channel of one source of uint8."""
    mean, std, kind, low, _, nodata = source.statistics
    usual = kind in (None, "uint8") and low is nodata is None
    if usual and mean is not None and std is not None and len(mean) == channels:
        return mean, std
    counts = np.zeros((channels, 256), dtype=np.int64)
    for pixels, absent in _sampled(source, channels, "uint8", None, images, fewer=fewer):
        own = channels if absent is None else int((~absent).flatten(1).any(1).sum())
        counts[:own] += histogram(pixels[:own])
    known, found = counts.any(1), np.full((2, channels), np.nan)  # NaN for channels that no image of the source has
    found[:, known] = moments(counts[known])
    return found


def _sampled(
    source: Source,
    channels: int,
    kind: PixelType,
    nodata: float | Literal["auto"] | None,
    images: int = SAMPLED,
    *,
    fewer: bool = False,
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the pixels (C, H, W) of images that are evenly spread over a source, and True for values without data.

    Raises:
        ShardError: the shards cannot be read, or none of the images can be decoded.
    """
    numbers, reasons = np.linspace(0, source.images - 1, min(images, source.images)).astype(np.int64).tolist(), []
    for start in range(0, len(numbers), READ_TOGETHER):
        some = numbers[start : start + READ_TOGETHER]
        source.prepare(some)
        for number in some:
            try:
                picture = Picture(source.image(number), channels=channels, pixel_type=kind, nodata=nodata, fewer=fewer)
                pixels = picture.pixels()
            except (DroppedError, ImageError) as error:
                reasons.append(str(error))
                continue
            absent = picture.absent
            if picture.bands < channels:
                everything = torch.ones(pixels.shape, dtype=torch.bool)
                everything[: picture.bands] = False if absent is None else absent
                absent = everything
            yield pixels, absent
    if len(reasons) == len(numbers):
        raise ShardError(f"none of {len(reasons)} sampled images can be decoded. The first error is: {reasons[0]}.")
