"""Pixel statistics of shards against numpy."""

from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
import torch

from tessera.data.check_shards import main as check_shards
from tessera.data.decode import decode
from tessera.data.decoders import DECODERS, Decoded
from tessera.data.shards import ShardError, open_shards, open_sources
from tessera.data.shards.index import Statistics
from tessera.data.statistics import (
    PixelSettings,
    count_classes,
    found_type,
    histogram,
    measure_pixels,
    pixel_statistics,
)
from tests.data.batches import saved
from tests.data.made import picture


@pytest.fixture
def shards(write_tar):
    """Three shards of 37 images of many sizes and brightnesses."""
    rng, members = np.random.default_rng(0), []
    for number in range(37):
        pixels = rng.integers(5 * number, 5 * number + 60, (*rng.integers(5, 30, 2), 4), dtype=np.uint8)
        members.append((f"{number:02d}.png", saved(pixels, "PNG")))
    return [
        write_tar(f"{name}.tar", some) for name, some in (("a", members[:3]), ("b", members[3:30]), ("c", members[30:]))
    ]


def values(paths, channels, numbers=None):
    """(P, C): pixels of some images, from 0 to 1."""
    opened = open_shards(paths)
    images = [opened.image(number) for number in (range(opened.images) if numbers is None else numbers)]
    return np.concatenate([decode(image, channels=channels).flatten(1).T.numpy() / 255 for image in images])


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_statistics_are_those_of_the_decoded_pixels(shards, channels):
    found = pixel_statistics(open_sources(shards), channels)
    expected = values(shards, channels)
    np.testing.assert_allclose(found.mean, expected.mean(0), rtol=1e-12)
    np.testing.assert_allclose(found.std, expected.std(0), rtol=1e-12)
    assert found == pixel_statistics(open_sources(shards), channels)


def test_a_sample_is_spread_over_all_shards(shards):
    found = pixel_statistics(open_sources(shards), 3, images=5)
    expected = values(shards, 3, [0, 9, 18, 27, 36])
    np.testing.assert_allclose(found.mean, expected.mean(0), rtol=1e-12)
    np.testing.assert_allclose(found.std, expected.std(0), rtol=1e-12)


def test_sources_count_by_their_weights(shards):
    found = pixel_statistics(open_sources({shards[1]: 3, shards[2]: 1}), 3)
    one, other = values(shards[1], 3), values(shards[2], 3)
    mean = (3 * one.mean(0) + other.mean(0)) / 4
    np.testing.assert_allclose(found.mean, mean, rtol=1e-12)
    square = (3 * (one**2).mean(0) + (other**2).mean(0)) / 4
    np.testing.assert_allclose(found.std, np.sqrt(square - mean**2), rtol=1e-9)


def test_statistics_of_index_json_are_taken_where_channels_agree(shards):
    opened = replace(open_shards(shards), statistics=Statistics((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)))
    sources = open_sources(shards)._replace(lists=[opened])
    found = pixel_statistics(sources, 3)
    np.testing.assert_allclose((found.mean, found.std), ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)), rtol=1e-15)
    np.testing.assert_allclose(pixel_statistics(sources, 1).mean, values(shards, 1).mean(0), rtol=1e-12)


def test_corrupt_images_are_left_out(write_tar):
    good = picture(1, format="PNG")
    path = write_tar("bad.tar", [("a.png", good), ("b.png", b"text"), ("c.png", good[:-40]), ("d.png", good)])
    np.testing.assert_allclose(pixel_statistics(open_sources(path), 3).mean, values(path, 3, [0]).mean(0), rtol=1e-12)
    none = write_tar("none.tar", [("b.png", b"text"), ("c.png", good[:-40])])
    with pytest.raises(ShardError, match=r"none of 2 sampled images can be decoded\. The first error is: the file is"):
        pixel_statistics(open_sources(none), 3)


