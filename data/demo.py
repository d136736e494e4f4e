"""The embedded data set: the 1,797 handwritten digits of scikit-learn as real shards, for a first run without any data.

8 x 8 pixels of 17 gray levels are enlarged to 32 x 32 RGB, so that crops of them have room. 1,437 images train and 360,
36 of each class, are held out, whatever the seed of a run.
"""

import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image
from webdataset.writer import TarWriter

from data.shards import ShardError, cache_folder

VERSION = 1  # changes with what is written
SIZE = 32  # pixels
HELD_OUT = 36  # of each class
TRAIN_SHARDS = 4
HELD_OUT_SHARDS = 2


def demo_shards() -> tuple[str, str]:
    """The train and the held-out SHARDS, as brace ranges; written to the cache folder at the first call.

    Raises:
        ShardError: the cache folder cannot be written to.
    """
    folder = cache_folder() / f"demo-v{VERSION}"
    if not folder.exists():
        try:
            _write(folder)
        except OSError as error:
            raise ShardError(f"cannot write {folder}: {error}; set TESSERA_CACHE to a folder with space") from error
    return _pattern(folder, "train", TRAIN_SHARDS), _pattern(folder, "held-out", HELD_OUT_SHARDS)


def _pattern(folder: Path, name: str, shards: int) -> str:
    return f"{folder}/{name}-{{000000..{shards - 1:06d}}}.tar"


def _paths(folder: Path, name: str, shards: int) -> list[str]:
    return [str(folder / f"{name}-{shard:06d}.tar") for shard in range(shards)]


def _write(folder: Path) -> None:
    """Writes beside `folder` and renames, so that nobody meets half of it; the first of several processes wins."""
    from sklearn.datasets import load_digits  # takes a second, and only the first run needs it

    pixels, labels = load_digits(return_X_y=True)  # (1797, 64) of 0 to 16, (1797,)
    held_out = np.sort(np.concatenate([_spread(np.flatnonzero(labels == digit)) for digit in range(10)]))
    train = np.setdiff1d(np.arange(len(labels)), held_out)
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}-"))
    try:
        part.chmod(0o755)
        for paths, chosen in (
            (_paths(part, "train", TRAIN_SHARDS), train),
            (_paths(part, "held-out", HELD_OUT_SHARDS), held_out),
        ):
            for path, numbers in zip(paths, np.array_split(chosen, len(paths)), strict=True):
                with TarWriter(path, encoder=False, mtime=0) as writer:
                    for sample in _samples(pixels, labels, numbers):
                        writer.write(sample)
        try:
            os.rename(part, folder)
        except OSError:
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _spread(numbers: np.ndarray) -> np.ndarray:
    """`HELD_OUT` of `numbers`, evenly spaced: the digits lie in the order of their writers."""
    return numbers[np.linspace(0, len(numbers) - 1, HELD_OUT).round().astype(int)]


def _samples(pixels: np.ndarray, labels: np.ndarray, numbers: np.ndarray) -> Iterator[dict[str, str | bytes]]:
    for number in numbers:
        small = Image.fromarray((pixels[number].reshape(8, 8) * (255 / 16)).round().astype(np.uint8))
        file = io.BytesIO()
        small.resize((SIZE, SIZE), Image.Resampling.BICUBIC).convert("RGB").save(file, "PNG")
        yield {"__key__": f"digit-{number:04d}", "png": file.getvalue(), "cls": str(labels[number]).encode()}
