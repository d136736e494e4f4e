"""Small shards for the tests of this folder."""

import numpy as np
import pytest

from tests.data import batches
from tests.data.batches import saved
from tests.data.made import CLASSES, picture


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of its own for each test."""
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def png():
    """A function: number -> PNG of 4 x 6 pixels, all (number // 256, number % 256, 7)."""

    def encode(number):
        pixels = np.empty((4, 6, 3), dtype=np.uint8)
        pixels[:] = number // 256, number % 256, 7
        return saved(pixels, "PNG")

    return encode


@pytest.fixture
def write_tar(tmp_path):
    """`tests.data.batches.write_tar` with the name of a file in `tmp_path`."""
    return lambda name, members, **options: batches.write_tar(tmp_path / name, members, **options)


@pytest.fixture
def write_shards(write_tar, png):
    """A function: counts -> paths of shards whose samples are numbered through, in pixels, key and label."""

    def write(counts, ending=".tar", labels=True):
        paths, number = [], 0
        for shard, count in enumerate(counts):
            members = []
            for _ in range(count):
                members.append((f"s{number:05d}.png", png(number)))
                if labels:
                    members.append((f"s{number:05d}.cls", str(number).encode()))
                number += 1
            paths.append(write_tar(f"data-{shard:06d}{ending}", members))
        return paths

    return write


@pytest.fixture
def photos(tmp_path):
    """A function: {relative path: bytes} -> a folder with these files."""

    def write(files, name="photos"):
        for path, content in files.items():
            target = tmp_path / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        return tmp_path / name

    return write


@pytest.fixture
def animals(photos):
    """60 images in three class folders, about 1.2 kB each."""
    return photos(
        {f"{animal}/{animal}_{n:02d}.jpg": picture(100 * k + n) for k, animal in enumerate(CLASSES) for n in range(20)}
    )
