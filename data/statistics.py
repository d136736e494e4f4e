"""Statistics of shards: the mean and standard deviation of each channel, and the number of classes.

Images have C channels and H x W pixels.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image
from torch import Tensor

from tessera.data.decode import ImageError, decode
from tessera.data.failures import DroppedError
from tessera.data.shards import ShardError, Source, Sources
from tessera.data.shards.source import shared_class_names
from tessera.encoders.base import Preprocessing

READ_TOGETHER = 64
"""Number of images that are downloaded at a time."""
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


def pixel_statistics(sources: Sources, channels: int, images: int = 1000) -> Preprocessing:
    """Return mean and standard deviation of each channel over all pixels, in [0, 1].

    The statistics of a source come from its `index.json`. If the index has no statistics for `channels` channels, the
    statistics are computed from `images` images, which are evenly spread over the source. Corrupt images are left out.
    The result depends only on the shards and their weights at the first step.

    Raises:
        ShardError: the shards cannot be read, or none of the images can be decoded.
    """
    found = [_source_statistics(source, channels, images) for source in sources.lists]
    means, stds = (np.array(values) for values in zip(*found, strict=True))  # (S, C) each
    weights = [weight[0] if isinstance(weight, Mapping) else weight for weight in sources.weights]
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


def _source_statistics(source: Source, channels: int, images: int) -> tuple[Sequence[float], Sequence[float]]:
    """Return the mean and the standard deviation of each channel of one source."""
    if source.mean is not None and source.std is not None and len(source.mean) == channels:
        return source.mean, source.std
    counts, reasons = np.zeros((channels, 256), dtype=np.int64), []
    numbers = np.linspace(0, source.images - 1, min(images, source.images)).astype(np.int64).tolist()
    for start in range(0, len(numbers), READ_TOGETHER):
        some = numbers[start : start + READ_TOGETHER]
        source.prepare(some)
        for number in some:
            try:
                counts += histogram(decode(source.image(number), channels=channels))
            except (DroppedError, ImageError) as error:
                reasons.append(str(error))
    found = moments(counts)
    if found is None:
        raise ShardError(f"none of {len(reasons)} sampled images can be decoded. The first error is: {reasons[0]}.")
    return found
