"""Inputs of `data.make_shards`: the images in a list (.txt) or a manifest (.csv, .parquet), maps, and the class
numbers of other shards."""

import csv
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from tessera.data.shards.failures import ShardError
from tessera.data.shards.listing import MISSING, NO_LABEL, File, Listing, Maps, file_facts
from tessera.data.shards.tar import LARGEST_LABEL, MAPS, whole_number
from tessera.runtime.user_error import printable

Row = tuple[str, str | None]
"""Path of an image, and its label (None if the image has no label)."""


def list_file(path: Path, *, root: Path | None, labels: str) -> Listing:
    """List the images in a list or manifest.

    A list has one path per line, optionally followed by a tab and a label. All paths must lie in the root folder.

    Args:
        path: a list, or a CSV or Parquet manifest with a column `path` and optionally a column `label`.
        root: root folder, to which the paths are relative; None for the folder of the list or manifest.
        labels: "auto" reads the labels, and "none" ignores them.

    Raises:
        ShardError: the list or manifest cannot be read or contains no existing images; a column is missing; a path lies
            outside the root folder or occurs twice; a label is negative or too large; or `labels` is "folders".
    """
    if labels == "folders":
        raise ShardError(
            f"--labels folders is for a folder of images, but {path} is a list or manifest. Leave --labels out."
        )
    folder = os.path.realpath(os.fsencode(root or path.parent))
    listing = Listing.of(folder, _files(path, folder))
    listing.refuse_empty(f"{path} lists no existing images below {os.fsdecode(folder)}")
    _set_labels(listing, path, labels)
    return listing


def _files(path: Path, folder: bytes) -> Iterator[File]:
    seen = set()
    for number, (name, label) in enumerate(_rows(path), 1):
        full = os.path.normpath(os.path.join(folder, os.fsencode(name)))
        if os.path.commonpath([full, folder]) != folder or b"\0" in full:
            raise ShardError(
                f"{path}: entry {number}, {name!r}, is outside the root folder {os.fsdecode(folder)}. "
                "Set --root to a folder that contains all entries."
            )
        if full in seen:
            raise ShardError(f"{path}: entry {number}, {name!r}, is repeated. List each image once.")
        seen.add(full)
        yield File(os.path.relpath(full, folder), *file_facts(full), label or None)


def _set_labels(listing: Listing, path: Path, labels: str) -> None:
    """Replace the labels, which are indices into `listing.texts`, by class numbers."""
    if labels == "none" or not listing.texts:
        listing.labels = np.full(len(listing), NO_LABEL)
        return
    numbers = [_class_number(text) for text in listing.texts]
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers):
        listing.number_classes(sorted(listing.texts))
        return
    if min(known) < 0:
        raise ShardError(f"{path}: a label is below 0. If an image has no label, leave the field empty.")
    if max(known) > LARGEST_LABEL:
        raise ShardError(
            f"{path}: the label {max(known)} is more than {LARGEST_LABEL}. Number the classes from 0, without gaps."
        )
    listing.labels = np.array([*known, NO_LABEL], dtype=np.int64)[listing.labels]


def _class_number(text: str) -> int | None:
    """Return the integer in a text, or None if the text is not an integer.

    `3.0` counts as 3, because pandas may write `3.0` for 3.
    """
    return whole_number(os.fsencode(text.removesuffix(".0")))


def _rows(path: Path) -> Iterator[Row]:
    """Yield the path and the label of each entry of a list or manifest."""
    try:
        if path.suffix.lower() == ".csv":
            yield from _csv_rows(path)
        elif path.suffix.lower() == ".parquet":
            yield from _parquet_rows(path)
        else:
            with path.open(encoding="utf-8", errors="surrogateescape") as lines:
                for line in lines:
                    name, _, label = line.rstrip("\r\n").partition("\t")
                    if name:
                        yield name, label.strip()
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        raise ShardError(f"cannot read {path}: {error}. Correct the file.") from error


def _csv_rows(path: Path) -> Iterator[Row]:
    with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        rows = csv.DictReader(file, restval=None)
        _refuse_columns(path, rows.fieldnames or ())
        for row in rows:
            if None in row or None in row.values():
                raise ShardError(
                    f"{path}: line {rows.line_num} and the header have different numbers of fields. Correct the line."
                )
            yield row["path"], row.get("label", "").strip()


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ShardError(f'{path}: Parquet needs pyarrow. Install it: pip install "tessera-ssl[parquet]"') from None
    try:
        with parquet.ParquetFile(path) as file:
            _refuse_columns(path, file.schema_arrow.names)
            for batch in file.iter_batches(columns=["path", "label"]):
                for row in batch.to_pylist():
                    label = row.get("label")
                    yield str(row["path"]), None if label is None else str(label)
    except ArrowException as error:
        raise ShardError(f"cannot read {path}: {error}. Correct the file.") from error


def _refuse_columns(path: Path, names: Sequence[str]) -> None:
    if "path" not in names:
        raise ShardError(
            f"{path} has no column 'path'. Columns of the file: {', '.join(map(repr, names)) or 'none'}. "
            "Rename the column with the paths."
        )


def find_maps(listing: Listing, folder: Path | None) -> None:
    """Find the maps of all usable images, and store them in `listing.maps`.

    Args:
        listing: list of the images.
        folder: folder of maps, in which the map of the image a/x.jpg is a/x.png or a/x.npy. None if the map is
            a/x.seg.png, a/x.depth.png or a/x.depth.npy, in the folder of the image.

    Raises:
        ShardError: `folder` is not a folder, or holds no map of any image; or there are maps of several kinds.
    """
    root = listing.root
    if folder is not None:
        root = os.path.realpath(os.fsencode(folder))
        if not os.path.isdir(root):
            raise ShardError(f"--maps {folder} is not a folder. Give the folder that holds the maps.")
    suffixes = [".png", ".npy"]
    if folder is None:
        every = [f".{name}" for name in MAPS]
        suffixes = [one for one in every if one in listing.other_files] or every
    found: list[Maps] = []
    for suffix in suffixes:
        sizes, modified = np.full(len(listing), MISSING), np.zeros(len(listing), dtype=np.int64)
        maps = Maps(root, suffix.encode(), sizes, modified)
        for entry in map(int, listing.usable):
            sizes[entry], modified[entry] = file_facts(os.path.join(root, maps.path(listing.path(entry))))
        found += [maps] if (sizes != MISSING).any() else []
    if len(found) > 1:
        kinds = " and ".join(maps.suffix.decode() for maps in found)
        raise ShardError(
            f"There are maps with the suffixes {kinds}, but a sample holds one map. Move the maps of each kind to a "
            "folder, and make shards for each kind with --maps."
        )
    if found:
        listing.maps = found[0]
    elif folder is not None:
        name = os.path.splitext(listing.path(int(listing.usable[0])))[0] + b".png"
        example = printable(os.fsdecode(os.path.join(root, name)))
        raise ShardError(
            f"--maps {folder} holds no map of any image. The map of the first image would be {example}. "
            "Give the folder that holds the maps."
        )
    if folder is None:
        for suffix in suffixes:
            listing.other_files.pop(suffix, None)


def renumber(listing: Listing, classes: list[str]) -> None:
    """Renumber the classes: the new number of a class is the index of its name in `classes`.

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
