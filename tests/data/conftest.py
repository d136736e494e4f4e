"""Small shards for the tests of this folder."""

import io
import tarfile

import numpy as np
import pytest
from PIL import Image

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
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        return file.getvalue()

    return encode


@pytest.fixture
def write_tar(tmp_path):
    """A function: name and members (name, bytes or TarInfo) -> path of the tar it wrote in `tmp_path`."""

    def write(name, members, format=tarfile.USTAR_FORMAT):
        path = tmp_path / name
        with tarfile.open(path, "w:gz" if name.endswith(".gz") else "w", format=format) as archive:
            for member, content in members:
                info = member if isinstance(member, tarfile.TarInfo) else tarfile.TarInfo(member)
                if info.isreg():
                    info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        return str(path)

    return write


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
