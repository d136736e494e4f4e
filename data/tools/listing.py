"""What images there are: a folder, a list or a manifest as compact arrays, without opening an image.

Paths are bytes, as the system has them, and relative to a root. A million of them take about 100 MB.
"""

import csv
import hashlib
import os
import stat
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from data.shards.tar import IMAGES, LARGEST_MEMBER

Links = Literal["inside", "all"]

NO_LABEL = -1
REASONS = {
    0: "the file is empty",
    -1: "not found",
    -2: "a symbolic link out of the folder of images; --links all follows it",
    -3: "not a regular file",
    -4: f"larger than {LARGEST_MEMBER} bytes",
    -5: "cannot be read",
}
"""what a size below 1 stands for"""
_EMPTY, _MISSING, _OUTSIDE, _IRREGULAR, _LARGE, _UNREADABLE = REASONS
_ENDINGS = tuple(b"." + ending.encode() for ending in IMAGES)


class ListingError(ValueError):
    """Images that cannot be listed. The message is meant for the user."""


@dataclass
class Listing:
    """N files that are named like images."""

    root: bytes
    """the real path that paths are relative to"""
    names: np.ndarray
    """uint8: all paths one after the other"""
    ends: np.ndarray
    """(N,) int64: where each path ends"""
    sizes: np.ndarray
    """(N,) int64: bytes, or a key of REASONS"""
    modified: np.ndarray
    """(N,) int64: nanoseconds since 1970"""
    labels: np.ndarray
    """(N,) int64: class, or -1"""
    classes: list[str] | None = None
    """names of the classes, where labels are not numbers already"""
    note: str = ""
    """where the labels come from, for the user"""
    aside: Counter[str] = field(default_factory=Counter)
    """what else lies there, by ending"""

    def __len__(self) -> int:
        return len(self.ends)

    def path(self, entry: int) -> bytes:
        """Relative path of an entry."""
        return self.names[self.ends[entry - 1] if entry else 0 : self.ends[entry]].tobytes()

    @property
    def usable(self) -> np.ndarray:
        """(M,) int64: entries that can be read, as far as their names tell."""
        return np.flatnonzero(self.sizes > 0)

    def unusable(self) -> list[tuple[int, str]]:
        """How many entries cannot be read, and why."""
        codes, counts = np.unique(self.sizes[self.sizes <= 0], return_counts=True)
        return [(int(count), REASONS[int(code)]) for code, count in zip(codes, counts, strict=True)]

    def fingerprint(self) -> str:
        """The same for the same files with the same labels, in whatever folder."""
        digest = hashlib.sha256()
        for values in (self.names, self.ends, self.sizes, self.modified, self.labels):
            digest.update(values.data)
        return digest.hexdigest()


class _Rows:
    """A listing in the making."""

    def __init__(self, root: bytes, links: Links):
        self.root, self.links = root, links
        self.names = bytearray()
        self.ends, self.sizes, self.modified, self.labels = (array("q") for _ in range(4))
        self.texts: dict[str, int] = {}  # label -> its number in the order of appearance
        self.aside: Counter[str] = Counter()

    def add(self, path: bytes, look: tuple[int, int], label: str | None) -> None:
        self.names += path
        self.ends.append(len(self.names))
        self.sizes.append(look[0])
        self.modified.append(look[1])
        self.labels.append(NO_LABEL if label is None else self.texts.setdefault(label, len(self.texts)))

    def listing(self) -> Listing:
        names = np.frombuffer(self.names, dtype=np.uint8)
        ends, sizes, modified, labels = (
            np.frombuffer(a, dtype=np.int64) for a in (self.ends, self.sizes, self.modified, self.labels)
        )
        return Listing(self.root, names, ends, sizes, modified, labels, aside=self.aside)

    def look(self, path: bytes) -> tuple[int, int]:
        """Size, or a key of REASONS, and time of the file at a path below the root."""
        try:
            status = os.lstat(path)
            if stat.S_ISLNK(status.st_mode):
                if self.links == "inside" and not inside(os.path.realpath(path), self.root):
                    return (_OUTSIDE if os.path.exists(path) else _MISSING), 0
                status = os.stat(path)
        except FileNotFoundError:
            return _MISSING, 0
        except OSError:
            return _UNREADABLE, 0
        if not stat.S_ISREG(status.st_mode):
            return _IRREGULAR, 0
        return (status.st_size if status.st_size <= LARGEST_MEMBER else _LARGE), status.st_mtime_ns


