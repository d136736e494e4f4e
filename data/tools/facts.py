"""What is in one shard: every member looked at, and everything counted that a run could stumble over.

Nothing here stops at the first bad image. Sums are of whole numbers, so they do not depend on the order of shards.
"""

import hashlib
import json
import logging
import os
from collections import Counter
from dataclasses import dataclass, field
from io import BufferedReader, BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from data.decode import FORMATS, ImageError, decode
from data.shards.index import LARGEST_TABLE, REMEDY, TABLE, read_table, write_table
from data.shards.retry import DEFAULT, SourceConfig
from data.shards.shard import Shard
from data.shards.tar import Index, ShardError, walk
from data.tools.parallel import Advance

MOST_NAMED = 100  # bad images of a shard that are named; all are counted
KEY_BYTES = 8
LONGEST_LABEL = 64  # bytes, as the reader of a run takes them

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
"""Pillow's modes"""


@dataclass
class Extent:
    """Smallest, largest and mean size of pictures."""

    smallest: tuple[int, int] | None = None
    """(width, height) of the fewest pixels"""
    largest: tuple[int, int] | None = None
    widths: int = 0
    """sum of them"""
    heights: int = 0

    def add(self, *sizes: tuple[int, int] | None) -> None:
        """Widens the range; sums are left alone."""
        known = [size for size in (self.smallest, self.largest, *sizes) if size is not None]
        self.smallest = min(known, key=_area, default=None)
        self.largest = max(known, key=_area, default=None)


def _area(size: tuple[int, int]) -> tuple[int, int]:
    return size[0] * size[1], size[0]


@dataclass
class Facts:
    """Counts over the images of a shard, or of several."""

    path: str = ""
    images: int = 0
    size: int = 0
    """bytes as they are stored"""
    labelled: int = 0
    decoded: int = 0
    """images that were decoded, well or not"""
    corrupt: int = 0
    corrupt_names: list[tuple[str, str]] = field(default_factory=list)
    """the first of them: `shard.tar/key` and the reason"""
    bad_labels: int = 0
    bad_label_names: list[tuple[str, str]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """why a run does not take a shard"""
    notes: list[str] = field(default_factory=list)
    """what a run would warn of"""
    formats: Counter[str] = field(default_factory=Counter)
    channels: Counter[str] = field(default_factory=Counter)
    sides: Counter[str] = field(default_factory=Counter)
    """images by their longer side: its upper bound, a power of two"""
    labels: Counter[int] = field(default_factory=Counter)
    extent: Extent = field(default_factory=Extent)
    pixels: np.ndarray = field(default_factory=lambda: np.zeros((3, 256), dtype=np.int64))
    """how often each channel has each value"""
    keys: list[bytes] = field(default_factory=list)
    """digests of the keys, 8 bytes each, one after the other"""
    sha256: str | None = None

    def add(self, other: "Facts") -> None:
        """Takes in what is known of another shard."""
        for name in ("images", "size", "labelled", "decoded", "corrupt", "bad_labels", "pixels"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("formats", "channels", "sides", "labels"):
            getattr(self, name).update(getattr(other, name))
        for name in ("refused", "notes", "keys"):
            getattr(self, name).extend(getattr(other, name))
        for name in ("corrupt_names", "bad_label_names"):
            room = MOST_NAMED - len(getattr(self, name))
            getattr(self, name).extend(getattr(other, name)[:room])
        self.extent.add(other.extent.smallest, other.extent.largest)
        self.extent.widths += other.extent.widths
        self.extent.heights += other.extent.heights

    def moments(self) -> tuple[list[float], list[float]]:
        """Mean and standard deviation of each channel over all pixels, in [0, 1]; NaN without pixels.

        mean = sum(n_v v) / N and var = sum(n_v v^2) / N - mean^2, with n_v pixels of value v: sums of whole numbers.
        """
        values = np.arange(256, dtype=np.int64)
        means, deviations = [], []
        for counts in self.pixels:
            total, first, second = (int((counts * values**power).sum()) for power in (0, 1, 2))
            means.append(first / total / 255 if total else float("nan"))
            variance = (second * total - first * first) / total**2 if total else float("nan")
            deviations.append(variance**0.5 / 255)
        return means, deviations


@dataclass(frozen=True)
class Look:
    """How closely shards are looked at."""

    decode: bool = True
    most: int | None = None
    """decode only so many images of a shard, evenly spread"""
    max_pixels: int = 178_956_970
    checksum: bool = True
    write_table: bool = False
    source: SourceConfig = DEFAULT


def check_shard(path: str, look: Look, advance: Advance) -> Facts:
    """Facts of the shard at a path or URL; what is wrong with it is among them."""
    facts = Facts(path)
    with _Warnings(facts.notes):
        try:
            shard = Shard.at(path, look.source)
            with os.fdopen(shard.open(), "rb") as tar:
                table = walk(os.dup(tar.fileno()), path)
                _fill(facts, shard, table, tar, look, advance)
        except ShardError as error:
            text = str(error)
            facts.refused.append(text if path in text else f"{path}: {text}")
        except OSError as error:
            facts.refused.append(f"{path}: {error.strerror or error}; restore the shard or remove it from the list")
    return facts


def _fill(facts: Facts, shard: Shard, table: Index, tar: BufferedReader, look: Look, advance: Advance) -> None:
    facts.images, facts.labelled = int(table.summary[0]), int(table.summary[1])
    facts.size = shard.size
    facts.keys = [b"".join(_digest(table.key(sample)) for sample in range(facts.images))]
    _check_samples(facts, shard.name, table, tar.fileno(), look, advance)
    if os.path.exists(facts.path):
        if look.checksum:
            with open(facts.path, "rb") as file:
                facts.sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        _check_table(facts, table, look)
    elif look.checksum and shard.size == table.summary[2]:  # not one that was unpacked
        tar.seek(0)
        facts.sha256 = hashlib.file_digest(tar, "sha256").hexdigest()


class _Warnings(logging.Handler):
    """Collects what the reader warns of instead of printing it."""

    def __init__(self, found: list[str]):
        super().__init__(logging.WARNING)
        self.found, self.log = found, logging.getLogger("data")

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())

    def __enter__(self) -> None:
        self.log.addHandler(self)
        self.log.propagate = False

    def __exit__(self, *_: object) -> None:
        self.log.removeHandler(self)
        self.log.propagate = True


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode(errors="surrogateescape"), digest_size=KEY_BYTES).digest()


