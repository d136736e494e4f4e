import hashlib
import io
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_digits

from tessera.data.demo import demo_shards
from tessera.data.shards import ShardError, expand, open_shards


def samples(paths):
    """Key, image and label of all samples."""
    source = open_shards(paths)
    for number in range(source.images):
        image = Image.open(io.BytesIO(source.image(number)))
        yield source.name(number).rpartition("/")[2], image, source.label(number)


def test_the_digits_of_scikit_learn():
    train, held_out = map(list, map(samples, demo_shards()))
    assert (len(train), len(held_out)) == (1437, 360)
    assert np.bincount([label for _, _, label in held_out]).tolist() == [36] * 10
    pixels, labels = load_digits(return_X_y=True)
    assert sorted(key for key, _, _ in train + held_out) == [f"digit-{number:04d}" for number in range(1797)]
    for key, image, label in train[::50] + held_out[::50]:
        number = int(key.removeprefix("digit-"))
        assert label == labels[number]
        assert (image.mode, image.size) == ("RGB", (32, 32))
        small = torch.from_numpy(pixels[number] * 255 / 16).round().byte().view(1, 1, 8, 8)
        large = F.interpolate(small, (32, 32), mode="bicubic", antialias=True)[0, 0].numpy().astype(int)
        assert np.abs(np.asarray(image) - large[:, :, None]).max() <= 1  # of 255, by rounding


def digests():
    return [hashlib.sha256(Path(path).read_bytes()).hexdigest() for paths in demo_shards() for path in expand(paths)]


def test_the_bytes_are_always_the_same(tmp_path, monkeypatch):
    first = digests()
    assert len(set(first)) == 6
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "another"))
    assert digests() == first


def test_two_processes_at_once(cache):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=demo_shards) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert [path.name for path in cache.iterdir()] == ["demo-v1"]
    assert sum(open_shards(paths).images for paths in demo_shards()) == 1797


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "file"))
    with pytest.raises(ShardError, match="Set TESSERA_CACHE"):
        demo_shards()