def inside(path: bytes, folder: bytes) -> bool:
    """Whether a path lies in a folder; both real."""
    return path.startswith(folder.rstrip(b"/") + b"/")


def list_folder(folder: Path, *, labels: str, links: Links, besides: Path) -> Listing:
    """Images below a folder, each folder's own first and then its folders', in the order of their names.

    Names that begin with a dot are not looked at. A symbolic link to a file counts if it leads to a place in `folder`,
    one to a folder never; with `links="all"` both count.

    Args:
        labels: "auto", "folders" or "none".
        besides: folder not to look into.

    Raises:
        ListingError: nothing there, or class folders were asked for and there are images outside of them.
    """
    rows = _Rows(os.path.realpath(os.fsencode(folder)), links)
    depths, loose = set(), b""
    for path, look in _walk(rows, os.path.realpath(os.fsencode(besides))):
        top, slash, _ = path.partition(b"/")
        if look[0] > 0:
            depths.add(path.count(b"/"))
            loose = loose or (b"" if slash else path)
        rows.add(path, look, os.fsdecode(top) if slash else None)
    listing = rows.listing()
    if not len(listing.usable):
        raise ListingError(_nothing(f"no images below {folder}", listing))
    if labels == "folders" and loose:
        raise ListingError(f"{folder}/{os.fsdecode(loose)} lies in no class folder; move it, or take --labels none")
    if labels == "folders" or (labels == "auto" and depths == {1} and len(rows.texts) > 1):
        _number(listing, rows, sorted(rows.texts, key=lambda name: (not name.isdecimal(), _value(name), name)))
        listing.note = "from the names of folders; --labels none leaves them out"
        return listing
    listing.labels = np.full(len(listing), NO_LABEL)
    listing.note = "none" if labels == "none" else f"none: {_depth(sorted(depths), folder)}"
    return listing


def _depth(depths: list[int], folder: Path) -> str:
    """Why no labels were taken from the names of folders."""
    if depths == [0]:
        return f"images lie in {folder} itself"
    if depths == [1]:
        return "images lie in one folder"
    between = f"{depths[0]} folders" if len(depths) == 1 else f"{depths[0]} to {depths[-1]} folders"
    return f"images lie {between} deep; --labels folders makes the first folder of each its class"


def _value(name: str) -> int:
    return int(name) if name.isdecimal() and len(name) < 20 else 0


def _nothing(what: str, listing: Listing) -> str:
    """Says why nothing is usable."""
    found = [f"{count:,} x {reason}" for count, reason in listing.unusable()]
    found += [f"{count:,} x {ending}" for ending, count in listing.aside.most_common(3)]
    return f"{what} ({', '.join(IMAGES)})" + (f"; there are {', '.join(found)}" if found else "")


def _walk(rows: _Rows, besides: bytes) -> Iterator[tuple[bytes, tuple[int, int]]]:
    """Path and look of all that is named like an image."""
    folders: list[tuple[bytes, tuple[tuple[int, int], ...]]] = [(b"", ())]  # with the folders they lie in
    while folders:
        prefix, above = folders.pop()
        here = os.path.join(rows.root, prefix)
        try:
            status = os.stat(here)
            identity = (status.st_dev, status.st_ino)
            if identity in above or os.path.realpath(here) == besides:  # a link upwards, or the shards
                continue
            with os.scandir(here) as entries:
                files, below = _sort_out(rows, entries)
        except OSError:
            yield prefix or b".", (_UNREADABLE, 0)
            continue
        for name, size, modified in files:
            yield prefix + name, (size, modified)
        folders += [(prefix + name + b"/", (*above, identity)) for name in reversed(below)]


