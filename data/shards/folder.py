"""A folder of images, which a run reads like a shard: one file per sample, in the order of the names.

The index of the folder is made from the names, sizes and modification times of its files. No image is opened. The index
is stored in the cache under a hash of these values. If a file changes, the hash changes, and the index is made again.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tessera.data.failures import SampleError, ShardError, unreadable
from tessera.data.shards.access import DEFAULT, Access
from tessera.data.shards.listing import Listing, list_folder
from tessera.data.shards.manifest import add_labels, list_file
from tessera.data.shards.samples import SampleKeys
from tessera.data.shards.shard import Shard
from tessera.data.shards.tar_index import Index
from tessera.runtime.user_error import printable


@dataclass(frozen=True)
class ImageFolder(Shard):
    """A local folder of images, whose path ends in a slash, or a manifest of images in its folder. Symbolic links are
    followed.

    The labels are those of a manifest (`data.shards.manifest`), if there is one. Otherwise, if every image is in a
    direct subfolder and there are several subfolders, the subfolders are classes. The class numbers are the same as in
    shards that `data.make_shards` makes from the folder.
    """

    classes: tuple[str, ...] | None = None
    """Names of the classes; None if the images have no classes, or the manifest numbers them."""
    class_counts: tuple[tuple[str, int], ...] = ()
    """Name and number of images of each class; empty if the classes have no names."""

    cure: ClassVar[str] = "Replace these files, or remove them from the folder."

    @classmethod
    def at(cls, path: str, access: Access = DEFAULT) -> "ImageFolder":
        """Return the folder of images at `path`, or the images of the manifest at `path`.

        Raises:
            ShardError: the folder contains no readable images, or its subfolders look like separate sets, such as
                train and val.
        """
        listing = _list(path, access.keys)
        classes = None if listing.classes is None else tuple(listing.classes)
        size = int(listing.sizes[listing.usable].sum())
        below = os.path.join(os.path.dirname(path), "")
        notes = tuple(note._replace(first=note.first and below + note.first) for note in listing.notes())
        facts = {"classes": classes, "class_counts": listing.class_counts(), "notes": notes}
        folder = cls(path, size, listing.fingerprint(), access=access, **facts)
        folder._mapped(lambda: _index(listing))
        return folder

    @property
    def name(self) -> str:
        return self.names_classes.rpartition("/")[2]

    @property
    def names_classes(self) -> str:
        return self.path.removesuffix("/")

    def class_names(self) -> tuple[str, ...] | None:
        return self.classes

    def _file(self, index: Index, sample: int) -> bytes:
        """Return the path of the image of a sample."""
        return os.path.join(os.path.dirname(os.fsencode(self.path)), index.raw_key(sample))

    def file_identity(self, index: Index, sample: int) -> tuple[int, int] | None:
        """Return the device and the inode of the file of a sample, links followed; None if there is no file."""
        try:
            status = os.stat(self._file(index, sample))
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def make_index(self) -> Index:
        """List the folder again, and return the names, sizes, modification times and labels of the images."""
        listing = _list(self.path, self.access.keys)
        if listing.fingerprint() != self.version:
            raise ShardError(f"{self.path} has changed since it was opened. Restart the run.")
        return _index(listing)

    def image(self, index: Index, sample: int) -> bytes:
        path = self._file(index, sample)
        modified, size = map(int, index.images[sample])
        try:
            with open(path, "rb") as file:
                status, content = os.fstat(file.fileno()), file.read(size + 1)
        except OSError as error:
            name = printable(os.fsdecode(path))
            raise unreadable(name, error, "Restore the image, or restart the run.") from error
        if status.st_mtime_ns != modified or len(content) != size:
            raise ShardError(
                f"{printable(os.fsdecode(path))} has changed since the folder was listed. Restart the run."
            )
        return content

    def members(self, index: Index, sample: int) -> dict[str, Any]:
        found = super().members(index, sample)
        key, _, extension = found["__key__"].rpartition(".")
        image = found.pop("jpg")
        return found | {"__key__": key, extension.lower(): image}

    def label(self, index: Index, sample: int) -> int:
        label = int(index.labels[sample, 0])
        if label < 0:
            name = f"{self.name}/{index.key(sample)}"
            if not self.path.endswith("/"):
                raise SampleError(
                    f"{name} has no label, but labels are needed. Write labels to a column `label` of {self.path}."
                )
            raise SampleError(
                f"{name} has no label, but labels are needed. Give --labels labels.csv with the columns path and "
                "label, or move the images to at least two direct subfolders, one per class. If the validation images "
                "are in this folder too, list the others in a CSV, and give it in place of the folder: --data "
                "train.csv for a run, --train train.csv for an evaluation."
            )
        return label


def _list(path: str, keys: SampleKeys) -> Listing:
    try:
        if not path.endswith("/"):
            return list_file(Path(path), root=None, labels="auto", only=keys.labelled_only, inside=False)
        listing = list_folder(Path(path), labels="auto", manifest=None if keys.labels is None else Path(keys.labels))
        if keys.labels is not None:
            add_labels(listing, Path(keys.labels), only=keys.labelled_only)
        return listing
    except OSError as error:
        raise unreadable(path, error, "Correct the path or its permissions.") from error


def _index(listing: Listing) -> Index:
    """Return the index of the usable images of a listing."""
    usable = listing.usable
    names = [listing.path(int(entry)) for entry in usable]
    labels, sizes = listing.labels[usable], listing.sizes[usable]
    return Index(
        keys=np.frombuffer(b"".join(names), dtype=np.uint8),
        ends=np.cumsum([len(name) for name in names], dtype=np.int64),
        images=np.stack([listing.modified[usable], sizes], axis=1),
        labels=np.stack([labels, np.where(labels >= 0, 0, -1)], axis=1),
        summary=np.array([len(names), (labels >= 0).sum(), sizes.sum()], dtype=np.int64),
    )
