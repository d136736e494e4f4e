"""List of the image files in a folder, stored as compact arrays. No image is opened.

Paths are relative to a root folder, and are stored as bytes, as in the file system. A million paths take about 100 MB.
"""

import hashlib
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tessera.data.shards.failures import ShardError, is_exhausted
from tessera.data.shards.tar import IMAGES, LARGEST_MEMBER, MAPS
from tessera.runtime.user_error import printable

TRAINING_SETS = {"train", "training"}
SETS = {*TRAINING_SETS, "val", "valid", "validation", "test", "testing"}
NO_LABEL = -1
EMPTY, MISSING, IRREGULAR, LARGE, UNREADABLE, UNLABELLED = range(0, -6, -1)
REASONS = {
    EMPTY: "the file is empty",
    MISSING: "not found",
    IRREGULAR: "not a regular file",
    LARGE: f"larger than {LARGEST_MEMBER} bytes",
    UNREADABLE: "cannot be read",
    UNLABELLED: "without a label",
}
"""Maps a code to the reason why a file is left out. `Listing.sizes` and `Maps.sizes` contain the code in place of the
size."""
_MAPS = tuple(b"." + name.encode() for name in MAPS)
_EXTENSIONS = tuple(b"." + extension.encode() for extension in IMAGES)


class File(NamedTuple):
    """A file that has an image extension."""

    path: bytes
    size: int
    """Size in bytes, or a key of `REASONS` if the file is left out."""
    modified: int
    """Modification time in nanoseconds since 1970."""
    label: str | None = None
    """Text of the label; None for no label."""


@dataclass
class Maps:
    """Maps of classes or of depth of the N files of a `Listing`."""

    root: bytes
    """Path of the folder of maps, without symbolic links."""
    suffix: bytes
    """Suffix of a map, which replaces the extension of its image, such as `.seg.png`, or `.png` in a folder of maps."""
    sizes: np.ndarray
    """Size of each map in bytes, or a key of `REASONS`. `MISSING` means that the image has no map: (N,) int64."""
    modified: np.ndarray
    """Modification time of each map in nanoseconds since 1970: (N,) int64."""

    def path(self, image: bytes) -> bytes:
        """Return the relative path of the map for the image at the relative path `image`."""
        return os.path.splitext(image)[0] + self.suffix


@dataclass
class Listing:
    """List of N files that have an image extension."""

    root: bytes
    """Path of the root folder, without symbolic links."""
    names: np.ndarray
    """Concatenated paths of all files: uint8."""
    ends: np.ndarray
    """Index in `names` at which the path of each file ends: (N,) int64."""
    sizes: np.ndarray
    """Size of each file in bytes, or a key of `REASONS` if the file is left out: (N,) int64."""
    modified: np.ndarray
    """Modification time of each file in nanoseconds since 1970: (N,) int64."""
    labels: np.ndarray
    """Class number of each file, or -1 for no label: (N,) int64."""
    texts: list[str]
    """Distinct texts of the labels, in order of first appearance. Before `number_classes` is called, `labels` contains
    indices into this list."""
    other_files: Counter[str] = field(default_factory=Counter)
    """Number of files that are not images, for each file name extension."""
    classes: list[str] | None = None
    """Names of the classes; None if labels have no names."""
    maps: Maps | None = None
    """Maps of the files; None if no file has a map."""

    @classmethod
    def of(cls, root: bytes, files: Iterable[File], other_files: Counter[str] | None = None) -> "Listing":
        """Return a listing of `files`, which the function iterates over once."""
        texts: dict[str, int] = {}
        names, facts = bytearray(), []
        for file in files:
            names += file.path
            label = NO_LABEL if file.label is None else texts.setdefault(file.label, len(texts))
            facts.append((len(names), file.size, file.modified, label))
        columns = np.array(facts, dtype=np.int64).reshape(-1, 4).T.copy()
        return cls(root, np.frombuffer(names, dtype=np.uint8), *columns, list(texts), other_files or Counter())

    def __len__(self) -> int:
        return len(self.ends)

    def path(self, entry: int) -> bytes:
        """Return the relative path of an entry."""
        return self.names[self.ends[entry - 1] if entry else 0 : self.ends[entry]].tobytes()

    @property
    def usable(self) -> np.ndarray:
        """Indices of the files that are not left out: (M,) int64."""
        return np.flatnonzero(self.sizes > 0)

    def unusable(self) -> list[tuple[int, str]]:
        """Return (number of files, reason) for each reason why files are left out."""
        codes, counts = np.unique(self.sizes[self.sizes <= 0], return_counts=True)
        return [(int(count), REASONS[int(code)]) for code, count in zip(codes, counts, strict=True)]

    def number_classes(self, classes: list[str]) -> None:
        """Renumber the labels: an index into `texts` becomes the index of the same text in `classes`."""
        numbers = {name: number for number, name in enumerate(classes)}
        self.labels = np.array([*(numbers[text] for text in self.texts), NO_LABEL], dtype=np.int64)[self.labels]
        self.texts = self.classes = classes

    def fingerprint(self) -> str:
        """Return a hash of all relative paths, sizes, modification times, labels and maps, without the root folder."""
        digest = hashlib.sha256()
        maps = () if self.maps is None else (self.maps.sizes, self.maps.modified)
        for values in (self.names, self.ends, self.sizes, self.modified, self.labels, *maps):
            digest.update(values.data)
        return digest.hexdigest()

    def refuse_empty(self, message: str) -> None:
        """Raise `ShardError` if no file is usable. The error lists the kinds of files that were found."""
        if len(self.usable):
            return
        found = [f"{count:,} x {reason}" for count, reason in self.unusable()]
        found += [f"{count:,} x {extension}" for extension, count in self.other_files.most_common(3)]
        instead = f" Found instead: {', '.join(found)}." if found else ""
        raise ShardError(f"{message}. File names of images end in {', '.join(IMAGES)}.{instead}")


