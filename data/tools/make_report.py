"""Reports and `index.json` of finished shards. Both are computed from the records of the shards."""

import csv
import json
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.filesize import decimal

from tessera.data.shards.index import FolderIndex, ShardEntry, write_folder
from tessera.data.shards.listing import REASONS, Listing
from tessera.data.shards.tar import IMAGES
from tessera.data.statistics import moments
from tessera.data.tools.command import MakeError, say
from tessera.data.tools.pack import DIGEST
from tessera.data.tools.shard_folder import Folder
from tessera.data.tools.split import same
from tessera.runtime.files import atomic_write

MOST_REASONS = 100  # maximum number of different reasons that are counted separately in report.json
HELD_OUT = ("val", "valid", "validation", "test", "held-out")  # names of folders of images that score a run
MOST_SHOWN = 3  # maximum number of reasons, and of kinds of other files, that are printed


def write_reports(
    folder: Folder, listing: Listing, shards: int, dropped: np.ndarray | None, settings: dict[str, Any]
) -> dict[str, Any]:
    """Write all reports and then `index.json`, and return the content of report.json.

    Args:
        folder: folder of finished shards.
        listing: files from which the shards were made.
        shards: number of shards.
        dropped: pairs of entries: a duplicate that was dropped, and the file with the same content that was kept. None
            if duplicates were kept.
        settings: settings to write into the report.

    Raises:
        MakeError: a shard has vanished, or no image could be stored.
    """
    totals = _read_records(folder, shards)
    _write_csv(folder.path / "left_out.csv", _left_out_rows(listing, totals))
    duplicates = dropped
    if duplicates is None:
        digests = np.frombuffer(b"".join(totals.digests), dtype=np.uint8).reshape(-1, DIGEST)
        duplicates = same(np.concatenate([np.empty(0, np.int64), *totals.entries]), digests)
    _write_csv(folder.path / "duplicates.csv", _duplicate_rows(listing, duplicates))
    labels = listing.labels[duplicates]
    report = {
        "images": sum(shard.nsamples for shard in totals.shards),
        "labelled": sum(shard.labelled or 0 for shard in totals.shards),
        "mapped": totals.mapped,
        "shards": len(totals.shards),
        "bytes": sum(shard.filesize for shard in totals.shards),
        "left_out": _count_reasons(reason for _, reason in _left_out(listing, totals)),
        "duplicates": {
            "found": len(duplicates),
            "with_another_label": int((labels[:, 0] != labels[:, 1]).sum()),
            "dropped": dropped is not None,
        },
        "other_files": dict(listing.other_files.most_common()),
        "image_sizes": sort_sizes(totals.sides),
        "settings": settings,
    }
    _write_json(folder.path / "report.json", report, indent=1)
    if not totals.shards:
        raise MakeError(f"none of the files is a good image. {folder.path}/left_out.csv lists the reasons.")
    if listing.classes is not None:
        _write_json(folder.path / "classes.json", listing.classes, indent=0)
    found = moments(totals.pixels) if totals.decoded else None
    index = FolderIndex(
        name=folder.name,
        shardlist=totals.shards,
        image_sizes=sort_sizes(totals.sides),
        mean=tuple(found[0]) if found else None,
        std=tuple(found[1]) if found else None,
    )
    write_folder(folder.path, index)
    return report


@dataclass
class _Totals:
    """Totals of the records of all shards."""

    shards: list[ShardEntry] = field(default_factory=list)
    """Shards with at least one image."""
    mapped: int = 0
    """Number of images with a segmentation map."""
    sides: Counter[str] = field(default_factory=Counter)
    """Histogram of image sizes. Maps an upper bound of the longer side, a power of two, to the number of images."""
    left_out: list[tuple[int, str]] = field(default_factory=list)
    """Entries that were left out when the shards were written, with the reasons."""
    entries: list[np.ndarray] = field(default_factory=list)
    """Entries of the listing that are stored, one array per shard."""
    digests: list[bytes] = field(default_factory=list)
    """Concatenated digests of the files that are stored, one byte string per shard."""
    pixels: np.ndarray = field(default_factory=lambda: np.zeros((3, 256), dtype=np.int64))
    """Histogram of the pixel values of each channel: (3, 256) int64."""
    decoded: bool = True
    """False if the images of at least one shard were not decoded, so that `pixels` is incomplete."""


