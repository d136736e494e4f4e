"""Pixel statistics: histograms of channels, and the mean and standard deviation that follow from them."""

import numpy as np
from PIL import Image
from torch import Tensor


def histogram(pixels: Tensor) -> np.ndarray:
    """Count the values of each channel: (3, H, W) uint8 -> (3, 256) int64."""
    picture = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    return np.array(picture.histogram(), dtype=np.int64).reshape(3, 256)


def moments(counts: np.ndarray) -> tuple[list[float], list[float]] | None:
    """Return mean and standard deviation of each channel over all pixels, in [0, 1]; None without pixels.

    mean = sum(n_v v) / N and var = sum(n_v v^2) / N - mean^2, where n_v pixels have the value v. The sums are integers,
    so the result does not depend on the order of images.

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
