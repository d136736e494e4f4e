"""Images that are left out by their names: `data.exclude` of a run, and `--exclude` of `tessera make_shards`.

A run leaves them out when it opens its shards. All that follows, such as the order, is as if they were not in the
shards.
"""

import csv
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tessera.data.failures import ShardError
from tessera.data.shards.listing import EXCLUDED, Listing
from tessera.data.shards.open import Sources
from tessera.data.shards.source import Source
from tessera.runtime.user_error import printable

KEY = "key"
"""Name of the column with the names of the images."""
SUFFIXES = (".csv", ".txt", ".parquet")


def read_names(given: str) -> dict[str, None]:
    """Return the names of the images that a file lists, in its order. A name is `SHARD/KEY`, as `tessera embed` writes
    it.

    Args:
        given: path of a .csv with a column `key`, of a .txt with one name per line, or of a .parquet with a column
            `key`; or `PATH:FLAG,FLAG` for the rows of a .parquet in which one of these columns is true.

    Raises:
        ShardError: the file cannot be read, or lacks a column.
    """
    path, flags = Path(given), list[str]()
    if path.suffix.lower() not in SUFFIXES and ":" in given:
        before, _, after = given.rpartition(":")
        path, flags = Path(before), after.split(",")
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ShardError(f"{given} does not end in {', '.join(SUFFIXES)}. Rename the file.")
    if flags and suffix != ".parquet":
        raise ShardError(f"Only a .parquet has flags, not {path}. Remove :{','.join(flags)}.")
    try:
        if suffix == ".parquet":
            return dict.fromkeys(name for name in _flagged(path, flags) if name)
        with path.open(newline="", encoding="utf-8-sig") as file:
            if suffix == ".txt":
                return dict.fromkeys(line for line in file.read().splitlines() if line)
            rows = csv.DictReader(file)
            if KEY not in (rows.fieldnames or ()):
                raise ShardError(f"{path} has no column `{KEY}`. Name the column with the images so.")
            return dict.fromkeys(row[KEY] for row in rows if row[KEY])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ShardError(f"Cannot read {path}: {error}. Correct the path or the file.") from error


def _flagged(path: Path, flags: Sequence[str]) -> list[str | None]:
    """Return the names in the rows of a Parquet file in which a flag is true; without flags, those of all rows."""
    try:
        import pyarrow
        from pyarrow import compute, parquet
    except ImportError:
        raise ShardError('Parquet needs pyarrow. Install it: pip install "tessera-ssl[parquet]"') from None
    try:
        schema = parquet.read_schema(path)
        known = [field.name for field in schema if pyarrow.types.is_boolean(field.type)]
        if missing := [name for name in (KEY, *flags) if name not in ((KEY, *known) if KEY in schema.names else known)]:
            raise ShardError(f"{path} has no column `{missing[0]}`. Its flags are: {', '.join(known) or 'none'}.")
        if known and not flags:
            raise ShardError(
                f"{path} has flags, and lists images that are to stay. Name the flags of the images to "
                f"leave out: {path}:{','.join(known)}"
            )
        table = parquet.read_table(path, columns=[KEY, *flags])
    except pyarrow.ArrowInvalid as error:
        raise ShardError(f"Cannot read {path}: {error}. Correct the path or the file.") from error
    names = np.array(table[KEY].to_pylist(), dtype=object)
    chosen = [compute.fill_null(table[flag], False).to_numpy() for flag in flags]
    return (names[np.any(chosen, axis=0)] if flags else names).tolist()


def without(sources: Sources, given: str | None) -> tuple[Sources, str]:
    """Return sources without the images that a file lists, and what was left out, for the plan of the run.

    Only the indices of the shards that the file names are read.

    Args:
        sources: opened sources of a run.
        given: the file, as for `read_names`; None to return all images, and an empty text.

    Raises:
        ShardError: the file cannot be used, none of its names or several images of the sources have one of its names,
            or a source has no other images.
    """
    if given is None:
        return sources, ""
    names = read_names(given)
    shards = {name.partition("/")[0] for name in names}
    found, kept = dict[str, str](), list[Source]()
    for source in sources.lists:
        left_out = dict[int, np.ndarray]()
        for number, shard in enumerate(source.shards):
            if shard.name not in shards:
                continue
            index, samples = shard.index(), list[int]()
            for sample in range(len(index.images)):
                if (name := f"{shard.name}/{index.key(sample)}") in names:
                    if found.get(name, shard.path) != shard.path:
                        raise ShardError(
                            f"{given} names {name}, which is in {found[name]} and in {shard.path}. "
                            "Rename one of these shards, and make the list again."
                        )
                    found[name] = shard.path
                    samples.append(sample)
            if samples:
                left_out[number] = np.array(samples, dtype=np.int64)
        kept.append(_without(source, left_out, given))
    if names and not found:
        raise ShardError(
            f"No training image has a name of {given}. A name of the file is "
            f"{next(iter(names))!r}, and a training image is {sources.lists[0].name(0)!r}."
        )
    before, after = (sum(source.images for source in one) for one in (sources.lists, kept))
    others = len(names) - len(found)
    more = f"; {others:,} other names of the file are those of no training image" if others else ""
    return Sources(kept, sources.weights), f"{before - after:,} of {before:,}, by {given}{more}"


def leave_out(listing: Listing, given: str, folder: str) -> None:
    """Leave the images that a file lists out of a listing, in which `folder` is the name of the folder.

    Raises:
        ShardError: the file cannot be used, or it names images, but none of these.
    """
    names = read_names(given)
    found = [
        entry
        for entry in listing.usable.tolist()
        if f"{folder}/{printable(listing.path(entry).decode(errors='backslashreplace'))}" in names
    ]
    if names and not found:
        first = printable(os.fsdecode(listing.path(int(listing.usable[0]))))
        raise ShardError(
            f"No image has a name of {given}. A name of the file is {next(iter(names))!r}, and an image is "
            f"{f'{folder}/{first}'!r}."
        )
    listing.sizes[found] = EXCLUDED
    listing.refuse_empty(f"{given} names all images")


def _without(source: Source, left_out: dict[int, np.ndarray], given: str) -> Source:
    """Return a source without the samples `left_out` of its shards. A shard that is left out as a whole is removed."""
    if not left_out:
        return source
    counts, labelled = source.counts.copy(), source.labelled.copy()
    for number, samples in left_out.items():
        counts[number] -= len(samples)
        labels = np.delete(source.shards[number].index().labels, samples, axis=0)
        labelled[number] = np.count_nonzero(labels[:, 0] >= 0)
    stay = np.flatnonzero(counts)
    if not len(stay):
        raise ShardError(f"{given} names all images of {source.shards[0].path}. Leave out fewer images.")
    return replace(
        source,
        shards=[source.shards[number] for number in stay],
        counts=counts[stay],
        labelled=labelled[stay],
        sizes=source.sizes[stay],
        digests=tuple(source.digests[number] for number in stay) if source.digests else (),
        left_out={place: left_out[number] for place, number in enumerate(stay.tolist()) if number in left_out},
    )