def _check_samples(facts: Facts, name: str, table: Index, tar: int, look: Look, advance: Advance) -> None:
    """Looks at the label and the image of each sample."""
    most = facts.images if look.most is None else min(look.most, facts.images)
    chosen = set(np.linspace(0, facts.images - 1, most).astype(int).tolist()) if look.decode else set()
    done = 0
    for sample in range(facts.images):
        offset, size = map(int, table.labels[sample])
        if offset >= 0:
            _check_label(facts, os.pread(tar, min(size, LONGEST_LABEL), offset), f"{name}/{table.key(sample)}")
        if sample in chosen:
            offset, size = map(int, table.images[sample])
            try:
                _check_image(facts, os.pread(tar, size, offset), look.max_pixels)
            except ImageError as error:
                facts.corrupt += 1
                if facts.corrupt <= MOST_NAMED:
                    facts.corrupt_names.append((f"{name}/{table.key(sample)}", str(error)))
        share = facts.size * (sample + 1) // facts.images
        advance(share - done)
        done = share


def _check_label(facts: Facts, text: bytes, name: str) -> None:
    try:
        facts.labels[int(np.int64(int(text)))] += 1
    except (ValueError, OverflowError):
        facts.bad_labels += 1
        if facts.bad_labels <= MOST_NAMED:
            facts.bad_label_names.append((name, f"{text!r} is no class number"))


def _check_image(facts: Facts, encoded: bytes, max_pixels: int) -> None:
    """Counts one image.

    Raises:
        ImageError: as a run would meet it.
    """
    facts.decoded += 1
    pixels = decode(encoded, max_pixels=max_pixels)  # (3, H, W)
    height, width = pixels.shape[1:]
    kind, channels = _kind(encoded)
    facts.formats[kind] += 1
    facts.channels[channels] += 1
    facts.sides[str(1 << (max(height, width) - 1).bit_length())] += 1
    facts.extent.add((width, height))
    facts.extent.widths += width
    facts.extent.heights += height
    picture = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    facts.pixels += np.array(picture.histogram(), dtype=np.int64).reshape(3, 256)


def _kind(encoded: bytes) -> tuple[str, str]:
    """Format and channels of a good image, from its header."""
    with Image.open(BytesIO(encoded), formats=FORMATS) as image:
        channels = "16-bit gray" if image.mode.startswith("I") else CHANNELS.get(image.mode, image.mode)
        if "transparency" in image.info and "alpha" not in channels:
            channels += " with alpha"
        return str(image.format), channels


def _check_table(facts: Facts, table: Index, look: Look) -> None:
    """Compares the table beside a local shard with what the shard holds, or writes it."""
    beside = Path(f"{facts.path}{TABLE}")
    if look.write_table:
        write_table(facts.path, table)
    elif beside.exists():
        try:
            if beside.stat().st_size > LARGEST_TABLE:
                raise ShardError(f"{beside}: larger than {LARGEST_TABLE} bytes; remove it")
            there = read_table(beside.read_bytes(), str(beside))
        except ShardError as error:
            facts.refused.append(str(error))
            return
        if not all(np.array_equal(a, b) for a, b in zip(there, table, strict=True)):
            facts.refused.append(f"{beside}: not of this shard; {REMEDY}")


def class_names(folder: Path) -> list[str]:
    """Names of classes in a folder that data.make_shards wrote; empty where there are none."""
    try:
        names = json.loads((folder / "classes.json").read_text())
    except (OSError, ValueError):
        return []
    return [str(name) for name in names] if isinstance(names, list) else []
