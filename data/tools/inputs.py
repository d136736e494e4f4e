"""Images of which shards are made: those that a list (.txt) or a manifest (.csv, .parquet) names, their segmentation
maps, and the class numbers of other shards."""

import csv
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tessera.data.shards.errors import ShardError
from tessera.data.shards.listing import (
    MISSING,
    NO_LABEL,
    File,
    Listing,
    Maps,
    file_facts,
    inside,
)
from tessera.data.shards.tar import LARGEST_LABEL, MAP
from tessera.runtime.errors import printable

Row = tuple[str, str | None]
"""Path of an image, and its label (None if the image has no label)."""


@dataclass(frozen=True)
class Columns:
    """Names of the manifest columns that hold the paths and the labels."""

    path: str = "path"
    label: str | None = None
    """Column of the labels. None means the column `label` if the manifest has one, and no labels otherwise."""

    def choose(self, available: list[str], file: Path) -> tuple[str, str | None]:
        """Return the names of the columns to read.

        Raises:
            ShardError: one of the columns does not exist.
        """
        for name, flag in ((self.path, "--path_column"), (self.label, "--label_column")):
            if name is not None and name not in available:
                columns = ", ".join(map(repr, available))
                raise ShardError(f"{file} has no column {name!r}. Set {flag} to one of {columns}.")
        return self.path, self.label or ("label" if "label" in available else None)


def list_file(path: Path, *, root: Path | None, columns: Columns, labels: str) -> Listing:
    """List the images that a list or manifest names.

    A list has one path per line, optionally followed by a tab and a label. All paths must lie in the root folder.

    Args:
        path: a list, or a CSV or Parquet manifest.
        root: root folder, to which the paths are relative; None for the folder of the list or manifest.
        columns: columns of a manifest that hold the paths and labels.
        labels: "auto" reads the labels, and "none" ignores them.

    Raises:
        ShardError: the list or manifest cannot be read or names no images, a column is missing, a path lies outside the
            root folder or occurs twice, a label is negative, or `labels` is "folders".
    """
    if labels == "folders":
        raise ShardError(
            f"--labels folders is for a folder of images, but {path} is a list or manifest. Leave --labels out."
        )
    folder = os.path.realpath(os.fsencode(root or path.parent))
    listing = Listing.of(folder, _files(path, folder, columns))
    listing.refuse_empty(f"{path} names no existing images below {os.fsdecode(folder)}")
    _refuse_repeated(listing, path)
    _set_labels(listing, path, labels)
    return listing


def _files(path: Path, folder: bytes, columns: Columns) -> Iterator[File]:
    for number, (name, label) in enumerate(_rows(path, columns), 1):
        full = os.path.normpath(os.path.join(folder, os.fsencode(name)))
        if not inside(full, folder) or b"\0" in full:
            raise ShardError(
                f"{path}: entry {number}, {name!r}, is outside of the root folder {os.fsdecode(folder)}. "
                "Use --root FOLDER to name a folder that contains all entries."
            )
        yield File(os.path.relpath(full, folder), *file_facts(full), label or None)


def _set_labels(listing: Listing, path: Path, labels: str) -> None:
    """Replace each label, which is an index into `listing.texts`, by the class number of this text."""
    if labels == "none" or not listing.texts:
        listing.labels = np.full(len(listing), NO_LABEL)
        listing.note = "none" if labels == "none" else f"none in {path.name}"
        return
    numbers = [_class_number(text) for text in listing.texts]
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers):
        listing.number_classes(sorted(listing.texts))
        listing.note = f"names in {path.name}"
        return
    if min(known) < 0:
        raise ShardError(f"{path}: a label is below 0. If an image has no label, leave the field empty.")
    if max(known) > LARGEST_LABEL:
        raise ShardError(
            f"{path}: the label {max(known)} is more than {LARGEST_LABEL}. Number the classes from 0, without gaps."
        )
    listing.labels = np.array([*known, NO_LABEL], dtype=np.int64)[listing.labels]
    listing.note = f"numbers in {path.name}"


def _refuse_repeated(listing: Listing, path: Path) -> None:
    counts = Counter(map(listing.path, range(len(listing))))
    if repeated := [name for name, count in counts.items() if count > 1]:
        first = printable(os.fsdecode(repeated[0]))
        raise ShardError(f"{path}: {len(repeated):,} paths are repeated, the first is {first}. Name each image once.")


