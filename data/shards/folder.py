"""A folder of images, which a run reads like a shard: one file per sample, in the order of the names.

The index of the folder is made from the names, sizes and modification times of its files. No image is opened. The index
is stored in the cache under a hash of these facts, so that it is made again when a file changes.
"""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tessera.data.shards.errors import MakeError, ShardError, unreadable
from tessera.data.shards.listing import list_folder, separate_sets
from tessera.data.shards.tar import IMAGES, Index
from tessera.runtime.errors import printable


class Listed(NamedTuple):
    """Samples and classes of a folder of images."""

    table: Index
    version: str
    """Hash of the relative paths, sizes, modification times and labels of all files."""
    classes: tuple[str, ...] | None
    """Names of the subfolders, which are the classes; None if the images have no classes."""
    left_out: list[tuple[int, str]]
    """Reasons why files are left out, with the number of these files."""


def holds_images(folder: str) -> bool:
    """Return True if a folder or one of its subfolders holds a file with the extension of an image."""
    endings = tuple(f".{extension}" for extension in IMAGES)
    return any(name.lower().endswith(endings) for _, _, names in os.walk(folder) for name in names)


def list_images(folder: str) -> Listed:
    """Return the index of a folder of images. Symbolic links are followed.

    If every image is in a direct subfolder and there are several subfolders, the subfolders are classes, with the same
    numbers that `data.make_shards` gives them.

    Raises:
        ShardError: the folder holds no images that can be read, or subfolders that look like separate sets.
    """
    try:
        if sets := separate_sets(Path(folder)):
            raise ShardError(
                f"{folder}: holds the folders {', '.join(path.name for path in sets)}, which look like separate sets "
                f"of images, not like classes. Name one of them, for example {sets[0]}."
            )
        listing = list_folder(Path(folder), labels="auto", links="all")
    except MakeError as error:
        raise ShardError(str(error)) from error
    except OSError as error:
        raise unreadable(folder, error, "Correct the path or its permissions.") from error
    usable = listing.usable
    names = [listing.path(int(entry)) for entry in usable]
    labels = listing.labels[usable]
    labelled = labels >= 0
    sizes = listing.sizes[usable]
    table = Index(
        keys=np.frombuffer(b"".join(names), dtype=np.uint8),
        ends=np.cumsum([len(name) for name in names], dtype=np.int64),
        images=np.stack([listing.modified[usable], sizes], axis=1),
        labels=np.stack([labels, np.where(labelled, 0, -1)], axis=1),
        summary=np.array([len(names), labelled.sum(), sizes.sum()], dtype=np.int64),
    )
    classes = None if listing.classes is None else tuple(listing.classes)
    return Listed(table, listing.fingerprint(), classes, listing.unusable())


def read_image(folder: str, index: Index, sample: int) -> bytes:
    """Return the encoded image of a sample in a folder of images.

    Raises:
        ShardError: the file cannot be read, or is not the file that was listed.
    """
    path = os.path.join(os.fsencode(folder), index.raw_key(sample))
    modified, size = map(int, index.images[sample])
    try:
        with open(path, "rb") as file:
            status, content = os.fstat(file.fileno()), file.read(size + 1)
    except OSError as error:
        name = printable(os.fsdecode(path))
        raise unreadable(name, error, "Restore the image, or restart the run.") from error
    if status.st_mtime_ns != modified or len(content) != size:
        raise ShardError(f"{printable(os.fsdecode(path))}: has changed since the folder was listed. Restart the run.")
    return content
