"""List of the image files in a folder, stored as compact arrays. No image is opened.

Paths are relative to a root folder, and are stored as bytes, as in the file system. A million paths take about 100 MB.
"""

import hashlib
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tessera.data.failures import ShardError, is_exhausted
from tessera.data.shards.index import composed
from tessera.data.shards.notes import (
    BARE,
    HIDDEN,
    LOCKED,
    LOST,
    MASK,
    OTHER_IMAGES,
    UNUSABLE,
    Note,
)
from tessera.data.shards.tar_index import ARRAYS, IMAGES, LARGEST_MEMBER, MAPS
from tessera.runtime.user_error import printable

TRAINING_SETS = {"train", "training"}
SETS = {*TRAINING_SETS, "val", "valid", "validation", "test", "testing", "dev", "eval"}
OF_IMAGES = {b"image", b"images", b"img", b"imgs", b"jpegimages", b"photos"}
OF_MASKS = {b"mask", b"masks", b"label", b"labels", b"annotation", b"annotations", b"segmentation", b"gt"}
"""Names of folders. A folder of `OF_MASKS` beside a folder of `OF_IMAGES` probably holds maps of the images."""
NO_LABEL = -1
EMPTY, MISSING, IRREGULAR, LARGE, UNREADABLE, UNLABELLED, EXCLUDED = range(0, -7, -1)
REASONS = {
    EMPTY: "the file is empty",
    MISSING: "not found",
    IRREGULAR: "not a regular file",
    LARGE: f"larger than {LARGEST_MEMBER} bytes",
    UNREADABLE: "cannot be read",
    UNLABELLED: "without a label",
    EXCLUDED: "named by --exclude",
}
"""Maps a code to the reason why a file is left out. `Listing.sizes` and `Maps.sizes` contain the code in place of the
size."""
SYSTEM_FILES = (b".ds_store", b"thumbs.db", b"desktop.ini", b"index.json", b"classes.json")
"""Names of files of operating systems and of this program. They are left out without a note."""
_MASK = re.compile(
    rb"(.+)[ _.-](?:masks?|seg|segmentation|labels?|gt|groundtruth|annotations?)(?:[ _.-]?[0-9]+)?"
    rb"|(?:mask|label|gt)[ _-](.+)"
)
"""Name of a file, without its extension, that is probably a map of the image that a group names."""
_MAPS = tuple(b"." + name.encode() for name in MAPS)


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
    found: list[Note] = field(default_factory=list)
    """Notes on the files. The group of a note is the first folder of the paths."""
    classes: list[str] | None = None
    """Names of the classes; None if labels have no names."""
    maps: Maps | None = None
    """Maps of the files; None if no file has a map."""

    @classmethod
    def of(cls, root: bytes, files: Iterable[File]) -> "Listing":
        """Return a listing of `files`, which the function iterates over once."""
        texts: dict[str, int] = {}
        names, facts = bytearray(), []
        for file in files:
            names += file.path
            label = NO_LABEL if file.label is None else texts.setdefault(file.label, len(texts))
            facts.append((len(names), file.size, file.modified, label))
        columns = np.array(facts, dtype=np.int64).reshape(-1, 4).T.copy()
        return cls(root, np.frombuffer(names, dtype=np.uint8), *columns, list(texts))

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
        """Renumber the labels: an index into `texts` becomes the index of the same text in `classes`.

        Texts are compared in Unicode's form NFC. Texts that are equal in this form are one class.
        """
        classes = list(dict.fromkeys(map(composed, classes)))
        numbers = {name: number for number, name in enumerate(classes)}
        known = [numbers[composed(text)] for text in self.texts]
        self.labels = np.array([*known, NO_LABEL], dtype=np.int64)[self.labels]
        self.texts = self.classes = classes

    def notes(self) -> list[Note]:
        """Return notes on the files that are left out, and on files that may not be images of their class."""
        named = [note if self.classes else note._replace(group="") for note in self.found if note.kind != LOST]
        classes = [note for note in self.found if note.kind == LOST and self.classes]
        left_out = []
        # `manifest.add_labels` names the images that have no label in the manifest
        for code in np.unique(self.sizes[(self.sizes <= 0) & (self.sizes != UNLABELLED)]).tolist():
            entries = np.flatnonzero(self.sizes == code)
            first = os.fsdecode(self.path(int(entries[0])))
            left_out.append(Note(UNUSABLE, len(entries), first, REASONS[code]))
        return [*left_out, *named, *classes]

    def class_counts(self) -> tuple[tuple[str, int], ...]:
        """Return (name, number of usable images) of each class; nothing if the classes have no names."""
        labels = self.labels[self.usable]
        counts = np.bincount(labels[labels >= 0], minlength=len(self.classes or ()))
        return tuple((name, int(count)) for name, count in zip(self.classes or (), counts, strict=False))

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
        cure = " Convert them to PNG." if {f".{one}" for one in OTHER_IMAGES} & self.other_files.keys() else ""
        raise ShardError(f"{message}. File names of images end in {', '.join((*IMAGES, *ARRAYS))}.{instead}{cure}")


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