def _sort_out(rows: _Rows, entries: Iterable[os.DirEntry[bytes]]) -> tuple[list[tuple[bytes, int, int]], list[bytes]]:
    """Images (name, size or reason, time) and folders of a folder, sorted; counts what is neither."""
    files, folders = [], []
    for entry in entries:
        name = entry.name
        if name.startswith(b"."):
            rows.aside["hidden"] += 1
        elif entry.is_dir(follow_symlinks=rows.links == "all"):
            folders.append(name)
        elif name.lower().endswith(_ENDINGS):
            files.append((name, *rows.look(entry.path)))
        elif entry.is_dir():
            rows.aside["links to folders"] += 1
        else:
            ending = os.path.splitext(name)[1].lower()
            rows.aside[os.fsdecode(ending) if 1 < len(ending) < 8 else "without ending"] += 1
    return sorted(files), sorted(folders)


def list_file(
    path: Path,
    *,
    root: Path | None,
    path_column: str,
    label_column: str | None,
    labels: str,
    links: Links,
) -> Listing:
    """Images that a file names: a CSV or Parquet manifest, or a list with a path and perhaps a tab and a label a line.

    Paths are relative to `root`, which is the file's own folder when not given, and may not lead out of it.

    Raises:
        ListingError: an unreadable file, a missing column, a path outside of the root or there twice, mixed labels.
    """
    if labels == "folders":
        raise ListingError(f"--labels folders is for a folder of images; {path} names its labels itself, or has none")
    folder = os.path.realpath(os.fsencode(root or path.parent))
    rows = _Rows(folder, links)
    for number, (name, label) in enumerate(_lines(path, path_column, label_column), 1):
        full = os.path.normpath(os.path.join(folder, os.fsencode(name)))
        if not inside(full, folder) or b"\0" in full:
            raise ListingError(
                f"{path}: entry {number}, {name!r}, lies outside of {os.fsdecode(folder)}; give --root FOLDER"
            )
        rows.add(os.path.relpath(full, folder), rows.look(full), label or None)
    listing = rows.listing()
    if not len(listing.usable):
        raise ListingError(_nothing(f"{path} names no images that are there, below {os.fsdecode(folder)}", listing))
    _refuse_twice(listing, path)
    if labels == "none" or not rows.texts:
        listing.labels = np.full(len(listing), NO_LABEL)
        listing.note = "none" if labels == "none" else f"none in {path.name}{_named(path, label_column)}"
        return listing
    numbers = {text: _class_number(text) for text in rows.texts}
    if all(number is not None for number in numbers.values()):
        table = np.array([*numbers.values(), NO_LABEL], dtype=np.int64)  # the last one for -1
        if len(numbers) and table[:-1].min() < 0:
            raise ListingError(f"{path}: a label is below 0; leave the field empty where there is no label")
        listing.labels = table[listing.labels]
        listing.note = f"numbers in {path.name}"
    else:
        _number(listing, rows, sorted(rows.texts))
        listing.note = f"names in {path.name}"
    return listing


def _named(path: Path, label_column: str | None) -> str:
    """How labels of a manifest are named, where a column is not called so."""
    return "" if label_column or path.suffix == ".txt" else "; --label_column COLUMN takes them from another column"


def _refuse_twice(listing: Listing, path: Path) -> None:
    digests = [hashlib.blake2b(listing.path(entry), digest_size=8).digest() for entry in range(len(listing))]
    keys = np.frombuffer(b"".join(digests), dtype=np.uint64)
    order = np.argsort(keys, kind="stable")
    if len(twice := np.flatnonzero(keys[order][1:] == keys[order][:-1])):
        name = os.fsdecode(listing.path(int(order[twice[0]])))
        raise ListingError(f"{path}: {len(twice):,} paths are there again, the first {name}; name each image once")


