"""Check every member of the shards in the same way as a pretraining run.

The report describes the contents and lists all problems. A corrupt image does not stop the check.

    tessera check_shards SHARDS [options]

Exit status: 0 if the report lists no problem, 1 if it lists a problem, 2 if the command line or a pattern is wrong, if
no image can be read, or if the check fails. A tar with data after its end mark (tars joined by `cat`), with two samples
of one name, or with a label or map of no image is a problem, although a run only warns of it. What a run leaves out for
other reasons, such as images of a format that is not read, is counted, and does not change the exit status.
"""

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image
from pydantic import Field
from rich.filesize import decimal

from tessera.data.dataset import cure_of_bands
from tessera.data.decode import FORMATS, ImageError, Picture, stored_type
from tessera.data.decoders import decoder_of
from tessera.data.failures import CORRECT_INDEX, REPLACE_INDEX, RESTORE_SHARD, SampleError, ShardError
from tessera.data.maps import checked_map
from tessera.data.pages import Pages
from tessera.data.shards.access import Access, SourceConfig
from tessera.data.shards.index import (
    CLASSES,
    FOLDER_INDEX,
    STORED,
    TABLE,
    FolderIndex,
    ShardEntry,
    Statistics,
    parse_table,
    write_folder,
    write_table,
)
from tessera.data.shards.notes import DAMAGE, Note, describe, named_notes, parse_notes
from tessera.data.shards.open import (
    ENDINGS,
    check_complete,
    expand,
    load_folder_index,
    missing_parts,
    sets_in,
    shard_at,
)
from tessera.data.shards.remote import PIPE, is_remote, without_query
from tessera.data.shards.samples import SampleKeys
from tessera.data.shards.shard import Shard
from tessera.data.shards.source import shared_class_names
from tessera.data.shards.tar_index import LARGEST_LABEL, Index, scan_tar
from tessera.data.shards.tar_shard import Tar, folder_of, name_of
from tessera.data.statistics import statistics_of
from tessera.data.tools.offline import run_command, say, spread
from tessera.data.value_range import ValueCounts, shown_range
from tessera.data.values import ONE_TYPE
from tessera.encoders.base import PixelType
from tessera.runtime import stdio
from tessera.runtime.files import atomic_write
from tessera.runtime.machine import cores
from tessera.runtime.settings import Positional, Settings, flags, validate
from tessera.runtime.user_error import printable

PROGRAM = "tessera check_shards"
MOST_SHOWN = 10  # maximum number of printed problems of each kind
PROBLEMS = {
    "refused": "reasons for a run to stop",
    "damaged": "signs that tars were joined, updated or sorted wrongly",
    "corrupt": "corrupt images, which a run leaves out",
    "bad_labels": "labels that stop an evaluation",
    "bad_maps": "maps that stop an evaluation",
}
"""Maps the name of each list of problems in `Facts` to the title under which the problems are printed."""


class CheckShards(Settings):
    """Check shards, and report their contents and all problems that a run would have with them."""

    shards: Positional[list[str]]
    """shards to check: paths, folders, globs, brace ranges, URLs"""
    workers: int = Field(default=cores(), ge=1)
    """number of worker processes"""
    decode: bool = True
    """true: decode the images; false: read only the tar headers and the labels"""
    max_pixels: int = Field(default=178_956_970, ge=1)
    """maximum number of pixels of an image; larger images count as corrupt"""
    channels: int = Field(default=3, ge=1)
    """number of channels of decoded images; images that cannot be converted count as corrupt"""
    pixel_type: Literal["auto", PixelType] = "auto"
    """type of decoded images, as data.pixel_type of a run; auto: the type of each image"""
    nodata: float | Literal["auto"] | None = None
    """value of pixels without data, as data.nodata of a run"""
    write_index: bool = False
    """write an index.json in each folder and a table beside each shard, for example for shards of another tool"""
    output: Path | None = None
    """JSON file to which the complete report is written"""
    image: str | None = None
    """name of the image in a sample, as for data.image of a run"""
    label: str | None = None
    """name of the label in a sample, as for data.label of a run"""
    labels: str | None = None
    """CSV with the labels of images in folders: columns path and label, paths relative to it"""
    pages: Pages | None = None
    """images of files that hold several, as for data.pages of a run"""
    source: SourceConfig = SourceConfig()

    @property
    def access(self) -> Access:
        """Access to shards."""
        return Access(self.source, SampleKeys(self.image, self.label, self.labels, pages=self.pages))

    @property
    def usual(self) -> bool:
        """True if the image and the label of a sample are those that an index lists, and files are samples."""
        return self.image is self.label is self.pages is None