def test_a_constant_channel_has_a_deviation_of_one_level(write_tar):
    found = pixel_statistics(open_sources(write_tar("a.tar", [("a.png", picture(1, format="PNG"))])), 4)
    assert found.mean[3] == 1
    assert found.std[3] == 1 / 255


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_a_histogram_counts_the_values_of_each_channel(channels):
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (9, 7, channels), dtype=np.uint8)).permute(
        2, 0, 1
    )
    expected = [np.bincount(channel.numpy().ravel(), minlength=256) for channel in pixels]
    assert np.array_equal(histogram(pixels), expected)


def test_classes_are_counted_in_the_labels_of_local_shards(write_tar, png, write_shards):
    def shard(name, labels):
        members = [
            (f"{n}.{end}", content) for n, c in enumerate(labels) for end, content in (("png", png(n)), ("cls", c))
        ]
        return write_tar(name, members)

    several = [shard("a.tar", [b"0", b"6", b"1"]), shard("b.tar", [b"2"])]
    assert count_classes(open_sources(several)) == 7
    assert count_classes(open_sources({several[1]: 1.0, several[0]: 2.0})) == 7
    with pytest.raises(ShardError, match=r"label of c.tar/1 is -1\. Number the classes from 0"):
        count_classes(open_sources(shard("c.tar", [b"0", b"-1"])))
    with pytest.raises(ShardError, match=r"d.tar/0 is b'cat', not an integer"):
        count_classes(open_sources(shard("d.tar", [b"cat"])))
    with pytest.raises(ShardError, match=r"has no label"):
        count_classes(open_sources(write_shards([3], labels=False)))
    with pytest.raises(ShardError, match=r"is remote\. Set the number of classes"):
        count_classes(open_sources(f"pipe:cat {several[0]}"))


class Arrays:
    """Decoder of files `ARR` and a .npy array (H, W, bands), which names the value -1 as nodata."""

    EXTENSION = "arr"

    def matches(self, encoded):
        return encoded.startswith(b"ARR")

    def read(self, encoded, *, most_bands, max_pixels):
        return Decoded(np.load(BytesIO(encoded[3:])), 1, None, -1.0)


@pytest.fixture
def arrays(write_tar):
    """A function: name and arrays (H, W, C) -> a tar of files that `Arrays` decodes."""
    DECODERS.register("arr", Arrays())

    def write(name, images):
        members = []
        for number, image in enumerate(images):
            np.save(file := BytesIO(), image)
            members.append((f"{number:03d}.tif", b"ARR" + file.getvalue()))
        return write_tar(name, members)

    yield write
    del DECODERS["arr"]


def known(*arguments):
    found = measure_pixels(*arguments)
    assert found is not None
    return found


def sensor(kind, count=30, seed=0):
    """Images (H, W, 2) with values like those of a sensor."""
    rng = np.random.default_rng(seed)
    found = [rng.gamma(2, 500, (*rng.integers(20, 40, 2), 2)) - 300 for _ in range(count)]
    return [(one / 1000 if kind == "float32" else one + 300 * (kind == "uint16")).astype(kind) for one in found]


@pytest.mark.parametrize("kind", ["uint16", "int16", "float32"])
def test_type_and_range_are_measured(arrays, kind):
    images = sensor(kind)
    found, summary = known(open_sources(arrays("a.tar", images)), PixelSettings(2))
    assert found.pixel_type == kind
    for channel in range(2):
        values = np.concatenate([image[..., channel].ravel() for image in images]).astype(np.float64)
        low, high = np.quantile(values, [0.001, 0.999], method="inverted_cdf")
        x = ((values - low) / (high - low)).clip(0, 1)
        own = [getattr(found, name)[channel] for name in ("low", "high", "mean", "std")]
        np.testing.assert_allclose(own, [low, high, x.mean(), x.std()], rtol=2e-3 if kind == "float32" else 1e-12)
    assert summary.startswith(f"{kind}, range ")
    assert ", one per channel, the quantiles 0.1 % and 99.9 % of 30 images" in summary
    assert ("different values" in summary) == (kind != "float32")