def _read_records(folder: Folder, shards: int) -> _Totals:
    totals = _Totals()
    for number in range(shards):
        record = folder.finished(number)
        if record is None:
            raise MakeError(f"{folder.shard(number)} has vanished. Start the same command again to make the shard.")
        totals.left_out += record.left_out
        totals.entries.append(np.array(record.entries, dtype=np.int64))
        totals.digests.append(bytes.fromhex(record.digests))
        totals.sides += record.sides
        totals.mapped += record.mapped
        if not record.nsamples:
            continue
        if record.pixels is None:
            totals.decoded = False
        else:
            totals.pixels += np.array(record.pixels)
        totals.shards.append(
            ShardEntry(
                url=folder.shard(number).name,
                nsamples=record.nsamples,
                filesize=record.filesize,
                labelled=record.labelled,
                sha256=record.sha256,
            )
        )
    return totals


def _left_out(listing: Listing, totals: _Totals) -> Iterator[tuple[int, str]]:
    """Yield each entry that was left out, with the reason. Dropped duplicates are not included."""
    for entry in np.flatnonzero(listing.sizes <= 0):
        yield int(entry), REASONS[int(listing.sizes[entry])]
    yield from totals.left_out


def _left_out_rows(listing: Listing, totals: _Totals) -> Iterator[tuple[str, str]]:
    yield "path", "reason"
    for entry, reason in _left_out(listing, totals):
        yield os.fsdecode(listing.path(entry)), reason


def _duplicate_rows(listing: Listing, pairs: np.ndarray) -> Iterator[tuple[str, str]]:
    yield "path", "same_as"
    for entry, first in pairs.tolist():
        yield os.fsdecode(listing.path(entry)), os.fsdecode(listing.path(first))


def sort_sizes(sides: Counter[str]) -> dict[str, int]:
    """Return a histogram of image sizes, sorted by size."""
    return {side: sides[side] for side in sorted(sides, key=int)}


def _count_reasons(reasons: Iterable[str]) -> dict[str, int]:
    """Return the number of occurrences of each reason, sorted by this number, with the largest first.

    Only the first 100 different reasons are counted separately. All others are counted together.
    """
    counts: Counter[str] = Counter()
    for reason in reasons:
        counts[reason if len(counts) < MOST_REASONS or reason in counts else "other reasons"] += 1
    return dict(counts.most_common())


def _write_csv(path: Path, rows: Iterable[tuple[str, str]]) -> None:
    with (
        atomic_write(path) as temporary,
        temporary.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file,
    ):
        csv.writer(file, lineterminator="\n").writerows(rows)


def _write_json(path: Path, content: Any, indent: int) -> None:
    with atomic_write(path, sync=True) as temporary:
        temporary.write_text(json.dumps(content, indent=indent))


def show_report(report: dict[str, Any], folder: Folder) -> None:
    """Print the counts of the report, and a command that trains on the shards."""
    path, duplicates = folder.path, report["duplicates"]
    maps = f", {report['mapped']:,} with a segmentation map" if report["mapped"] else ""
    say(
        "written", f"{report['images']:,} images, {report['labelled']:,} with a label{maps}, {decimal(report['bytes'])}"
    )
    sides = [f"{count:,} up to {side}" for side, count in report["image_sizes"].items()]
    say("longer side", f"{', '.join(sides)} pixels")
    if left_out := sum(report["left_out"].values()):
        say("left out", f"{left_out:,}, named in {path}/left_out.csv")
        for reason, count in [*report["left_out"].items()][:MOST_SHOWN]:
            say("", f"{count:,}: {reason}")
    if duplicates["found"]:
        other = f", {duplicates['with_another_label']:,} with another label" if duplicates["with_another_label"] else ""
        verb = "dropped" if duplicates["dropped"] else "kept (--duplicates drop leaves them out)"
        say("duplicates", f"{duplicates['found']:,}{other}, {verb}, named in {path}/duplicates.csv")
    if report["other_files"]:
        kinds = [f"{count:,} {kind}" for kind, count in [*report["other_files"].items()][:MOST_SHOWN]]
        say("other files", f"{', '.join(kinds)}; only {', '.join(IMAGES)} are read")
    name = shlex.quote(str(path))
    data = f"TRAIN_SHARDS --evaluation.val {name}" if path.name.lower() in HELD_OUT else name
    say("\nnext", f"tessera pretrain --method dino --data {data}")
