"""Listing of the image files that a list (.txt) or a manifest (.csv, .parquet) names."""

import csv
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tessera.data.shards.listing import NO_LABEL, Links, Listing, ListingBuilder, describe_empty, inside, number_classes
from tessera.data.shards.tar import LARGEST_LABEL
from tessera.data.tools.command import MakeError
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
            MakeError: one of the columns does not exist.
        """
        for name, flag in ((self.path, "--path_column"), (self.label, "--label_column")):
            if name is not None and name not in available:
                columns = ", ".join(map(repr, available))
                raise MakeError(f"{file} has no column {name!r}. Set {flag} to one of {columns}.")
        return self.path, self.label or ("label" if "label" in available else None)


def list_file(path: Path, *, root: Path | None, columns: Columns, labels: str, links: Links) -> Listing:
    """List the images that a list or manifest names.

    A list has one path per line, optionally followed by a tab and a label. All paths must lie in the root folder.

    Args:
        path: a list, or a CSV or Parquet manifest.
        root: root folder, to which the paths are relative; None for the folder of the list or manifest.
        columns: columns of a manifest that hold the paths and labels.
        labels: "auto" reads the labels, and "none" ignores them.
        links: "inside" follows a symbolic link if it leads to a file in the root folder, and "all" follows all links.

    Raises:
        MakeError: the list or manifest cannot be read or names no images, a column is missing, a path lies outside the
            root folder or occurs twice, a label is negative, or `labels` is "folders".
    """
    if labels == "folders":
        raise MakeError(
            f"--labels folders is for a folder of images, but {path} is a list or manifest. Leave --labels out."
        )
    folder = os.path.realpath(os.fsencode(root or path.parent))
    builder = ListingBuilder(folder, links)
    for number, (name, label) in enumerate(_rows(path, columns), 1):
        full = os.path.normpath(os.path.join(folder, os.fsencode(name)))
        if not inside(full, folder) or b"\0" in full:
            raise MakeError(
                f"{path}: entry {number}, {name!r}, is outside of the root folder {os.fsdecode(folder)}. "
                "Use --root FOLDER to name a folder that contains all entries."
            )
        builder.add(os.path.relpath(full, folder), builder.stat(full), label or None)
    listing = builder.build()
    if not len(listing.usable):
        raise MakeError(describe_empty(f"{path} names no existing images below {os.fsdecode(folder)}", listing))
    _refuse_repeated(listing, path)
    _set_labels(listing, list(builder.texts), path, labels, columns)
    return listing


def _set_labels(listing: Listing, texts: list[str], path: Path, labels: str, columns: Columns) -> None:
    """Replace each label, which is an index into `texts`, by the class number of this text."""
    if labels == "none" or not texts:
        listing.labels = np.full(len(listing), NO_LABEL)
        listing.note = "none"
        if labels != "none":
            listing.note = f"none in {path.name}"
            if columns.label is None and path.suffix != ".txt":
                listing.note += "; --label_column COLUMN takes them from another column"
        return
    numbers = [_class_number(text) for text in texts]
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers):
        number_classes(listing, texts, sorted(texts))
        listing.note = f"names in {path.name}"
        return
    if min(known) < 0:
        raise MakeError(f"{path}: a label is below 0. If an image has no label, leave the field empty.")
    if max(known) > LARGEST_LABEL:
        raise MakeError(
            f"{path}: the label {max(known)} is more than {LARGEST_LABEL}. Number the classes from 0, without gaps."
        )
    listing.labels = np.array([*known, NO_LABEL], dtype=np.int64)[listing.labels]
    listing.note = f"numbers in {path.name}"


def _refuse_repeated(listing: Listing, path: Path) -> None:
    digests = [hashlib.blake2b(listing.path(entry), digest_size=8).digest() for entry in range(len(listing))]
    keys = np.frombuffer(b"".join(digests), dtype=np.uint64)
    order = np.argsort(keys, kind="stable")
    if len(repeated := np.flatnonzero(keys[order][1:] == keys[order][:-1])):
        name = printable(os.fsdecode(listing.path(int(order[repeated[0]]))))
        raise MakeError(f"{path}: {len(repeated):,} paths are repeated, the first is {name}. Name each image once.")


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
        raise MakeError(f"cannot read {path}: {error}. Correct the file.") from error


def _csv_rows(path: Path, columns: Columns) -> Iterator[Row]:
    with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        rows = csv.reader(file)
        heading = next(rows, [])
        names = columns.choose(heading, path)
        place, label = heading.index(names[0]), None if names[1] is None else heading.index(names[1])
        for row in rows:
            if not row:
                continue
            if len(row) != len(heading):
                raise MakeError(
                    f"{path}: line {rows.line_num} has {len(row)} fields, but the heading has {len(heading)}. "
                    "Correct the line."
                )
            yield row[place], None if label is None else row[label].strip()


def _parquet_rows(path: Path, columns: Columns) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise MakeError(f'{path}: Parquet needs pyarrow. Install it: pip install "tessera-ssl[parquet]"') from None
    try:
        with parquet.ParquetFile(path) as file:
            names = columns.choose(file.schema_arrow.names, path)
            for batch in file.iter_batches(columns=[name for name in names if name is not None]):
                paths = batch.column(names[0]).to_pylist()
                labels = [None] * len(paths) if names[1] is None else batch.column(names[1]).to_pylist()
                for name, label in zip(paths, labels, strict=True):
                    if not isinstance(name, str):
                        raise MakeError(
                            f"{path}: column {names[0]!r} holds {name!r}, not a path. "
                            "Set --path_column to the column of the paths."
                        )
                    yield name, None if label is None else str(label)
    except ArrowException as error:
        raise MakeError(f"cannot read {path}: {error}. Correct the file.") from error
