"""Counts, quantiles and moments of pixel values against NumPy in float64."""

import numpy as np
import pytest

from tessera.data.value_range import QUANTILES, ValueCounts, range_of

TYPES = ("uint8", "uint16", "int16", "float32")


def drawn(kind):
    """Twenty images (2, H, W) of many sizes, with values like those of sensors."""
    rng, images = np.random.default_rng(0), []
    for _ in range(20):
        values = rng.gamma(2, 700, (2, *rng.integers(20, 60, 2))) - (500 if kind == "int16" else 0)
        values = values / 16 if kind == "uint8" else values * 1.1e-3 - 0.2 if kind == "float32" else values
        images.append(values.clip(*((0, 255) if kind == "uint8" else (-(2**15), 2**15 - 1))).astype(kind))
    return images


def counted(images, kind, absent=None):
    counts = ValueCounts(kind)
    for image in images:
        counts.add(image, None if absent is None else absent(image))
    return counts


def expected(images, channel, low=None, high=None):
    values = np.concatenate([image[channel].ravel() for image in images]).astype(np.float64)
    values = values[np.isfinite(values)]
    if low is None:
        low, high = np.quantile(values, QUANTILES, method="inverted_cdf")
    x = ((values - low) / (high - low)).clip(0, 1)
    return low, high, x.mean(), x.std()


@pytest.mark.parametrize("kind", TYPES)
def test_range_and_moments_are_those_of_all_values(kind):
    images = drawn(kind)
    found = range_of([counted(images, kind)], [1])
    for channel in range(2):
        own = [getattr(found, name)[channel] for name in ("low", "high", "mean", "std")]
        # float32 values are counted in steps of 1 / 4096 of the value, and integers exactly
        rtol = 1e-3 if kind == "float32" else 1e-12
        np.testing.assert_allclose(own, expected(images, channel), rtol=rtol)
    levels = max(len(np.unique(np.concatenate([image[channel].ravel() for image in images]))) for channel in range(2))
    assert found.levels == (None if kind == "float32" else levels)


@pytest.mark.parametrize("kind", TYPES)
def test_the_order_and_the_division_of_the_images_change_nothing(kind):
    images = drawn(kind)
    one, other = counted(images[13:], kind), counted(images[12::-1], kind)
    one.merge(other)
    one.merge(ValueCounts(kind))
    assert range_of([one], [1]) == range_of([counted(images, kind)], [1])


@pytest.mark.parametrize("kind", ["uint16", "float32"])
def test_one_bright_pixel_changes_nothing_beyond_its_quantile(kind):
    images = drawn(kind)
    before = range_of([counted(images, kind)], [1])
    values = np.sort(np.concatenate([image[0].ravel() for image in images]))
    images[3][0, 5, 5] = 65535 if kind == "uint16" else 1e30
    after = range_of([counted(images, kind)], [1])
    following = values[int(np.ceil(QUANTILES[1] * len(values)))]  # the quantile moves by one value at most
    assert before.high[0] <= after.high[0] <= following * (1 + 1 / 4096)
    assert after.high[1] == before.high[1]
    np.testing.assert_allclose(after.mean[1], before.mean[1], rtol=1e-12)
    np.testing.assert_allclose(after.mean[0], before.mean[0], rtol=0.02)


def test_pixels_without_data_are_left_out():
    images = drawn("float32")
    spoiled = [image.copy() for image in images]
    for image in spoiled:
        image[:, 0] = np.resize([np.nan, np.inf, -np.inf, -9999], image.shape[2])
    found = range_of([counted(spoiled, "float32", lambda image: image == -9999)], [1])
    assert found == range_of([counted([image[:, 1:] for image in images], "float32")], [1])
    empty = counted([np.full((2, 3, 3), np.nan, np.float32)], "float32")
    assert range_of([empty], [1]) is None
    assert range_of([ValueCounts("float32")], [1]) is None


def test_a_given_range_keeps_its_bounds():
    images = drawn("int16")
    found = range_of([counted(images, "int16")], [1], ((-100.0, 0.0), (1000.0, 2000.0)))
    for channel, bounds in enumerate([(-100, 1000), (0, 2000)]):
        own = [getattr(found, name)[channel] for name in ("low", "high", "mean", "std")]
        np.testing.assert_allclose(own, expected(images, channel, *bounds), rtol=1e-12)


def test_sources_count_by_their_weights():
    images = drawn("uint16")
    found = range_of(
        [counted(images[:3], "uint16"), counted(images[3:], "uint16")], [3, 1], ((0.0,) * 2, (3000.0,) * 2)
    )
    one, other = (np.concatenate([image[0].ravel() for image in some]) / 3000 for some in (images[:3], images[3:]))
    one, other = one.clip(0, 1), other.clip(0, 1)
    mean = (3 * one.mean() + other.mean()) / 4
    np.testing.assert_allclose(found.mean[0], mean, rtol=1e-12)
    square = (3 * (one**2).mean() + (other**2).mean()) / 4
    np.testing.assert_allclose(found.std[0], np.sqrt(square - mean**2), rtol=1e-9)
    equal = range_of([counted(images, "uint16")] * 2, [0.7, 0.2])
    assert (equal.low, equal.high) == range_of([counted(images, "uint16")], [1])[:2]


def test_a_channel_with_one_frequent_value_has_a_range():
    flat = np.full((1, 100, 100), 7, np.uint16)
    assert range_of([counted([flat], "uint16")], [1])[:2] == ((7,), (8,))
    flat[0, 0, 0] = 90
    assert range_of([counted([flat], "uint16")], [1])[:2] == ((7,), (90,))


def test_float_values_are_counted_once_and_in_order():
    values = np.array([0.0, -0.0, 1.0, -1.0, 2049 / 2048, 4096, 3.4028235e38, -3.4028235e38, 1e-45], np.float32)
    counts = counted([values.reshape(1, 1, -1)], "float32")
    found = np.flatnonzero(counts.counts[0])
    assert counts.counts[0].sum() == 9
    assert len(found) == 7  # 0, -0 and 1e-45 are one value
    assert counts.counts.shape[1] == found[-1] + 1
