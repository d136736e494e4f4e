"""What tests of shards and of their making share."""

import csv

import numpy as np
import webdataset
from PIL import Image

from tessera.data.make_shards import main
from tests.data.batches import saved


def picture(seed, size=(24, 16), format="JPEG", mode="RGB", **options):
    """An encoded picture of noise, (width, height) in size."""
    width, height = size
    channels = {"L": (), "RGB": (3,), "RGBA": (4,), "CMYK": (4,)}[mode]
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, *channels), dtype=np.uint8)
    return saved(Image.fromarray(pixels, mode), format, **options)


CLASSES = ["ant", "bee", "cat"]
SMALL = "--shard_size_mb=0.03"


def make(*words, status=0):
    assert main([str(word) for word in words]) == status


def content(folder):
    """All files of a folder of shards, but the lock."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "lock"
    }


def shards(folder):
    return sorted(folder.glob("*.tar"))


def samples(folder):
    """(key, image, label) of all samples, by webdataset."""
    found = []
    for path in shards(folder):
        for sample in webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False):
            image = next(sample[kind] for kind in ("jpg", "png", "webp") if kind in sample)
            found.append((sample["__key__"], image, sample["cls"].decode() if "cls" in sample else None))
    return found


def rows(path):
    with path.open(newline="", errors="surrogateescape") as file:
        return list(csv.reader(file))[1:]
