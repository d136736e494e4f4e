"""Pixel statistics of shards against numpy."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tessera.data.decode import decode
from tessera.data.shards import ShardError, open_shards, open_sources
from tessera.data.shards.index import Statistics
from tessera.data.statistics import count_classes, histogram, pixel_statistics
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
