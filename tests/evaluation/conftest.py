"""Small labelled shards with a cache of their own, and encoders of all families."""

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tessera import encoders

FAMILIES = ["vit_micro", "swin_micro", "twins_svt_micro", "navit_micro", "sam_vit_micro"]


def save_encoder(path: Path, variant: str = "vit_micro", seed: int = 0, **settings: Any) -> str:
    """Write an encoder with random weights, and return the path."""
    torch.manual_seed(seed)
    encoders.save(encoders.build(variant, **settings), path)
    return str(path)


def write_shard(path: Path, images: np.ndarray, labels: list[int] | None, prefix: str = "image") -> Path:
    """`images` (N, H, W, 3) uint8 as PNG, which keeps pixels as they are."""
    with tarfile.open(path, "w") as archive:
        for i, pixels in enumerate(images):
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, "png")
            members = {"png": buffer.getvalue()} | ({} if labels is None else {"cls": str(labels[i]).encode()})
            for extension, content in members.items():
                info = tarfile.TarInfo(f"{prefix}-{i:04d}.{extension}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return path


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("TESSERA_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """Images of 16 pixels in 3 classes that differ by a faint stripe: two training shards of 31 in all, one of 13."""
    folder = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(0)

    def make(name, count):
        labels = [i % 3 for i in range(count)]
        images = rng.integers(0, 120, (count, 16, 16, 3), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[:, 5 * label : 5 * label + 5, label] += 20
        return write_shard(folder / f"{name}.tar", images, labels, name)

    make("train-0", 20), make("train-1", 11), make("val-0", 13)
    write_shard(folder / "bare-0.tar", np.zeros((4, 16, 16, 3), np.uint8), None)
    return folder
