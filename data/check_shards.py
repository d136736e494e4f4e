"""Check every member of the shards as a pretraining run checks it.

The report names the contents and everything that a run would refuse. A corrupt image does not stop the check.

    tessera check_shards SHARDS [options]

Exit status: 0 if a run accepts all shards, 1 if the report names a problem, 2 if the command line or a pattern is
wrong.
"""

import hashlib
import json
import logging
import os
import shlex
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any, Self

import numpy as np
from PIL import Image
from pydantic import Field, model_validator
from rich.filesize import decimal

from tessera.data.decode import FORMATS, ImageError, decode
from tessera.data.maps import IGNORED, checked_map
from tessera.data.shards.errors import MAKE_INDEX_AGAIN, REPLACE_INDEX, RESTORE_SHARD, ShardError
from tessera.data.shards.index import (
    CLASSES,
    FOLDER_INDEX,
    LARGEST_TABLE,
    TABLE,
    FolderIndex,
    ShardEntry,
    parse_table,
    write_folder,
    write_table,
)
from tessera.data.shards.open import expand, load_folder_index, shard_at
from tessera.data.shards.remote import PIPE, is_remote
from tessera.data.shards.source import DEFAULT, SourceConfig
from tessera.data.shards.tar import LARGEST_LABEL, Index, scan_tar
from tessera.data.shards.tars import LONGEST_LABEL, Tar, folder_of, name_of, read_classes
from tessera.data.statistics import histogram, moments
from tessera.data.tiff import is_tiff
from tessera.data.tools.command import run_command, say, spread
from tessera.runtime import streams
from tessera.runtime.errors import printable
from tessera.runtime.files import atomic_write
from tessera.runtime.settings import Positional, Settings, flags, validate

PROGRAM = "tessera check_shards"
MOST_SHOWN = 10  # maximum number of printed problems of each kind
NAMED_IMAGES = 100
"""Maximum number of bad images, labels or maps that are listed by name. Further ones are only counted."""

CHANNELS = {
    "1": "gray",
    "L": "gray",
    "LA": "gray with alpha",
    "P": "palette",
    "PA": "palette with alpha",
    "RGB": "RGB",
    "RGBA": "RGB with alpha",
    "CMYK": "CMYK",
}
"""Maps an image mode of Pillow to a description of its channels for the report."""


class CheckShards(Settings):
    """Check shards, and report their contents and everything that a run would refuse."""

    shards: Positional[list[str]]
    """shards to check: paths, folders, globs, brace ranges, URLs"""
    workers: int = Field(default=os.cpu_count() or 1, ge=1)
    """number of worker processes"""
    decode: bool = True
    """true: decode the images; false: read only the tar headers and the labels"""
    sample: int | None = Field(default=None, ge=1)
    """approximate number of images to decode, evenly spread over all shards; default: all images"""
    max_pixels: int = Field(default=178_956_970, ge=1)
    """maximum number of pixels of an image; larger images count as corrupt"""
    channels: int = Field(default=3, ge=1)
    """number of channels of decoded images; images that cannot be converted count as corrupt"""
    write_index: bool = False
    """write an index.json in each folder and a table beside each shard, for example for shards of another tool"""
    output: Path | None = None
    """JSON file to which the complete report is written"""
    source: SourceConfig = DEFAULT

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if self.sample is not None and not self.decode:
            raise ValueError("sample sets the number of images to decode, but decode is false. Remove one setting")
        return self