def _class_number(text: str) -> int | None:
    """Return the integer in a text; None for other texts. `3.0` counts as 3, because pandas may write `3.0` for 3."""
    text = text.removesuffix(".0")
    return int(text) if text.lstrip("-").isdecimal() and len(text) < 19 else None


def _rows(path: Path, columns: Columns) -> Iterator[Row]:
    """Yield the path and the label of each entry of a list or manifest."""
    try:
        if path.suffix.lower() == ".csv":
            yield from _csv_rows(path, columns)
        elif path.suffix.lower() == ".parquet":
            yield from _parquet_rows(path, columns)
        else:
            with path.open(encoding="utf-8", errors="surrogateescape") as lines:
                for line in lines:
                    name, _, label = line.rstrip("\r\n").partition("\t")
                    if name:
                        yield name, label.strip()
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        raise ShardError(f"cannot read {path}: {error}. Correct the file.") from error


def _csv_rows(path: Path, columns: Columns) -> Iterator[Row]:
    with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        rows = csv.DictReader(file, restval=None)
        name, label = columns.choose(list(rows.fieldnames or []), path)
        for row in rows:
            if None in row or None in row.values():
                raise ShardError(
                    f"{path}: line {rows.line_num} and the heading have different numbers of fields. Correct the line."
                )
            yield row[name], None if label is None else row[label].strip()


def _parquet_rows(path: Path, columns: Columns) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ShardError(f'{path}: Parquet needs pyarrow. Install it: pip install "tessera-ssl[parquet]"') from None
    try:
        with parquet.ParquetFile(path) as file:
            names = columns.choose(file.schema_arrow.names, path)
            for batch in file.iter_batches(columns=[name for name in names if name is not None]):
                paths = batch.column(names[0]).to_pylist()
                labels = [None] * len(paths) if names[1] is None else batch.column(names[1]).to_pylist()
                for name, label in zip(paths, labels, strict=True):
                    if not isinstance(name, str):
                        raise ShardError(
                            f"{path}: column {names[0]!r} holds {name!r}, not a path. "
                            "Set --path_column to the column of the paths."
                        )
                    yield name, None if label is None else str(label)
    except ArrowException as error:
        raise ShardError(f"cannot read {path}: {error}. Correct the file.") from error


def find_maps(listing: Listing, folder: Path | None) -> None:
    """Find the segmentation maps of all usable images, and store them in `listing.maps`.

    Args:
        listing: list of the images.
        folder: folder of maps, in which the map of the image a/x.jpg is a/x.png. None if the map is a/x.seg.png, in the
            folder of the image.

    Raises:
        ShardError: `folder` is not a folder, lies in the folder of images, or holds no map of an image.
    """
    root = listing.root
    if folder is not None:
        root = os.path.realpath(os.fsencode(folder))
        if not os.path.isdir(root):
            raise ShardError(f"--maps {folder} is not a folder. Name the folder that holds the segmentation maps.")
        if root == listing.root or inside(root, listing.root):
            raise ShardError(
                f"--maps {folder} lies in the folder of images, where its files count as images. Move it to another "
                f"folder, or name the maps KEY.{MAP}, put them beside the images, and leave --maps out."
            )
    sizes, modified = np.full(len(listing), MISSING), np.zeros(len(listing), dtype=np.int64)
    maps = Maps(root, b"." + MAP.encode() if folder is None else b".png", sizes, modified)
    for entry in map(int, listing.usable):
        sizes[entry], modified[entry] = file_facts(os.path.join(root, maps.path(listing.path(entry))))
    found = int((sizes != MISSING).sum())
    if found:
        listing.maps = maps
    elif folder is not None:
        example = printable(os.fsdecode(os.path.join(root, maps.path(listing.path(int(listing.usable[0]))))))
        raise ShardError(f"--maps {folder} holds no map of an image. The first map would be {example}.")
    if folder is None:
        listing.other_files.pop(f".{MAP}", None)


def renumber(listing: Listing, classes: list[str]) -> None:
    """Replace the class numbers by those of another data set, whose class names in order are `classes`.

    Raises:
        ShardError: the labels have no names, or a class name is missing from `classes`.
    """
    if listing.classes is None:
        raise ShardError("--classes needs labels with names, but these labels have no names. Leave --classes out.")
    if unknown := sorted(set(listing.classes) - set(classes)):
        raise ShardError(
            f"class {unknown[0]!r} is not in --classes ({len(unknown)} classes are missing). Add the missing classes "
            "at the end of the file."
        )
    listing.number_classes(classes)
