"""Manifests (.csv, .tsv): files that list images with their labels.

A manifest has a column with the paths (`PATHS`) and a column with the labels (`LABELS`). Paths are relative to the
folder of the file. If all labels are integers, they are the class numbers. Otherwise the classes are numbered in the
order of their names.
"""

import csv
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from tessera.data.failures import ShardError, warn_once
from tessera.data.shards.index import composed
from tessera.data.shards.listing import MISSING, NO_LABEL, UNLABELLED, File, Listing, file_facts
from tessera.data.shards.notes import LOST
from tessera.data.shards.tar_index import LARGEST_LABEL, whole_number
from tessera.runtime.user_error import printable

PATHS = ("path", "file", "filename", "file_name", "image")
"""Names of the column with the paths of the images. Capitals do not matter."""
LABELS = ("label", "class", "class_name", "category")
"""Names of the column with the labels."""
MANIFESTS = (".csv", ".tsv")
"""Endings of manifests."""
MOST_NAMED = 3
"""Number of images that a warning names."""

Row = tuple[str, str | None]
"""Path of an image, and its label (None if the image has no label)."""


def list_file(path: Path, *, root: Path | None, labels: str, only: bool = False, inside: bool = True) -> Listing:
    """List the images in a manifest.

    Args:
        path: a manifest with a column `path` and optionally a column `label`.
        root: root folder, to which the paths are relative; None for the folder of the manifest.
        labels: "auto" reads the labels, and "none" ignores them.
        only: leave out the images that have no label, if others have one.
        inside: refuse paths outside the root folder, because names in shards are relative to it.

    Raises:
        ShardError: the manifest cannot be read or contains no existing images; a column is missing; a path lies
            outside the root folder (if `inside` is true) or occurs twice; a label is negative or too large; or
            `labels` has another value.
    """
    if labels not in ("auto", "none"):
        raise ShardError(f"--labels {labels} is for a folder of images, but {path} is a manifest. Leave --labels out.")
    folder = os.path.realpath(os.fsencode(root or path.parent))
    listing = Listing.of(folder, _files(path, folder, inside))
    missing = [listing.path(int(entry)) for entry in np.flatnonzero(listing.sizes == MISSING)]
    absent = f" These files do not exist: {_some(missing)}." if missing else ""
    listing.refuse_empty(f"{path} lists no existing images below {os.fsdecode(folder)}.{absent}".removesuffix("."))
    if absent:
        warn_once(f"{path}:{absent}")
    unlabelled = [listing.path(int(entry)) for entry in listing.usable if listing.labels[entry] < 0]
    if only and 0 < len(unlabelled) < len(listing.usable):
        warn_once(f"Images without a label in {path}: {_some(unlabelled)}. They are left out.")
        listing.sizes[(listing.labels < 0) & (listing.sizes > 0)] = UNLABELLED
    _set_labels(listing, path, labels)
    return listing


def add_labels(listing: Listing, path: Path, *, only: bool = False) -> None:
    """Set the labels of the images of a folder to those of a manifest, by their paths. Images that the manifest does
    not name, and entries that name no image of the folder, are counted in a warning.

    Args:
        listing: images of a folder.
        path: manifest with the labels.
        only: leave out the images that have no label.

    Raises:
        ShardError: the manifest cannot be used, or it has a label of no image of the folder.
    """
    texts, known = _label_table(path, *file_facts(os.fsencode(path)))
    root, folders = listing.root, dict[bytes, bytes]()
    paths = [listing.path(entry) for entry in range(len(listing))]
    for one in {os.path.dirname(path) for path in paths}:
        folders[one] = os.path.realpath(os.path.join(root, one))
    full = [os.path.join(folders[os.path.dirname(one)], os.path.basename(one)) for one in paths]
    listing.texts = list(texts)
    listing.labels = np.array([known.get(one, NO_LABEL) for one in full], dtype=np.int64)
    unlabelled = [paths[int(entry)] for entry in listing.usable if listing.labels[entry] < 0]
    shown = printable(os.fsdecode(root))
    if len(unlabelled) == len(listing.usable):
        example = printable(os.fsdecode(next(iter(known), b"no image")))
        raise ShardError(
            f"{path} has a label of no image in {shown}. Its first labelled entry is {example}, and the first image is "
            f"{printable(os.fsdecode(full[int(listing.usable[0])]))}. Paths in the file are relative to the folder of "
            "the file. Move the file, or correct the paths."
        )
    if unlabelled:
        fate = "They are left out" if only else "They are used without a label"
        warn_once(f"Images in {shown} without a label in {path}: {_some(unlabelled)}. {fate}.")
    if lost := [one for one in known.keys() - set(full) if one.startswith(root + b"/") and not os.path.exists(one)]:
        warn_once(f"Entries of {path} whose image does not exist: {_some(sorted(lost))}.")
    listing.found = [note._replace(group="") for note in listing.found if note.kind != LOST]  # folders are no classes
    if only:
        listing.sizes[(listing.labels < 0) & (listing.sizes > 0)] = UNLABELLED
    _set_labels(listing, path, "auto")


def _some(paths: Sequence[bytes]) -> str:
    """Return the number of paths, and the first ones."""
    named = ", ".join(printable(os.fsdecode(path)) for path in paths[:MOST_NAMED])
    return f"{len(paths):,} ({named}{', ...' if len(paths) > MOST_NAMED else ''})"


