import logging
import multiprocessing
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from tessera.data.batch import ViewParameters
from tessera.data.collate import ViewShape
from tessera.data.colors import Solarize
from tessera.data.crops import MixedCrops, MultiCrop, MultiCropConfig, ResizedView
from tessera.data.loader import LoaderConfig
from tessera.data.sampler import MixtureSampler, ShuffledSampler, sample_rng
from tessera.data.shards import ShardError, open_shards
from tessera.encoders.base import Preprocessing
from tests.data.batches import evaluation_batches, same_colors, saved, step_positions, tiff, training_batches


class Small:
    """Three corners of an image, two of one size; only the colours of the first two are random."""

    views = (ViewShape(2, 2), ViewShape(1, 3))
    packing = None

    def draw(self, size, rng):
        colors = [(Solarize(()), rng.random(2))]
        first = ViewParameters(np.array([[0, 0, 2, 2], [2, 4, 2, 2]]), (2, 2), np.array([False, True]), colors=colors)
        return [first, ViewParameters(np.array([[0, 0, 3, 3]]), (3, 3), np.array([False]))]


def numbers(batch):
    """Which images of `write_shards` a batch holds."""
    first = batch.views[0].images[: len(batch)]
    return (first[:, 0, 0, 0].long() * 256 + first[:, 1, 0, 0]).tolist()


def drawn(batch):
    """Random numbers of the first view, crop-major."""
    ((_, numbers),) = batch.views[0].colors
    return numbers


def same(one, other):
    return (
        one.keys == other.keys
        and one.skipped == other.skipped
        and all(torch.equal(a.images, b.images) for a, b in zip(one.views, other.views, strict=True))
        and all(same_colors(a.colors, b.colors) for a, b in zip(one.views, other.views, strict=True))
    )


def run(shards, **settings):
    given = {"batch_size": 12, "seed": 1, "steps": 7, "streams": 4} | settings
    return list(training_batches(shards, Small(), **given))


def test_a_batch_is_what_the_order_says(write_shards):
    counts = [10, 23, 1]
    batches = run(write_shards(counts))
    order = MixtureSampler([ShuffledSampler(counts, seed=1, streams=4)], [(0, [1])], seed=1, batch_size=12)
    first = np.cumsum([0, *counts])
    for step, batch in enumerate(batches):
        positions = step_positions(step, 12, streams=4)
        _, shards, samples = order(positions)
        expected = (first[shards] + samples).tolist()
        assert numbers(batch) == expected
        assert batch.keys == [f"data-{s:06d}.tar/s{n:05d}" for s, n in zip(shards, expected, strict=True)]
        assert [view.crops for view in batch.views] == [2, 1]
        assert batch.labels is None
        assert [view.images.shape for view in batch.views] == [(24, 3, 2, 2), (12, 3, 3, 3)]
        two, one = (view.images for view in batch.views)
        assert torch.equal(two[12:], two[:12])  # the second crops come after all first ones
        assert torch.equal(one[..., :2, :2], two[:12])
        assert drawn(batch).tolist() == [sample_rng(1, int(p)).random(2)[c] for c in (0, 1) for p in positions]
        assert batch.views[1].colors == []
    taken = np.concatenate([step_positions(step, 12, streams=4) for step in range(7)])
    seen = np.concatenate([numbers(batch) for batch in batches])[taken.argsort()]
    assert sorted(seen[:34]) == sorted(seen[34:68]) == list(range(34))