def file_facts(path: bytes) -> tuple[int, int]:
    """Return the size and modification time of a file. If the file is left out, the size is a key of `REASONS`."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return MISSING, 0
    except OSError as error:
        _refuse_exhausted(error)
        return UNREADABLE, 0
    if not stat.S_ISREG(status.st_mode):
        return IRREGULAR, 0
    return (status.st_size if status.st_size <= LARGEST_MEMBER else LARGE), status.st_mtime_ns


def _refuse_exhausted(error: OSError) -> None:
    """Raise `ShardError` if the error is a lack of resources. Otherwise, the listing would leave out good files."""
    if is_exhausted(error):
        raise ShardError(
            f"the images cannot be listed: {error.strerror}. Raise the limit (`ulimit -n` for open files)."
        ) from error


def _refuse_separate_sets(folder: Path) -> None:
    """Raise `ShardError` if a folder has a subfolder for training images and another one for held-out images."""
    names = sorted(path.name for path in folder.iterdir() if path.name.lower() in SETS and path.is_dir())
    training = [name for name in names if name.lower() in TRAINING_SETS]
    if training and len(names) > 1:
        raise ShardError(
            f"{folder} holds the folders {', '.join(names)}, which look like separate sets of images, not like "
            f"classes. Give one of these folders, for example {folder / training[0]}. To make shards from all images, "
            "run `tessera make_shards` with --labels none, or with --labels folders if these folders are classes."
        )


def list_folder(folder: Path, *, labels: str, besides: Path | None = None) -> Listing:
    """List the images in a folder and its subfolders, sorted by name.

    The images of a folder come before the images of its subfolders. Files and folders whose names begin with a dot are
    skipped. Symbolic links are followed.

    Args:
        folder: folder of images.
        labels: "folders" makes the first folder of each path the class of the image. "none" assigns no labels. "auto"
            chooses "folders" if all images are exactly one folder deep and there are several folders, otherwise "none".
            "auto" refuses a folder with subfolders such as train and val.
        besides: subfolder to skip; None to skip no subfolder.

    Raises:
        ShardError: there are no images; `labels` is "folders" and an image is not in a class folder; or `labels` is
            "auto" and subfolders look like separate sets.
    """
    if labels == "auto":
        _refuse_separate_sets(folder)
    root, other_files = os.path.realpath(os.fsencode(folder)), Counter[str]()
    skipped = None if besides is None else os.path.realpath(os.fsencode(besides))
    listing = Listing.of(root, _walk(root, skipped, other_files), other_files)
    listing.refuse_empty(f"no images below {folder}")
    paths = [listing.path(int(entry)) for entry in listing.usable]
    depths = sorted({path.count(b"/") for path in paths})
    if labels == "folders" and depths[0] == 0:
        loose = printable(os.fsdecode(next(path for path in paths if b"/" not in path)))
        raise ShardError(f"{folder}/{loose} is not in a class folder. Move it to a class folder, or use --labels none.")
    if labels == "folders" or (labels == "auto" and depths == [1] and len(listing.texts) > 1):
        listing.number_classes(sorted(listing.texts, key=lambda name: (not name.isdecimal(), _value(name), name)))
        return listing
    listing.labels = np.full(len(listing), NO_LABEL)
    return listing


def _value(name: str) -> int:
    return int(name) if name.isdecimal() and len(name) < 20 else 0


def _walk(root: bytes, besides: bytes | None, other_files: Counter[str]) -> Iterator[File]:
    """Yield the images of a folder, labelled by the first folder of their paths. Count all other files."""

    def refuse(error: OSError) -> None:
        _refuse_exhausted(error)
        other_files["folders that cannot be read"] += 1

    parents = {root: {root}}  # for each folder to be visited, the real paths of the folder and of its parents
    for here, folders, names in os.walk(root, followlinks=True, onerror=refuse):
        above, found = parents.pop(here), sorted(name for name in folders if not name.startswith(b"."))
        folders.clear()
        for path in (os.path.join(here, name) for name in found):
            folder = os.path.realpath(path)
            if folder not in above and folder != besides:  # following a link to a parent folder would never end
                parents[path] = above | {folder}
                folders.append(os.path.basename(path))
        prefix = os.path.join(os.path.relpath(here, root), b"") if here != root else b""
        label = os.fsdecode(prefix.partition(b"/")[0]) if prefix else None
        for name in sorted(name for name in names if not name.startswith(b".")):
            lower = name.lower()
            if lower.endswith(_EXTENSIONS) and not lower.endswith(_MAPS):
                yield File(prefix + name, *file_facts(os.path.join(here, name)), label)
            else:
                extension = next((one for one in _MAPS if lower.endswith(one)), os.path.splitext(lower)[1])
                other_files[printable(os.fsdecode(extension)) or "without extension"] += 1