def _set_of(name: str) -> tuple[str, ...] | None:
    """Return the words of a folder name without the word that names a set, such as () for `train2017`.

    Return None if the name has no such word.
    """
    words = re.findall("[a-z]+", name.lower())
    return tuple(word for word in words if word not in SETS) if SETS & {*words} else None


def _refuse_separate_sets(folder: Path) -> None:
    """Raise `ShardError` if a folder has a subfolder for training images and another one for held-out images."""
    found = [(path.name, _set_of(path.name)) for path in sorted(folder.iterdir()) if path.is_dir()]
    for training in (name for name, rest in found if rest is not None and _trains(name)):
        names = [name for name, rest in found if rest == _set_of(training)]
        if not all(map(_trains, names)):
            raise ShardError(
                f"{folder} holds the folders {', '.join(names)}, which look like separate sets of images, not like "
                f"classes. Give one of these folders, for example {folder / training}. To make shards from all images, "
                "run `tessera make_shards` with --labels none, or with --labels folders if these folders are classes."
            )


def _trains(name: str) -> bool:
    return bool(TRAINING_SETS & {*re.findall("[a-z]+", name.lower())})


def list_folder(folder: Path, *, labels: str, besides: Path | None = None, manifest: Path | None = None) -> Listing:
    """List the images in a folder and its subfolders, sorted by name.

    The images of a folder come before the images of its subfolders. Files and folders whose names begin with a dot are
    skipped. Symbolic links are followed.

    Args:
        folder: folder of images.
        labels: "folders" makes the first folder of each path the class of the image. "none" assigns no labels. "auto"
            chooses "folders" if all images are exactly one folder deep and there are several folders, otherwise "none".
            "auto" refuses a folder with subfolders such as train and val.
        besides: subfolder to skip; None to skip no subfolder.
        manifest: file with the labels, which is not counted if it is in the folder.

    Raises:
        ShardError: there are no images; `labels` is "folders" and an image is not in a class folder; or `labels` is
            "auto" and subfolders look like separate sets.
    """
    if labels == "auto":
        _refuse_separate_sets(folder)
    root = os.path.realpath(os.fsencode(folder))
    skipped = [None if one is None else os.path.realpath(os.fsencode(one)) for one in (besides, manifest)]
    walk = _Walk(root, IMAGES, *skipped)
    listing = Listing.of(root, walk.files())
    if not len(listing) and any(walk.other_files[f".{extension}"] for extension in ARRAYS):
        walk = _Walk(root, ARRAYS, *skipped)
        listing = Listing.of(root, walk.files())
    listing.other_files = walk.other_files
    listing.refuse_empty(f"no images below {folder}")
    paths = [listing.path(int(entry)) for entry in listing.usable]
    depths = sorted({path.count(b"/") for path in paths})
    if labels == "folders" and depths[0] == 0:
        loose = printable(os.fsdecode(next(path for path in paths if b"/" not in path)))
        raise ShardError(f"{folder}/{loose} is not in a class folder. Move it to a class folder, or use --labels none.")
    listing.found, unread = walk.notes(), walk.unread_classes()
    names = {*listing.texts, *unread}
    if labels == "folders" or (labels == "auto" and depths == [1] and len(names) > 1):
        read = {os.fsdecode(path.partition(b"/")[0]) for path in paths}
        listing.found += [Note(LOST, 1, group=name) for name in sorted({*walk.folders, *names} - read)]
        listing.number_classes(sorted(names, key=class_order))
        return listing
    listing.labels = np.full(len(listing), NO_LABEL)
    return listing


def class_order(name: str) -> tuple[bool, int, str]:
    """Return the sort key of a class name. Names that are numbers come first, in the order of the numbers."""
    return not name.isdecimal(), int(name) if name.isdecimal() and len(name) < 20 else 0, name