@dataclass
class Facts:
    """Results for one or several shards. All totals are integers, so the order of the shards does not change them."""

    path: str = ""
    images: int = 0
    bytes: int = 0
    """Total size of the shard files in bytes."""
    labelled: int = 0
    mapped: int = 0
    """Number of samples with a map."""
    decoded: int = 0
    """Number of images that were decoded or found to be corrupt."""
    refused: list[str] = field(default_factory=list)
    """Reasons why a run does not accept a shard."""
    damaged: list[str] = field(default_factory=list)
    """Notes of the kinds `notes.DAMAGE`, as `SHARD.tar: sentence`."""
    corrupt: list[str] = field(default_factory=list)
    """Corrupt images, as `SHARD.tar/KEY: reason`."""
    bad_labels: list[str] = field(default_factory=list)
    bad_maps: list[str] = field(default_factory=list)
    """Bad maps, as `SHARD.tar/KEY: reason`."""
    notes: list[Note] = field(default_factory=list)
    """Notes on what a run leaves out, except those in `damaged`."""
    stored_notes: list[Note] = field(default_factory=list)
    """All notes of a tar, for `index.json`."""
    formats: Counter[str] = field(default_factory=Counter)
    longer_side: Counter[int] = field(default_factory=Counter)
    """Histogram of image sizes. Maps an upper bound of the longer side, a power of two, to the number of images."""
    classes: Counter[int] = field(default_factory=Counter)
    """Number of samples of each class number."""
    types: Counter[PixelType] = field(default_factory=Counter)
    """Number of decoded images of each type."""
    values: dict[PixelType, ValueCounts] = field(default_factory=dict)
    """Number of pixels of each value, by the type of the images."""
    sha256: str | None = None

    def add(self, other: "Facts") -> None:
        """Add the results of another shard."""
        for name, value in vars(other).items():
            if isinstance(value, Counter):
                getattr(self, name).update(value)
            elif isinstance(value, (int, list)):
                setattr(self, name, getattr(self, name) + value)
        for kind, counts in other.values.items():
            self.values.setdefault(kind, ValueCounts(kind)).merge(counts)

    def entry(self) -> ShardEntry:
        """Return the entry of the shard in `index.json`."""
        return ShardEntry(
            url=name_of(self.path),
            nsamples=self.images,
            filesize=self.bytes,
            labelled=self.labelled,
            sha256=self.sha256,
            notes=self.stored_notes or None,
        )

    def statistics(self) -> Statistics:
        """Return the statistics of the pixels; none if no image was decoded, or if the images have several types."""
        return statistics_of(*self.values.values()) if len(self.values) == 1 else Statistics()

    def report(self) -> dict[str, Any]:
        """Return the results as a dict that can be written as JSON."""
        hidden = ("path", "sha256", "stored_notes", "values")
        facts = {name: value for name, value in vars(self).items() if name not in hidden}
        for name in ("longer_side", "classes"):
            facts[name] = {str(key): count for key, count in sorted(facts[name].items())}
        found = self.statistics()
        pixels = {name: value for name, value in found._asdict().items() if value is not None}
        return {
            **facts,
            "notes": describe(self.notes),
            "formats": dict(self.formats.most_common()),
            "pixels": pixels if found.mean else None,
            "good": not any(facts[kind] for kind in PROBLEMS),
        }


def mixed_types(types: Counter[PixelType]) -> list[str]:
    """Return a message if a data set has images of 8 bits and others, which a run refuses."""
    if "uint8" not in types or len(types) == 1:
        return []
    counts = ", ".join(f"{count:,} {kind}" for kind, count in types.items())
    return [f"images of 8 bits and of other types are mixed: {counts}. {ONE_TYPE}."]