def test_each_step_has_one_of_the_mixed_transforms(write_shards):
    """The oracle is a run with that transform alone. Two processes, with workers, passes and a resumed run agree."""
    shards = write_shards([30, 9])
    small, large = (MultiCrop(MultiCropConfig(global_size=n, local_size=n // 2, local_crops=3)) for n in (4, 8))
    mixed = MixedCrops([small, ResizedView(large, 10)], [0.5, 0.5])

    def load(transform, first=0, **split):
        given = {"batch_size": 12, "seed": 1, "steps": 8, "streams": 4, "first_step": first}
        return list(training_batches(shards, transform, **given, **split))

    alone = {one: load(one) for one in mixed.transforms}
    expected = [alone[mixed.at(1, step)][step] for step in range(8)]
    assert {batch.views[0].images.shape[-1] for batch in expected} == {4, 8}
    whole = load(mixed)
    assert len(whole) == 8
    assert all(same(one, other) for one, other in zip(whole, expected, strict=True))
    split = {"world_size": 2, "accumulation": 2, "workers": 1}
    ranks = [[*load(mixed, rank=rank, **split)[: 2 * 3], *load(mixed, 3, rank=rank, **split)] for rank in range(2)]
    for step, batch in enumerate(expected):
        parts = [ranks[rank][2 * step + micro] for micro in range(2) for rank in range(2)]
        assert [key for part in parts for key in part.keys] == batch.keys
        for place, view in enumerate(batch.views):
            images = [part.views[place].images.unflatten(0, (view.crops, -1)) for part in parts]
            assert torch.equal(torch.cat(images, 1).flatten(0, 1), view.images)


def damage(path, *contents):
    """Overwrites images in a tar, in place."""
    raw = Path(path).read_bytes()
    for old, new in contents:
        assert raw.count(old) == 1
        raw = raw.replace(old, new.ljust(len(old), b"\0"))
    Path(path).write_bytes(raw)


@pytest.mark.parametrize("workers", [0, 2])
def test_corrupt_images_are_replaced_from_their_stream(write_shards, png, caplog, workers):
    (path,) = write_shards([40])
    order = ShuffledSampler([40], seed=1, streams=4)
    in_order = order(np.arange(200))[2].tolist()
    stream = in_order[2::4]
    damage(path, (png(stream[0]), b"text"), (png(stream[1]), b""))
    batches = run([path], batch_size=4, steps=10, workers=workers)
    assert len(batches) == 10
    assert numbers(batches[0])[2] == stream[2]
    assert numbers(batches[1])[2] == stream[2]
    assert numbers(batches[2]) == in_order[8:12]
    names = [f"data-000000.tar/s{number:05d}: " for number in stream[:2]]
    assert [one[: len(names[0])] for one in batches[0].skipped] == names
    assert [one[: len(names[0])] for one in batches[1].skipped] == names[1:]
    assert not batches[2].skipped
    assert names[0] in caplog.text
    assert caplog.text.count("skipped ") == 2, "an image that is drawn again is not named again"
    assert sum(len(batch) for batch in batches) == 40


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_but_corrupt_images(write_tar, workers):
    path = write_tar("bad.tar", [(f"{n}.jpg", b"text" if n % 2 else b"") for n in range(20)])
    with pytest.raises(ShardError, match="100 images in a row cannot be read") as caught:
        run(path, workers=workers)
    assert "bad.tar/" in str(caught.value)
    assert "Make the shards of these images again" in str(caught.value)


@pytest.mark.parametrize(("bands", "channels"), [(5, 3), (3, 6), (7, 1)])
def test_images_of_other_bands_name_the_setting_that_works(tmp_path, bands, channels):
    for number in range(20):
        (tmp_path / f"{number}.tif").write_bytes(tiff(np.zeros((6, 8, bands), np.uint8), planarconfig="contig"))
    preprocessing = Preprocessing((0.5,) * channels, (0.5,) * channels)
    with pytest.raises(ShardError, match=f"{bands} bands, but {channels} .*Give --data.channels {bands}.") as caught:
        run(str(tmp_path), preprocessing=preprocessing)
    assert "shards" not in str(caught.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shard_that_vanishes_is_named(write_shards, workers):
    paths = write_shards([20, 20])
    batches = training_batches(paths, Small(), batch_size=12, seed=1, steps=1000, workers=workers)
    os.remove(paths[1])
    with pytest.raises(ShardError) as caught:
        for _ in batches:
            pass
    assert str(caught.value).startswith(f"{paths[1]} cannot be read: No such file")  # and no traceback before it


class Broken(Small):
    def draw(self, size, rng):
        raise KeyError("this transform is wrong")


@pytest.mark.medium
def test_other_errors_of_a_worker_keep_their_traceback(write_shards):
    batches = training_batches(write_shards([8]), Broken(), batch_size=2, seed=0, steps=2, workers=1)
    with pytest.raises(KeyError, match="this transform is wrong") as caught:
        list(batches)
    assert "test_loader.py" in str(caught.value)


def test_what_cannot_be_a_batch(write_shards):
    shards = write_shards([20, 20])
    with pytest.raises(ValueError, match=r"batch of 3 images is too small for 4 accumulated passes\."):
        run(shards, batch_size=3, world_size=2, accumulation=4)
    with pytest.raises(ValueError, match=r"takes 64 images from a source that has only 40\. Lower .* to 40 or less"):
        run(shards, batch_size=64)
    with pytest.raises(ValueError, match="takes 36 images from a source that has only 20"):
        run({shards[0]: 9, shards[1]: 1}, batch_size=40)


def test_the_global_random_state_is_left_alone(write_shards):
    shards = write_shards([20])
    before = torch.get_rng_state()
    run(shards, workers=1, steps=1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.medium
def test_a_loader_can_be_sent_to_a_fresh_process(write_shards):
    batches = training_batches(write_shards([20]), Small(), batch_size=4, seed=0, steps=5)
    sent = pickle.loads(pickle.dumps(batches))
    assert all(same(one, other) for one, other in zip(sent, batches, strict=True))


@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (3, 0), (2, 2)])
def test_evaluation_sees_every_image_once(write_shards, world_size, workers):
    shards = write_shards([10, 1, 12])
    found, sizes = [], []
    for rank in range(world_size):
        split = {"rank": rank, "world_size": world_size}
        batches = evaluation_batches(shards, Small(), batch_size=4, workers=workers, **split)
        parts = list(batches)
        assert batches.total == 23
        assert len(parts) == len(batches)
        assert [batch.labels.tolist() for batch in parts] == [numbers(batch) for batch in parts]
        assert [len(batch) for batch in parts[:-1]] == [4] * (len(parts) - 1)
        assert all(same(one, other) for one, other in zip(batches, parts, strict=True))  # again
        found += [number for batch in parts for number in numbers(batch)]
        sizes.append(sum(len(batch) for batch in parts))
    assert found == list(range(23))
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("workers", [0, 3])
def test_evaluation_leaves_corrupt_images_out(write_shards, png, caplog, workers):
    paths = write_shards([12])
    damage(paths[0], *((png(number), b"bad") for number in (1, 4, 5, 6, 7)))
    with caplog.at_level(logging.WARNING):
        opened = open_shards(paths)
        for _ in range(2):  # two evaluations of a run read the same source
            batches = list(evaluation_batches(opened, Small(), batch_size=4, workers=workers))
            assert [numbers(batch) for batch in batches] == [[0, 2, 3], [8, 9, 10, 11]]
            assert [len(batch.skipped) for batch in batches] == [1, 0]
    assert "data-000000.tar/s00007" in caplog.text
    assert "(5 different images so far)" in caplog.text
    assert caplog.text.count("skipped ") == 5, "each image is named once"


def test_labels_that_are_needed(write_shards, write_tar, png):
    shards = write_shards([3], labels=False)
    assert [batch.labels for batch in evaluation_batches(shards, Small(), batch_size=8, labels=False)] == [None]
    with pytest.raises(ShardError, match=r"data-000000.tar/s00000 has no label, but labels are needed"):
        evaluation_batches(shards, Small(), batch_size=8)
    words = write_tar("words.tar", [("a.png", png(0)), ("a.cls", b"cat")])
    with pytest.raises(ShardError, match=r"words.tar/a is b'cat', not an integer"):
        list(evaluation_batches(words, Small(), batch_size=8, workers=1))


def test_a_worker_survives_early_signals(write_shards, monkeypatch):
    ready = torch.set_num_threads  # one of the first calls in a worker

    def signalled(threads):
        if multiprocessing.parent_process():
            os.system(f"kill -TERM {os.getpid()}")
        ready(threads)

    monkeypatch.setattr(torch, "set_num_threads", signalled)
    assert len(run(write_shards([20]), batch_size=4, steps=5, workers=1)) == 5


@pytest.mark.parametrize("workers", [0, 2])
def test_labels_are_those_of_the_images(write_tar, png, workers):
    """Label and pixels are the number of the sample, also where images were replaced."""
    members = []
    for number in range(12):
        members += [(f"s{number:05d}.png", b"broken" if number % 3 == 0 else png(number))]
        members += [(f"s{number:05d}.cls", str(number).encode())]
    batches = run([write_tar("data-000000.tar", members)], classes=12, batch_size=4, workers=workers)
    assert len(batches) == 7
    for batch in batches:
        assert batch.labels.tolist() == numbers(batch)
        assert batch.labels.dtype == torch.int64
        assert all(number % 3 for number in numbers(batch))


@pytest.mark.parametrize("workers", [0, 1])
def test_missing_and_too_large_labels_are_refused(write_shards, workers):
    with pytest.raises(ShardError, match=r"s00000 has no label, but labels are needed"):
        run(write_shards([20], labels=False), classes=20, workers=workers)
    with pytest.raises(ShardError, match=r"the label of data-000000.tar/s0001\d is 1\d, but the run has 10 classes"):
        run(write_shards([20]), classes=10, workers=workers)


@pytest.mark.parametrize("old", [{"decode": "cpu"}, *({"crops": where} for where in ("auto", "workers", "device"))])
def test_settings_of_older_runs_are_dropped(old):
    """config.yaml of older runs holds `decode` and `crops`."""
    assert LoaderConfig.model_validate(old | {"max_pixels": 9}) == LoaderConfig(max_pixels=9)
    with pytest.raises(ValueError, match=rf"Remove loader\.{next(iter(old))}"):
        LoaderConfig.model_validate(dict.fromkeys(old, "elsewhere"))


def test_small_weights_are_exact_or_refused(write_shards):
    one, two = write_shards([20, 20])
    batches = run({one: 1.0, two: 0.0015}, batch_size=16, steps=167)  # 2 / 1,024 would give five or six images
    assert sum((batch.sources == 1).sum() for batch in batches) == 4
    with pytest.raises(ValueError, match="Set this weight to 0 or to a larger number"):
        run({one: 1.0, two: 1e-7}, batch_size=4, steps=1)


def test_training_crops_avoid_pixels_without_data(write_tar):
    """Sample 0 holds data everywhere, and its crops stay. Of the others, half holds data."""
    members = []
    for number in range(8):
        values = np.full((40, 60, 3), 100, dtype=np.uint8)
        values[:, :30] = 0 if number else 100
        members.append((f"{number}.png", saved(values, "PNG")))
    shards = write_tar("scenes.tar", members)
    transform = MultiCrop(MultiCropConfig(global_size=16, local_size=8, local_crops=4))

    def local_crops(nodata):
        """Crops (4, 3 * 8 * 8) of each sample, by position and name."""
        form = Preprocessing((0.8,) * 3, (1.0,) * 3, nodata=nodata)
        found = {}
        for batch in training_batches(shards, transform, batch_size=8, seed=3, steps=4, preprocessing=form):
            crops = batch.views[1].images.reshape(4, 8, -1)
            found |= {(int(batch.positions[i]), batch.keys[i]): crops[:, i] for i in range(8)}
        return found

    plain, avoiding = local_crops(None), local_crops(0)
    assert plain.keys() == avoiding.keys()
    assert all(torch.equal(crops, avoiding[at]) for at, crops in plain.items() if at[1].endswith("/0"))
    poor = [
        sum(int(((one - 100.0).abs() > 50).float().mean() > 0.6) for crops in found.values() for one in crops)
        for found in (plain, avoiding)
    ]
    assert poor[0] > 20
    assert poor[1] < poor[0] / 4