def holds_files(folder: str, extensions: Sequence[str]) -> bool:
    """Return True if a folder or one of its subfolders has a file with one of these extensions. Links are followed."""
    walk = _Walk(os.path.realpath(os.fsencode(folder)), extensions, None, None)
    return next(walk.files(), None) is not None


class _Walk:
    """Walk through a folder of images, and count the files that are not images.

    Args:
        root: folder of images, without symbolic links.
        extensions: file name extensions of images.
        besides: subfolder to skip; None to skip no subfolder.
        manifest: file that is not counted; None for no such file.
    """

    def __init__(self, root: bytes, extensions: Sequence[str], besides: bytes | None, manifest: bytes | None):
        self._endings = tuple(b"." + extension.encode() for extension in extensions)
        self._root, self._besides, self._manifest = root, besides, manifest
        self.other_files = Counter[str]()
        self.folders: list[str] = []
        """Names of the folders in the root folder."""
        self._notes: dict[tuple[str, str], list[Any]] = {}  # kind and first folder -> number of files, first file

    def notes(self) -> list[Note]:
        """Return notes on the files that have been seen."""
        return [Note(kind, count, first, group) for (kind, group), (count, first) in self._notes.items()]

    def unread_classes(self) -> set[str]:
        """Return the names of the folders in the root folder that hold images of other formats."""
        others = {f".{extension}" for extension in OTHER_IMAGES}
        return {group for kind, group in self._notes if kind in others and group}

    def files(self) -> Iterator[File]:
        """Yield the images, labelled by the first folder of their paths. Count all other files."""
        parents = {self._root: {self._root}}  # folder to be visited -> real paths of the folder and of its parents
        masks: set[bytes] = set()  # folders that probably hold maps
        for here, folders, names in os.walk(self._root, followlinks=True, onerror=self._refuse):
            above, found = parents.pop(here), sorted(name for name in folders if not name.startswith(b"."))
            hidden = sorted(name for name in (*folders, *names) if name.startswith(b"."))
            folders.clear()
            of_images = any(name.lower() in OF_IMAGES for name in found)
            for path in (os.path.join(here, name) for name in found):
                folder, name = os.path.realpath(path), os.path.basename(path)
                if folder not in above and folder != self._besides:  # a link to a parent folder would never end
                    parents[path] = above | {folder}
                    folders.append(name)
                    if here in masks or (of_images and name.lower() in OF_MASKS):
                        masks.add(path)
            prefix = os.path.join(os.path.relpath(here, self._root), b"") if here != self._root else b""
            if here == self._root:
                self.folders = [os.fsdecode(name) for name in folders]
            label = os.fsdecode(prefix.partition(b"/")[0]) if prefix else None
            shown = sorted(name for name in names if not name.startswith(b"."))
            images = [
                name for name in shown if (low := name.lower()).endswith(self._endings) and not low.endswith(_MAPS)
            ]
            for name in images:
                yield File(prefix + name, *file_facts(os.path.join(here, name)), label)
            self._note_images(prefix, images, label, here in masks)
            for name in sorted({*shown}.difference(images)):
                self._note_other(prefix + name, name.lower(), label)
            for name in hidden:
                if name.lower() not in SYSTEM_FILES:
                    self._note(HIDDEN, prefix + name, label)

    def _refuse(self, error: OSError) -> None:
        _refuse_exhausted(error)
        self.other_files["folders that cannot be read"] += 1
        self._note(LOCKED, os.path.relpath(error.filename, self._root), None)

    def _note_images(self, prefix: bytes, images: list[bytes], label: str | None, masks: bool) -> None:
        """Note the images of one folder that may be maps of other images, by their names."""
        stems = [os.path.splitext(name.lower())[0] for name in images]
        every = {*stems}
        for name, stem in zip(images, stems, strict=True):
            matched = _MASK.fullmatch(stem)
            if masks or (matched and (matched[1] or matched[2]) in every):
                self._note(MASK, prefix + name, label)

    def _note_other(self, path: bytes, lower: bytes, label: str | None) -> None:
        """Count a file that is not an image."""
        found = next((one for one in _MAPS if lower.endswith(one)), None)
        extension = printable(os.fsdecode(found or os.path.splitext(lower)[1]))
        self.other_files[extension or "without extension"] += 1
        of_system = os.path.basename(lower) in SYSTEM_FILES or os.path.join(self._root, path) == self._manifest
        if found is None and not of_system:
            self._note(extension or BARE, path, label)

    def _note(self, kind: str, path: bytes, label: str | None) -> None:
        count = self._notes.setdefault((kind, label or ""), [0, os.fsdecode(path)])
        count[0] += 1