def check(settings: CheckShards) -> dict[str, Any]:
    """Check shards and return the report.

    Raises:
        ShardError: a pattern matches no shards; or `write_index` is set and a shard is remote or no tar.
        WorkerError: a worker process was killed.
    """
    paths = expand([path for pattern in settings.shards for path in _sets(pattern)], settings.access)
    if settings.write_index and not settings.usual:
        raise ShardError("--write_index lists the usual images and labels. Leave --image and --label out.")
    if settings.write_index and (others := [path for path in paths if not _is_tar(path)]):
        raise ShardError(f"{others[0]} is no tar, and only tars have an index. Leave --write_index out.")
    if settings.write_index and (urls := [path for path in paths if is_remote(path)]):
        raise ShardError(
            f"{urls[0]} is remote, so no index can be written beside the shard. "
            "Write the index beside a local copy of the shards, and upload the index."
        )

    def work(path: str) -> Facts:
        return check_shard(path, settings)

    found = {facts.path: facts for facts in spread(work, paths, workers=settings.workers, title="checking shards")}
    total = Facts()
    folders: dict[str, list[Facts]] = {}
    total.notes += missing_parts(paths)
    for path in paths:
        total.add(found[path])
        if not _is_tar(path) or not settings.usual:
            continue
        folders.setdefault(folder_of(path) or ".", []).append(found[path])
    folders.pop(PIPE, None)
    for folder, shards in folders.items():
        if all(facts.refused for facts in shards) and is_remote(folder):
            continue  # the reasons are those of the shards
        try:
            check_complete(folder)
            if settings.write_index and not total.refused:
                _write_index(Path(folder), shards, settings)
            total.refused += _compare_index(folder, shards, settings.source)
        except ShardError as error:
            total.refused.append(str(error))
    total.refused += mixed_types(total.types)
    usable = [found[path] for path in paths if not found[path].refused]
    total.bad_labels += _compare_classes(usable, settings.access)
    return {"shards": len(paths), **total.report()}


def _sets(pattern: str) -> list[str]:
    """Return the shards of all sets in a local folder, although a run takes one. Return other patterns unchanged."""
    names, sets = sets_in(pattern) if os.path.isdir(pattern) else ([], [])
    if len(sets) < 2 or len({name.endswith(ENDINGS) for name in names}) == 2:
        return [pattern]
    say("sets", f"{', '.join(map(printable, sets))}; a run takes one of them as SHARDS")
    return [os.path.join(pattern, name) for name in names]


def _is_tar(path: str) -> bool:
    return is_remote(path) or without_query(path).endswith(ENDINGS)


def check_shard(path: str, settings: CheckShards) -> Facts:
    """Check the tar, Parquet file or folder of images at a path or URL.

    Problems do not raise an error, but are listed in the returned `Facts`.
    """
    facts = Facts(path)
    try:
        shard = shard_at(path, settings.access)
        if not isinstance(shard, Tar):
            facts.notes += shard.notes
            _check_samples(facts, shard, shard.index(), settings)
            facts.bytes = shard.size
            return facts
        with os.fdopen(shard.open(), "rb") as tar:
            index = shard.paged(scan_tar(os.dup(tar.fileno()), path, settings.image, shard.access.keys.label_name))
            notes = parse_notes(index.notes.tobytes())
            facts.stored_notes, of_tar = notes, named_notes(shard.name, notes)
            facts.notes += [note for note in of_tar if note.kind not in DAMAGE]
            facts.damaged += [f"{path}: {line}" for line in describe(note for note in of_tar if note.kind in DAMAGE)]
            _check_samples(facts, shard, index, settings)
            facts.bytes = shard.size
            if settings.decode or settings.write_index:
                facts.sha256 = _checksum(shard, index, tar)
        if os.path.exists(path) and settings.usual:
            _check_table(facts, index, settings.write_index)
    except ShardError as error:
        text = str(error)
        facts.refused.append(text if path in text else f"{path}: {text}")
    except OSError as error:
        facts.refused.append(f"{path}: {error.strerror or error}. {RESTORE_SHARD}")
    return facts


