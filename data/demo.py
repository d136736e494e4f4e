"""The built-in data set for a first run: shards of the 1,797 handwritten digits of scikit-learn.

The digits have 8 x 8 pixels with 17 gray levels. They are enlarged to RGB images of 32 x 32 pixels so that there is
room for crops. Every run uses the same 1,437 training images and the same 360 held-out images, 36 of each class.
"""

import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tessera.data.shards import ShardError
from tessera.data.shards.cache import cache_folder
from tessera.data.tools.pack import write_samples

VERSION = 1  # increase this number when the samples of the data set change
SIZE = 32  # side of an image in pixels
HELD_OUT = 36  # number of held-out images per class
SHARDS = {"train": 4, "held-out": 2}


def demo_shards() -> tuple[str, str]:
    """Return two shard patterns with brace ranges: one for the train shards, and one for the held-out shards.

    The first call writes the shards to the cache folder.

    Raises:
        ShardError: the cache folder cannot be written.
    """
    folder = cache_folder() / f"demo-v{VERSION}"
    if not folder.exists():
        try:
            _write(folder)
        except OSError as error:
            raise ShardError(
                f"cannot write {folder}: {error}. Set TESSERA_CACHE to a writable folder with enough space."
            ) from error
    train, held_out = (f"{folder}/{name}-{{000000..{count - 1:06d}}}.tar" for name, count in SHARDS.items())
    return train, held_out


def _write(folder: Path) -> None:
    """Write all shards to a temporary folder, and rename this folder to `folder`.

    If several processes write at the same time, the shards of the process that renames first are kept.
    """
    # Import late: scikit-learn takes a second to import, and only the first run needs it.
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)  # pixels (1797, 64) from 0 to 16, labels (1797,)
    held_out = np.sort(np.concatenate([_choose(np.flatnonzero(labels == digit)) for digit in range(10)]))
    train = np.setdiff1d(np.arange(len(labels)), held_out)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}-"))
    try:
        temporary.chmod(0o755)
        for (name, count), chosen in zip(SHARDS.items(), (train, held_out), strict=True):
            for shard, numbers in enumerate(np.array_split(chosen, count)):
                write_samples(temporary / f"{name}-{shard:06d}.tar", _samples(pixels, labels, numbers))
        try:
            os.rename(temporary, folder)
        except OSError:
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _choose(numbers: np.ndarray) -> np.ndarray:
    """Return `HELD_OUT` entries of `numbers`.

    The entries are evenly spaced, because neighbouring digits are by the same writer.
    """
    return numbers[np.linspace(0, len(numbers) - 1, HELD_OUT).round().astype(int)]


def _samples(pixels: np.ndarray, labels: np.ndarray, numbers: np.ndarray) -> Iterator[dict[str, Any]]:
    """Yield the samples at the indices `numbers` in the form that webdataset writes to a shard."""
    for number in numbers:
        small = Image.fromarray((pixels[number].reshape(8, 8) * (255 / 16)).round().astype(np.uint8))
        file = io.BytesIO()
        small.resize((SIZE, SIZE), Image.Resampling.BICUBIC).convert("RGB").save(file, "PNG")
        yield {"__key__": f"digit-{number:04d}", "png": file.getvalue(), "cls": str(labels[number]).encode()}