@functools.lru_cache(maxsize=4)
def _label_table(path: Path, size: int, modified: int) -> tuple[tuple[str, ...], dict[bytes, int]]:
    """Return the texts of all labels, and a dictionary from the real path of an image to the index of its text.

    `size` and `modified` are the facts of the file, so that a changed file is read again.

    Raises:
        ShardError: the file cannot be read, has no column of labels, or names an image twice.
    """
    if path.suffix.lower() not in MANIFESTS:
        raise ShardError(f"--labels {path} must be a .csv or .tsv file with the columns path and label.")
    texts: dict[str, int] = {}
    known: dict[bytes, int] = {}
    real, listed = functools.lru_cache(maxsize=None)(os.path.realpath), functools.lru_cache(maxsize=None)(_names)
    for number, (name, label) in enumerate(_rows(path, need_labels=True), 1):
        full = _spelled(os.path.normpath(os.path.join(os.fsencode(path.absolute().parent), os.fsencode(name))), listed)
        full = os.path.join(real(os.path.dirname(full)), os.path.basename(full))
        if full in known:
            raise ShardError(f"{path}: entry {number}, {name!r}, is repeated. List each image once.")
        known[full] = texts.setdefault(label, len(texts)) if label else NO_LABEL
    return tuple(texts), {full: label for full, label in known.items() if label >= 0}


def _names(folder: bytes) -> dict[str, list[bytes]]:
    """Return the names in a folder by their form NFC of Unicode. Return an empty dict if it cannot be listed."""
    names: dict[str, list[bytes]] = {}
    try:
        for name in os.listdir(folder):
            names.setdefault(composed(os.fsdecode(name)), []).append(name)
    except OSError:
        pass  # the file is reported as missing
    return names


def _spelled(path: bytes, listed: Callable[[bytes], dict[str, list[bytes]]]) -> bytes:
    """Return the path of the file whose path has the same form NFC of Unicode, if there is exactly one, else `path`.

    macOS writes a letter with its accent as two characters, and other systems as one. `listed` returns the names in a
    folder by this form (`_names`).
    """
    if b"\0" in path or path.isascii() or os.path.lexists(path):
        return path
    folder, name = os.path.split(path)
    if not name:
        return path
    folder = _spelled(folder, listed)
    same = listed(folder).get(composed(os.fsdecode(name)), [])
    return os.path.join(folder, same[0] if len(same) == 1 else name)


def _files(path: Path, folder: bytes, inside: bool) -> Iterator[File]:
    seen, listed = set(), functools.lru_cache(maxsize=None)(_names)
    for number, (name, label) in enumerate(_rows(path), 1):
        full = _spelled(os.path.normpath(os.path.join(folder, os.fsencode(name))), listed)
        if b"\0" in full:
            raise ShardError(f"{path}: entry {number}, {name!r}, has a NUL character. Correct the path.")
        if inside and os.path.commonpath([full, folder]) != folder:
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


def _rows(path: Path, *, need_labels: bool = False) -> Iterator[Row]:
    """Yield the path and the label of each entry of a manifest."""
    try:
        yield from _csv_rows(path, need_labels)
    except (OSError, csv.Error) as error:
        raise ShardError(f"cannot read {path}: {error}. Correct the file.") from error


def _csv_rows(path: Path, need_labels: bool) -> Iterator[Row]:
    """Yield the entries of a file with commas, semicolons (Excel in many languages) or tabs between its fields."""
    with path.open("rb") as file:
        if b"\0" in file.read(4096):
            raise ShardError(f"{path} is not text in UTF-8. Save it as `CSV UTF-8`.")
    with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        start, header = file.tell(), file.readline()
        if header.strip().lower() in ("sep=;", "sep=,", "sep=\t"):  # Excel's own first line
            start, header = file.tell(), file.readline()
        file.seek(start)
        separator = max(",;\t", key=header.count)
        rows = csv.DictReader(file, restval=None, delimiter=separator)
        at, label_at = _columns(path, rows.fieldnames or (), need_labels)
        for row in rows:
            # Excel writes rows without values as separators only
            if not any(map(str.strip, (*(value for key, value in row.items() if key and value), *row.get(None, ())))):
                continue
            if None in row or None in row.values():
                raise ShardError(
                    f"{path}: line {rows.line_num} and the header have different numbers of fields. Correct the line."
                )
            label = row[label_at].strip() if label_at is not None else ""
            if not label.isascii() and any("\udc80" <= letter <= "\udcff" for letter in label):
                raise ShardError(f"{path}: the label in line {rows.line_num} is not UTF-8. Save it as `CSV UTF-8`.")
            yield row[at], label


def _columns(path: Path, names: Sequence[str], need_labels: bool) -> tuple[str, str | None]:
    """Return the names of the columns with the paths and with the labels.

    Raises:
        ShardError: a column is missing, or several columns have one of the names.
    """
    found: list[str | None] = []
    for kind, known, needed in (("paths", PATHS, True), ("labels", LABELS, need_labels)):
        columns = [name for name in names if name.strip().lower() in known]
        if len(columns) > 1:
            raise ShardError(
                f"{path} has several columns with {kind}: {', '.join(map(repr, columns))}. Keep one of these names."
            )
        if needed and not columns:
            raise ShardError(
                f"{path} has no column {known[0]!r}. Columns of the file: {', '.join(map(repr, names)) or 'none'}. "
                f"Rename the column with the {kind} to one of: {', '.join(known)}."
            )
        if not columns and len(names) > 1:
            warn_once(
                f"{path} has no column with {kind}, so its images have none. Columns of the file: "
                f"{', '.join(map(repr, names))}. Rename the column with the {kind} to one of: {', '.join(known)}."
            )
        found.append(columns[0] if columns else None)
    return str(found[0]), found[1]