@dataclass
class Facts:
    """Results of the check of one or several shards. All sums are sums of integers, so that the result does not depend
    on the order of shards. The names of samples have the form `SHARD.tar/KEY: reason`."""

    path: str = ""
    images: int = 0
    bytes: int = 0
    """Total size of the shard files in bytes."""
    labelled: int = 0
    mapped: int = 0
    """Number of samples with a segmentation map."""
    decoded: int = 0
    """Number of images that were decoded or found to be corrupt."""
    corrupt: int = 0
    corrupt_images: list[str] = field(default_factory=list)
    """First corrupt images."""
    bad_labels: int = 0
    bad_label_names: list[str] = field(default_factory=list)
    """Samples of the first bad labels."""
    bad_maps: int = 0
    bad_map_names: list[str] = field(default_factory=list)
    """Samples of the first bad segmentation maps."""
    refused: list[str] = field(default_factory=list)
    """Reasons why a run does not accept a shard."""
    notes: list[str] = field(default_factory=list)
    """Warnings that a run would log."""
    formats: Counter[str] = field(default_factory=Counter)
    channels: Counter[str] = field(default_factory=Counter)
    longer_side: Counter[int] = field(default_factory=Counter)
    """Histogram of image sizes. Maps an upper bound of the longer side, a power of two, to the number of images."""
    classes: Counter[int] = field(default_factory=Counter)
    """Number of samples of each class number."""
    map_values: Counter[int] = field(default_factory=Counter)
    """Number of pixels of each value of the decoded segmentation maps."""
    pixels: np.ndarray = field(default_factory=lambda: np.zeros((1, 256), dtype=np.int64))
    """Histogram of the pixel values of each channel: (C, 256) int64; (1, 256) zeros if no image was decoded."""
    sha256: str | None = None

    def add(self, other: "Facts") -> None:
        """Add the results of another shard."""
        for name, value in vars(other).items():
            if isinstance(value, Counter):
                getattr(self, name).update(value)
            elif isinstance(value, (int, list, np.ndarray)):
                setattr(self, name, getattr(self, name) + value)

    def entry(self) -> ShardEntry:
        """Return the entry of the shard in `index.json`."""
        return ShardEntry(
            url=name_of(self.path),
            nsamples=self.images,
            filesize=self.bytes,
            labelled=self.labelled,
            sha256=self.sha256,
        )


def check(settings: CheckShards) -> dict[str, Any]:
    """Check shards and return the report.

    Raises:
        ShardError: a pattern matches no shards or a folder of images, or `write_index` is set and a shard is remote.
        WorkerError: a worker process was killed.
    """
    paths = expand(settings.shards, settings.source)
    if of_images := [path for path in paths if os.path.isdir(path)]:
        raise ShardError(
            f"{of_images[0]}: holds images, but no shards. Make shards with "
            f"`tessera make_shards {shlex.quote(of_images[0])} SHARDS`, and name the folder SHARDS."
        )
    if settings.write_index and (urls := [path for path in paths if is_remote(path)]):
        raise ShardError(
            f"{urls[0]}: an index cannot be written beside a remote shard. "
            "Write the index beside a local copy of the shards, and upload the index."
        )
    most = 0 if not settings.decode else -(-settings.sample // len(paths)) if settings.sample else None

    def work(path: str) -> Facts:
        return check_shard(path, settings, most)

    found = {facts.path: facts for facts in spread(work, paths, workers=settings.workers, title="checking shards")}
    total = Facts()
    folders: dict[str, list[Facts]] = {}
    for path in paths:
        total.add(found[path])
        folders.setdefault(folder_of(path) or ".", []).append(found[path])
    folders.pop(PIPE, None)
    agree, names = [], []
    for folder, shards in folders.items():
        if settings.write_index and not total.refused:
            _write_index(Path(folder), shards)
        agree.append(_compare_index(folder, shards, settings.source, total.refused))
        names.append(_check_classes(folder, shards, settings.source, total.refused))
    if len(set(names)) > 1:
        total.notes.append(
            f"the folders have different class names in {CLASSES}; an evaluation does not accept their labels together"
        )
    return _report(total, len(paths), agree, names[0] if len(set(names)) == 1 else None)


def check_shard(path: str, settings: CheckShards, most: int | None = None) -> Facts:
    """Check the tar at a path or URL. Problems do not raise an error, but are listed in the returned `Facts`.

    `most` is the maximum number of images to decode, evenly spread; None decodes all images.
    """
    facts = Facts(path)
    with _Warnings(facts.notes):
        try:
            shard = shard_at(path, settings.source)
            assert isinstance(shard, Tar)
            with os.fdopen(shard.open(), "rb") as tar:
                index = scan_tar(os.dup(tar.fileno()), path)
                _check_samples(facts, shard.name, index, tar.fileno(), settings, most)
                facts.bytes = shard.size
                if most is None or settings.write_index:
                    facts.sha256 = _checksum(shard, index, tar)
            if os.path.exists(path):
                _check_table(facts, index, settings.write_index)
        except ShardError as error:
            text = str(error)
            facts.refused.append(text if path in text else f"{path}: {text}")
        except OSError as error:
            facts.refused.append(f"{path}: {error.strerror or error}. {RESTORE_SHARD}")
    return facts


class _Warnings(logging.Handler):
    """Context manager that collects the warnings of the package `data`. The warnings are not printed."""

    def __init__(self, found: list[str]):
        super().__init__(logging.WARNING)
        self.found, self.log = found, logging.getLogger("tessera.data")

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())

    def __enter__(self) -> None:
        self.log.addHandler(self)
        self.log.propagate = False

    def __exit__(self, *_: object) -> None:
        self.log.removeHandler(self)
        self.log.propagate = True