def _checksum(shard: Tar, index: Index, tar: BufferedReader) -> str | None:
    """Return the SHA-256 of the stored file, or None for a remote shard that is stored compressed."""
    if os.path.exists(shard.path):
        with open(shard.path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    if shard.size != index.summary[2]:
        return None
    tar.seek(0)
    return hashlib.file_digest(tar, "sha256").hexdigest()


def _check_samples(facts: Facts, shard: Shard, index: Index, settings: CheckShards) -> None:
    """Check the label of each sample, and decode the images with their maps."""
    facts.images, facts.labelled = int(index.summary[0]), int(index.summary[1])
    facts.mapped = int((index.maps[:, 0] >= 0).sum())
    for sample in range(facts.images):
        name = f"{shard.name}/{index.key(sample)}"
        if index.labels[sample, 0] >= 0:
            try:
                label = shard.label(index, sample)
                facts.classes[label] += 1
                if label < 0:
                    facts.bad_labels.append(f"the label of {name} is {label}. Number the classes from 0")
                if label > LARGEST_LABEL:
                    facts.bad_labels.append(f"the label of {name} is {label}, but the maximum is {LARGEST_LABEL}")
            except SampleError as error:
                facts.bad_labels.append(str(error))
        if not settings.decode:
            continue
        facts.decoded += 1
        try:
            size = _check_image(facts, shard.page(index, sample), settings)
        except ImageError as error:
            facts.corrupt.append(f"{name}: {error}")
            continue
        if index.map_place(sample)[0] < 0:
            continue
        try:
            checked_map(shard.target(index, sample), size)
        except ImageError as error:
            facts.bad_maps.append(f"{name}: {error}")


def _check_image(facts: Facts, encoded: Any, settings: CheckShards) -> tuple[int, int]:
    """Decode and count one image. Return its height and width.

    Raises:
        ImageError: the image is corrupt.
    """
    limits: dict[str, Any] = {"max_pixels": settings.max_pixels}
    kind = stored_type(encoded, **limits) if settings.pixel_type == "auto" else settings.pixel_type
    picture = Picture(encoded, channels=settings.channels, pixel_type=kind, nodata=settings.nodata, **limits)
    pixels, (height, width) = picture.pixels(), picture.size  # (C, H, W)
    name = decoder_of(encoded)
    facts.formats[name.upper() if name else str(Image.open(BytesIO(encoded), formats=FORMATS).format)] += 1
    facts.longer_side[1 << (max(height, width) - 1).bit_length()] += 1
    facts.types[kind] += 1
    absent = None if picture.absent is None else picture.absent.numpy()
    facts.values.setdefault(kind, ValueCounts(kind)).add(pixels.numpy(), absent)
    return height, width


def _check_table(facts: Facts, index: Index, write: bool) -> None:
    """Write the table beside a local shard if `write` is true. Otherwise, compare an existing table with the shard.

    Raises:
        ShardError: the table is damaged or belongs to another shard.
    """
    beside = Path(f"{facts.path}{TABLE}")
    if write:
        write_table(facts.path, index)
    elif beside.exists():
        stored = parse_table(beside.read_bytes(), str(beside))
        compared = (name for name in STORED if name != "notes")  # tables of older versions have none
        if not all(np.array_equal(getattr(stored, name), getattr(index, name)) for name in compared):
            raise ShardError(f"{beside} belongs to another shard. {REPLACE_INDEX}")


def _write_index(folder: Path, shards: list[Facts], settings: CheckShards) -> None:
    """Write the `index.json` of a folder, which lists the checked shards."""
    total = Facts()
    for facts in shards:
        total.add(facts)
    entries = sorted((facts.entry() for facts in shards), key=lambda entry: entry.url)
    found = total.statistics()._asdict()
    found["nodata"] = settings.nodata if found["mean"] else None
    write_folder(folder, FolderIndex(name=folder.resolve().name, shardlist=entries, **found))


def _compare_index(folder: str, shards: list[Facts], source: SourceConfig) -> list[str]:
    """Return the differences between the `index.json` of a folder, if it exists, and the shards.

    Raises:
        ShardError: the `index.json` cannot be used.
    """
    path = f"{folder}/{FOLDER_INDEX}"
    index = load_folder_index(path, source)
    if index is None:
        return []
    listed = {entry.url: entry for entry in index.shardlist}
    differences = []
    for entry in (facts.entry() for facts in shards if facts.images):
        if entry.url not in listed:
            differences.append(f"{path} does not list the shard {entry.url}. {REPLACE_INDEX}")
            continue
        for name, value in entry.model_dump(exclude={"notes"}).items():
            expected = getattr(listed[entry.url], name)
            if None not in (expected, value) and expected != value:
                differences.append(
                    f"{path} lists {name} {expected} for {entry.url}, but the shard has {value}. Copy or make the "
                    f"shard again. {CORRECT_INDEX}"
                )
    missing = sorted(url for url in listed if os.path.isdir(folder) and not os.path.exists(f"{folder}/{url}"))
    return differences + [f"{path} lists the shard {url}, which does not exist. {REPLACE_INDEX}" for url in missing]


def _compare_classes(shards: list[Facts], access: Access) -> list[str]:
    """Return messages if folders or files number their classes differently, or a label has no class name."""
    groups: dict[str, list[Facts]] = {}
    for facts in shards:
        groups.setdefault(folder_of(facts.path) if _is_tar(facts.path) else facts.path, []).append(facts)
    problems, named = [], list[Shard]()
    for group in groups.values():
        try:
            named.append(shard_at(group[0].path, access))
            names, largest = named[-1].class_names(), max((one for facts in group for one in facts.classes), default=-1)
        except ShardError as error:
            return [str(error)]
        if names is not None and largest >= len(names):
            where = named[-1].names_classes
            where, cure = (f"{where or '.'}/{CLASSES}", " of the file") if _is_tar(group[0].path) else (where, "")
            problems.append(
                f"{where} has names for the {len(names)} classes 0 to {len(names) - 1}, but the largest label is "
                f"{largest}. Add the missing names at the end{cure}, or remove the names."
            )
    try:
        if len(named) > 1:
            shared_class_names(named)
    except ShardError as error:
        problems.append(str(error))
    return problems


def _show(report: dict[str, Any], channels: int) -> None:
    """Print the report in a few lines. `channels` is the number of channels of decoded images."""
    say("shards", f"{report['shards']:,}, {decimal(report['bytes'])}, {report['images']:,} images")
    if report["formats"]:
        say("formats", ", ".join(f"{count:,} {kind}" for kind, count in report["formats"].items()))
        sides = ", ".join(f"{count:,} up to {side}" for side, count in report["longer_side"].items())
        say("longer side", f"{sides} pixels")
        if "low" in report["pixels"]:
            say("pixels", shown_range(*(report["pixels"][name] for name in ("pixel_type", "low", "high"))))
        for name in ("mean", "std"):
            values = ", ".join(f"{value:.4f}" for value in report["pixels"][name])
            say(name, f"{values}  (each channel, in [0, 1], over all pixels)")
    say("labels", f"{report['labelled']:,} images, {_describe_classes(report['classes'])}")
    if report["mapped"]:
        say("maps", f"{report['mapped']:,} images")
    for line in report["notes"]:
        say("left out", line)
    print()
    if report["good"]:
        print("a run accepts all shards" if report["decoded"] else "a run accepts the headers and labels")
    for kind, title in PROBLEMS.items():
        if lines := report[kind]:
            print(f"{len(lines):,} {title}:")
            print("\n".join(f"  {printable(line)}" for line in lines[:MOST_SHOWN]))
            if len(lines) > MOST_SHOWN:
                print(f"  and {len(lines) - MOST_SHOWN:,} more (--output FILE lists all of them)")
            if kind == "corrupt" and (cure := cure_of_bands(lines, channels, "--channels")):
                print(f"  {cure}")


def _describe_classes(counts: Iterable[int | str]) -> str:
    """Return the number of classes and the range of their numbers."""
    numbers = sorted(map(int, counts))
    return f"{len(numbers):,} classes from {numbers[0]} to {numbers[-1]}" if numbers else "0 classes"


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""

    def command() -> int:
        words = sys.argv[1:] if argv is None else argv
        settings = validate(CheckShards, flags(CheckShards, words, PROGRAM))
        report = check(settings)
        if settings.output:
            with atomic_write(settings.output) as path:
                path.write_text(json.dumps(report, indent=1) + "\n")
        _show(report, settings.channels)
        if report["good"]:
            return 0
        unreadable = report["corrupt"] and len(report["corrupt"]) == report["images"]
        return 2 if unreadable else 1

    return run_command(PROGRAM, command)


if __name__ == "__main__":
    stdio.protect()
    sys.exit(main())