def _class_number(text: str) -> int | None:
    """An integer, also as pandas writes it beside missing ones: 3.0."""
    text = text.removesuffix(".0")
    return int(text) if text.lstrip("-").isdecimal() and len(text) < 19 else None


def _number(listing: Listing, rows: _Rows, classes: list[str]) -> None:
    """Gives classes their numbers."""
    numbers = {name: number for number, name in enumerate(classes)}
    listing.labels = np.array([*(numbers[text] for text in rows.texts), NO_LABEL], dtype=np.int64)[listing.labels]
    listing.classes = classes


def renumber(listing: Listing, classes: list[str]) -> None:
    """Takes the numbers of another data set's classes.

    Raises:
        ListingError: labels are not names, or one of them is not among `classes`.
    """
    if listing.classes is None:
        raise ListingError("--classes numbers the names of classes, and there are none; leave it out")
    if unknown := sorted(set(listing.classes) - set(classes)):
        raise ListingError(f"class {unknown[0]!r} is not in --classes ({len(unknown)} such); add it at the end there")
    numbers = {name: number for number, name in enumerate(classes)}
    listing.labels = np.array([*(numbers[name] for name in listing.classes), NO_LABEL])[listing.labels]
    listing.classes = classes


def _lines(path: Path, path_column: str, label_column: str | None) -> Iterator[tuple[str, str | None]]:
    """Path and label of each entry of a file."""
    try:
        if path.suffix.lower() == ".csv":
            yield from _csv(path, path_column, label_column)
        elif path.suffix.lower() == ".parquet":
            yield from _parquet(path, path_column, label_column)
        else:
            with path.open(encoding="utf-8", errors="surrogateescape") as lines:
                for line in lines:
                    name, _, label = line.rstrip("\r\n").partition("\t")
                    if name:
                        yield name, label.strip()
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        raise ListingError(f"cannot read {path}: {error}") from error


def _columns(there: list[str], path: Path, path_column: str, label_column: str | None) -> tuple[str, str | None]:
    """The columns to read: `label` only where it is there or was asked for by name."""
    for name, flag in ((path_column, "--path_column"), (label_column, "--label_column")):
        if name is not None and name not in there:
            raise ListingError(f"{path} has no column {name!r}; {flag} is one of {', '.join(map(repr, there))}")
    return path_column, label_column or ("label" if "label" in there else None)


def _csv(path: Path, path_column: str, label_column: str | None) -> Iterator[tuple[str, str | None]]:
    with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        rows = csv.reader(file)
        there = next(rows, [])
        names = _columns(there, path, path_column, label_column)
        place, label = there.index(names[0]), None if names[1] is None else there.index(names[1])
        for row in rows:
            if not row:
                continue
            if len(row) != len(there):
                raise ListingError(f"{path}: line {rows.line_num} has {len(row)} fields, its heading {len(there)}")
            yield row[place], None if label is None else row[label].strip()


def _parquet(path: Path, path_column: str, label_column: str | None) -> Iterator[tuple[str, str | None]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ListingError(f'{path}: Parquet needs pyarrow: pip install "tessera-ssl[parquet]"') from None
    try:
        with parquet.ParquetFile(path) as file:
            names = _columns(file.schema_arrow.names, path, path_column, label_column)
            columns = [name for name in names if name is not None]
            for batch in file.iter_batches(columns=columns):
                paths = batch.column(names[0]).to_pylist()
                labels = [None] * len(paths) if names[1] is None else batch.column(names[1]).to_pylist()
                for name, label in zip(paths, labels, strict=True):
                    if not isinstance(name, str):
                        raise ListingError(f"{path}: column {names[0]!r} holds {name!r}, not a path")
                    yield name, None if label is None else str(label)
    except ArrowException as error:
        raise ListingError(f"cannot read {path}: {error}") from error