def _checksum(shard: Tar, index: Index, tar: BufferedReader) -> str | None:
    """Return the SHA-256 of the stored file, or None for a remote shard that is stored compressed."""
    if os.path.exists(shard.path):
        with open(shard.path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    if shard.size != index.summary[2]:
        return None
    tar.seek(0)
    return hashlib.file_digest(tar, "sha256").hexdigest()


def _check_samples(facts: Facts, shard: str, index: Index, tar: int, settings: CheckShards, most: int | None) -> None:
    """Check the label of each sample, and decode at most `most` images with their maps."""
    facts.images, facts.labelled = int(index.summary[0]), int(index.summary[1])
    facts.mapped = int((index.maps[:, 0] >= 0).sum())
    decoded = facts.images if most is None else min(most, facts.images)
    chosen = set(np.linspace(0, facts.images - 1, decoded).astype(int).tolist())

    def read(place: np.ndarray, most: int | None = None) -> bytes:
        offset, size = map(int, place)
        return os.pread(tar, size if most is None else min(size, most), offset)

    for sample in range(facts.images):
        name = f"{shard}/{index.key(sample)}"
        if index.labels[sample, 0] >= 0:
            _check_label(facts, read(index.labels[sample], LONGEST_LABEL), name)
        if sample not in chosen:
            continue
        try:
            sides = _check_image(facts, read(index.images[sample]), settings)
        except ImageError as error:
            facts.corrupt += 1
            _list(facts.corrupt_images, f"{name}: {error}")
            continue
        if index.map_place(sample)[0] >= 0:
            _check_map(facts, read(index.maps[sample]), sides, name)


def _list(names: list[str], text: str) -> None:
    if len(names) < NAMED_IMAGES:
        names.append(text)


def _check_label(facts: Facts, text: bytes, name: str) -> None:
    try:
        label = int(text)
        if label > LARGEST_LABEL:
            raise ValueError(f"{label} is more than {LARGEST_LABEL}")
        facts.classes[int(np.int64(label))] += 1
    except (ValueError, OverflowError):
        facts.bad_labels += 1
        _list(facts.bad_label_names, f"{name}: {text!r} is not a class number of at most {LARGEST_LABEL}")


def _check_image(facts: Facts, encoded: bytes, settings: CheckShards) -> tuple[int, int]:
    """Decode and count one image. Return its height and width.

    Raises:
        ImageError: the image is corrupt.
    """
    facts.decoded += 1
    pixels = decode(encoded, max_pixels=settings.max_pixels, channels=settings.channels)  # (C, H, W)
    height, width = map(int, pixels.shape[1:])
    kind, channels = ("TIFF", f"{len(pixels)} channels") if is_tiff(encoded) else _describe(encoded)
    facts.formats[kind] += 1
    facts.channels[channels] += 1
    facts.longer_side[1 << (max(height, width) - 1).bit_length()] += 1
    facts.pixels = facts.pixels + histogram(pixels)
    return height, width


def _describe(encoded: bytes) -> tuple[str, str]:
    """Read the format and the channels of a good image from its header."""
    with Image.open(BytesIO(encoded), formats=FORMATS) as image:
        channels = "16-bit gray" if image.mode.startswith("I") else CHANNELS.get(image.mode, image.mode)
        if "transparency" in image.info and "alpha" not in channels:
            channels += " with alpha"
        return str(image.format), channels


def _check_map(facts: Facts, encoded: bytes, size: tuple[int, int], name: str) -> None:
    """Decode the segmentation map of an image of `size` (H, W), and count its values."""
    try:
        values, counts = np.unique(checked_map(encoded, size), return_counts=True)
        facts.map_values.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
    except ImageError as error:
        facts.bad_maps += 1
        _list(facts.bad_map_names, f"{name}: {error}")


def _check_table(facts: Facts, index: Index, write: bool) -> None:
    """Compare the table beside a local shard with the shard, or write the table."""
    beside = Path(f"{facts.path}{TABLE}")
    if write:
        write_table(facts.path, index)
    elif beside.exists():
        if beside.stat().st_size > LARGEST_TABLE:
            raise ShardError(f"{beside}: a table may have {LARGEST_TABLE} bytes at most. Remove the file.")
        stored = parse_table(beside.read_bytes(), str(beside))
        if not all(np.array_equal(a, b) for a, b in zip(stored, index, strict=True)):
            raise ShardError(f"{beside}: belongs to another shard. {REPLACE_INDEX}")


def _write_index(folder: Path, shards: list[Facts]) -> None:
    """Write the `index.json` of a folder. Keep the old entries of shards that exist but were not checked."""
    entries = {}
    with suppress(ShardError):  # an old index that cannot be read is replaced
        old = load_folder_index(f"{folder}/{FOLDER_INDEX}", DEFAULT)
        entries = {entry.url: entry for entry in old.shardlist if (folder / entry.url).exists()} if old else {}
    checked = {name_of(facts.path): facts.entry() for facts in shards}
    # Pixel statistics need the images of all shards, so write statistics only if all shards of the index were checked.
    all_checked = not entries.keys() - checked.keys()
    found = moments(sum((facts.pixels for facts in shards), np.zeros((1, 256), np.int64))) if all_checked else None
    index = FolderIndex(
        name=folder.resolve().name,
        shardlist=[entry for _, entry in sorted({**entries, **checked}.items())],
        mean=tuple(found[0]) if found else None,
        std=tuple(found[1]) if found else None,
    )
    write_folder(folder, index)


def _compare_index(folder: str, shards: list[Facts], source: SourceConfig, refused: list[str]) -> bool | None:
    """Return True if the `index.json` of a folder agrees with its shards, and None if there is no `index.json`.

    Otherwise, return False and append the differences to `refused`.
    """
    path = f"{folder}/{FOLDER_INDEX}"
    try:
        index = load_folder_index(path, source)
    except ShardError as error:
        refused.append(str(error))
        return False
    if index is None:
        return None
    listed = {entry.url: entry for entry in index.shardlist}
    before = len(refused)
    for entry in (facts.entry() for facts in shards if facts.images):
        if entry.url not in listed:
            refused.append(f"{path}: does not list the shard {entry.url}. {REPLACE_INDEX}")
            continue
        for name, value in entry.model_dump().items():
            expected = getattr(listed[entry.url], name)
            if None not in (expected, value) and expected != value:
                refused.append(
                    f"{path}: {name} of {entry.url} is {value}, not {expected}. Copy or make the shard again. "
                    f"If the index is wrong: {MAKE_INDEX_AGAIN}"
                )
    missing = sorted(url for url in listed if os.path.isdir(folder) and not os.path.exists(f"{folder}/{url}"))
    refused += [f"{path}: lists the shard {url}, which does not exist. {REPLACE_INDEX}" for url in missing]
    return len(refused) == before


def _check_classes(
    folder: str, shards: list[Facts], source: SourceConfig, refused: list[str]
) -> tuple[str, ...] | None:
    """Return the class names of a folder, or None if there is no usable `classes.json`.

    If the `classes.json` cannot be used, or does not name the classes of all labels, append the reason to `refused`.
    """
    try:
        names = read_classes(folder, source)
    except ShardError as error:
        refused.append(str(error))
        return None
    largest = max((label for facts in shards for label in facts.classes), default=-1)
    if names is not None and largest >= len(names):
        refused.append(
            f"{folder}/{CLASSES}: names {len(names)} classes, from 0 to {len(names) - 1}, but the largest label is "
            f"{largest}. Add the missing names at the end of the file, or remove the file."
        )
    return names


def _report(total: Facts, shards: int, agree: list[bool | None], names: tuple[str, ...] | None) -> dict[str, Any]:
    """Return the report as a dict that can be written as JSON. `names` are the class names, or None without names."""
    pixels, names = moments(total.pixels), names or ()
    facts = {name: value for name, value in vars(total).items() if name not in ("path", "sha256")}
    for name in ("corrupt_images", "bad_label_names", "bad_map_names"):
        facts[name] = facts[name][:NAMED_IMAGES]
    for name in ("longer_side", "classes", "map_values"):
        facts[name] = {str(key): count for key, count in sorted(facts[name].items())}
    return {
        "shards": shards,
        **facts,
        "formats": dict(total.formats.most_common()),
        "channels": dict(total.channels.most_common()),
        "pixels": {"mean": pixels[0], "std": pixels[1]} if pixels else None,
        "class_names": {str(label): names[label] for label in sorted(total.classes) if 0 <= label < len(names)},
        "index_agrees": None if None in agree or not agree else all(agree),
        "good": not (total.refused or total.corrupt or total.bad_labels or total.bad_maps),
    }


def _show(report: dict[str, Any]) -> None:
    """Print the report in a few lines."""
    say("shards", f"{report['shards']:,}, {decimal(report['bytes'])}, {report['images']:,} images")
    if report["formats"]:
        say("formats", ", ".join(f"{count:,} {kind}" for kind, count in report["formats"].items()))
        say("channels", ", ".join(f"{count:,} {kind}" for kind, count in report["channels"].items()))
        sides = ", ".join(f"{count:,} up to {side}" for side, count in report["longer_side"].items())
        say("longer side", f"{sides} pixels")
        for name in ("mean", "std"):
            values = ", ".join(f"{value:.4f}" for value in report["pixels"][name])
            say(name, f"{values}  (each channel, in [0, 1], over all pixels)")
    say("labels", _describe_labels(report))
    if report["mapped"]:
        say("maps", _describe_maps(report))
    agrees = {None: "no index.json", True: "index.json agrees", False: "index.json differs"}
    say("index", agrees[report["index_agrees"]])
    for note in report["notes"][:MOST_SHOWN]:
        say("note", note)
    if report["decoded"] < report["images"]:
        say("decoded", f"{report['decoded']:,} of {report['images']:,} images; the others were not checked")
    print()
    if report["good"]:
        accepted = "everything that was checked" if report["decoded"] < report["images"] else "all of it"
        print(f"a run accepts {accepted}")
    _show_problems("reasons for a run to stop", report["refused"], len(report["refused"]))
    _show_problems("corrupt images, which a run leaves out", report["corrupt_images"], report["corrupt"])
    _show_problems("labels that stop an evaluation", report["bad_label_names"], report["bad_labels"])
    _show_problems("segmentation maps that stop an evaluation", report["bad_map_names"], report["bad_maps"])


def _show_problems(title: str, lines: list[str], count: int) -> None:
    if count:
        print(f"{count:,} {title}:")
        print("\n".join(f"  {printable(line)}" for line in lines[:MOST_SHOWN]))
        if count > MOST_SHOWN:
            print(f"  and {count - MOST_SHOWN:,} more (--output FILE names up to {NAMED_IMAGES})")


def _describe_labels(report: dict[str, Any]) -> str:
    """Return one line with the number of classes, the most frequent class and the least frequent class."""
    counts, names = report["classes"], report["class_names"]
    if not counts:
        return "none"
    order = sorted(counts, key=lambda label: (-counts[label], int(label)))
    title = {label: f"{label} ({names[label]})" if label in names else label for label in order}
    most, least = order[0], order[-1]
    text = f"{len(counts):,} classes from {min(map(int, counts))} to {max(map(int, counts))}"
    text += f"; most {counts[most]:,} of {title[most]}, least {counts[least]:,} of {title[least]}"
    if without := report["images"] - report["labelled"]:
        text += f"; {without:,} images have no label, but evaluation needs a label for each image"
    return text


def _describe_maps(report: dict[str, Any]) -> str:
    """Return one line with the number of segmentation maps, their classes and their ignored pixels."""
    text = f"{report['mapped']:,} of {report['images']:,} images have a segmentation map"
    values = {int(value): count for value, count in report["map_values"].items()}
    ignored, pixels = values.pop(IGNORED, 0), sum(report["map_values"].values())
    if values:
        text += f"; {len(values):,} classes from {min(values)} to {max(values)}"
    if pixels:
        text += f"; {100 * ignored / pixels:.1f} % of the pixels are ignored ({IGNORED})"
    return text


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""

    def command() -> int:
        words = sys.argv[1:] if argv is None else argv
        settings = validate(CheckShards, flags(CheckShards, words, PROGRAM))
        report = check(settings)
        if settings.output:
            with atomic_write(settings.output) as path:
                path.write_text(json.dumps(report, indent=1) + "\n")
        _show(report)
        return 0 if report["good"] else 1

    return run_command(PROGRAM, command, refused=2)


if __name__ == "__main__":
    streams.protect()
    sys.exit(main())