def test_the_values_of_dark_pngs_are_measured(write_tar):
    images = [image[..., 0] // 4 for image in sensor("uint16")]
    path = write_tar("a.tar", [(f"{n}.png", saved(image, "PNG")) for n, image in enumerate(images)])
    found, _ = known(open_sources(path), PixelSettings(1))
    values = np.concatenate([image.ravel() for image in images])
    assert (found.pixel_type, found.low[0]) == ("uint16", np.quantile(values, 0.001, method="inverted_cdf"))


def test_what_is_given_is_not_measured(arrays):
    sources = open_sources(arrays("a.tar", [np.ones((3, 3, 2), np.float32)]))
    bounds = ((0.0, 0.0), (1.0, 2.0))
    found, summary = known(sources, PixelSettings(2, "uint16", bounds, given_moments=True))
    assert ((found.low, found.high), found.pixel_type) == (bounds, "uint16")
    assert summary == "uint16, range 0 to 2, one per channel, as given"


def test_uint8_is_measured_only_if_needed(shards):
    assert measure_pixels(open_sources(shards), PixelSettings(3)) is None
    usual = measure_pixels(open_sources(shards), PixelSettings(3, moments=True))
    assert usual == (pixel_statistics(open_sources(shards), 3), "")
    bright, summary = known(open_sources(shards), PixelSettings(3, range="auto"))
    low, high = np.quantile(values(shards, 3) * 255, [0.001, 0.999], axis=0, method="inverted_cdf")
    np.testing.assert_allclose((bright.low, bright.high), (low, high))
    assert summary.startswith("uint8, range ")


@pytest.mark.parametrize("nodata", [-1, "auto"])
def test_pixels_without_data_are_left_out(arrays, nodata):
    images = sensor("int16")
    for image in images:
        image[image == -1] = 0
        image[0] = -1
    found, _ = known(open_sources(arrays("a.tar", images)), PixelSettings(2, nodata=nodata))
    kept, summary = known(open_sources(arrays("b.tar", [image[1:] for image in images])), PixelSettings(2))
    assert summary.endswith("; files name nodata -1, which counts as a value without --data.nodata auto")
    assert (found.low, found.high, found.mean, found.std) == (kept.low, kept.high, kept.mean, kept.std)
    assert found.nodata == nodata


def test_types_of_a_sample(arrays, write_tar):
    dark, other = arrays("a.tar", sensor("uint16", 3)), arrays("b.tar", sensor("float32", 3))
    assert found_type(open_sources({dark: 1, other: 1})) == "float32"
    assert found_type(open_sources({dark: 1, arrays("c.tar", sensor("int16", 3)): 1})) == "float32"
    jpegs = write_tar("d.tar", [("x.jpg", picture(1)), ("y.png", picture(2, format="PNG"))])
    assert found_type(open_sources(jpegs)) == "uint8"
    with pytest.raises(ShardError, match=r"d.tar/x is uint8, and a.tar/000 is uint16. Save all .*pixel_type uint8"):
        found_type(open_sources({jpegs: 1, dark: 1}))
    assert found_type(open_sources(write_tar("e.tar", [("x.png", b"no image")]))) == "uint8"


def test_index_json_holds_the_range(arrays, capsys):
    path = arrays("a.tar", sensor("uint16"))
    measured, _ = known(open_sources(path), PixelSettings(2))
    assert check_shards([path, "--workers", "1", "--channels", "2", "--write_index"]) == 0
    assert "uint16, range " in capsys.readouterr().out
    stored, summary = known(open_sources(path), PixelSettings(2))
    assert stored == measured  # the index has all images, and the sample of a run has up to 1,000
    assert summary.endswith("one per channel, from index.json")
    given, summary = known(open_sources(path), PixelSettings(2, range=((0.0,) * 2, (9000.0,) * 2)))
    assert (given.high, ", as given; " in summary) == ((9000,) * 2, True)
    assert known(open_sources(path), PixelSettings(2, "float32"))[0].mean != measured.mean
