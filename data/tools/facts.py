"""Check of one shard: read every member, and count everything that a run would refuse or skip.

A corrupt image does not stop the check. All sums are sums of integers, so the result does not depend on the order in
which shards are checked.
"""

import hashlib
import logging
import os
from collections import Counter
from dataclasses import dataclass, field
from io import BufferedReader, BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from tessera.data.decode import FORMATS, ImageError, decode
from tessera.data.maps import checked_map
from tessera.data.shards.errors import REPLACE_INDEX, RESTORE_SHARD, ShardError
from tessera.data.shards.index import LARGEST_TABLE, TABLE, parse_table, write_table
from tessera.data.shards.open import shard_at
from tessera.data.shards.source import DEFAULT, SourceConfig
from tessera.data.shards.tar import LARGEST_LABEL, Index, scan_tar
from tessera.data.shards.tars import LONGEST_LABEL, Tar
from tessera.data.statistics import histogram
from tessera.data.tiff import is_tiff

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


@dataclass
class Facts:
    """Results of the check of one or several shards. The names of samples have the form `SHARD.tar/KEY: reason`."""

    path: str = ""
    images: int = 0
    size: int = 0
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
    sides: Counter[int] = field(default_factory=Counter)
    """Histogram of image sizes. Maps an upper bound of the longer side, a power of two, to the number of images."""
    labels: Counter[int] = field(default_factory=Counter)
    pixels: np.ndarray = field(default_factory=lambda: np.zeros((1, 256), dtype=np.int64))
    """Histogram of the pixel values of each channel: (C, 256) int64; (1, 256) zeros if no image was decoded."""
    map_values: np.ndarray = field(default_factory=lambda: np.zeros(256, dtype=np.int64))
    """Histogram of the values of all decoded segmentation maps: (256,) int64."""
    sha256: str | None = None

    def add(self, other: "Facts") -> None:
        """Add the results of another shard."""
        for name, value in vars(other).items():
            if isinstance(value, Counter):
                getattr(self, name).update(value)
            elif isinstance(value, (int, list, np.ndarray)):
                setattr(self, name, getattr(self, name) + value)


@dataclass(frozen=True)
class Checks:
    """Settings for the check of a shard: images to decode, limits, and optional steps."""

    decode: bool = True
    most: int | None = None
    """Maximum number of images to decode in each shard, evenly spread; None for all images."""
    max_pixels: int = 178_956_970
    channels: int = 3
    """Number of channels to which images must be convertible."""
    checksum: bool = True
    write_table: bool = False
    source: SourceConfig = DEFAULT


def check_shard(path: str, checks: Checks) -> Facts:
    """Check the tar at a path or URL. Problems do not raise an error, but are listed in the returned `Facts`."""
    facts = Facts(path)
    with _Warnings(facts.notes):
        try:
            shard = shard_at(path, checks.source)
            assert isinstance(shard, Tar)
            with os.fdopen(shard.open(), "rb") as tar:
                table = scan_tar(os.dup(tar.fileno()), path)
                _fill(facts, shard, table, tar, checks)
        except ShardError as error:
            text = str(error)
            facts.refused.append(text if path in text else f"{path}: {text}")
        except OSError as error:
            facts.refused.append(f"{path}: {error.strerror or error}. {RESTORE_SHARD}")
    return facts


def _fill(facts: Facts, shard: Tar, table: Index, tar: BufferedReader, checks: Checks) -> None:
    facts.images, facts.labelled = int(table.summary[0]), int(table.summary[1])
    facts.mapped = int((table.maps[:, 0] >= 0).sum())
    facts.size = shard.size
    _check_samples(facts, shard.name, table, tar.fileno(), checks)
    if os.path.exists(facts.path):
        if checks.checksum:
            with open(facts.path, "rb") as file:
                facts.sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        _check_table(facts, table, checks)
    # If the stored file and the tar have equal sizes, the shard is stored uncompressed.
    elif checks.checksum and shard.size == table.summary[2]:
        tar.seek(0)
        facts.sha256 = hashlib.file_digest(tar, "sha256").hexdigest()


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


def _check_samples(facts: Facts, shard: str, table: Index, tar: int, checks: Checks) -> None:
    """Check the label of each sample, and decode as many images, with their maps, as `checks` requires."""
    most = facts.images if checks.most is None else min(checks.most, facts.images)
    chosen = set(np.linspace(0, facts.images - 1, most).astype(int).tolist()) if checks.decode else set()
    for sample in range(facts.images):
        name = f"{shard}/{table.key(sample)}"
        offset, size = map(int, table.labels[sample])
        if offset >= 0:
            _check_label(facts, os.pread(tar, min(size, LONGEST_LABEL), offset), name)
        if sample not in chosen:
            continue
        offset, size = map(int, table.images[sample])
        try:
            sides = _check_image(facts, os.pread(tar, size, offset), checks)
        except ImageError as error:
            facts.corrupt += 1
            _list(facts.corrupt_images, f"{name}: {error}")
            continue
        offset, size = table.map_place(sample)
        if offset >= 0:
            _check_map(facts, os.pread(tar, size, offset), sides, name)


def _list(names: list[str], text: str) -> None:
    if len(names) < NAMED_IMAGES:
        names.append(text)


def _check_label(facts: Facts, text: bytes, name: str) -> None:
    try:
        label = int(text)
        if label > LARGEST_LABEL:
            raise ValueError(f"{label} is more than {LARGEST_LABEL}")
        facts.labels[int(np.int64(label))] += 1
    except (ValueError, OverflowError):
        facts.bad_labels += 1
        _list(facts.bad_label_names, f"{name}: {text!r} is not a class number of at most {LARGEST_LABEL}")


def _check_map(facts: Facts, encoded: bytes, size: tuple[int, int], name: str) -> None:
    """Decode the segmentation map of an image of `size` (H, W), and count its values."""
    try:
        values = checked_map(encoded, size)
        facts.map_values = facts.map_values + np.bincount(values.numpy().ravel(), minlength=256)
    except ImageError as error:
        facts.bad_maps += 1
        _list(facts.bad_map_names, f"{name}: {error}")


def _check_image(facts: Facts, encoded: bytes, checks: Checks) -> tuple[int, int]:
    """Decode and count one image. Return its height and width.

    Raises:
        ImageError: the image is corrupt.
    """
    facts.decoded += 1
    pixels = decode(encoded, max_pixels=checks.max_pixels, channels=checks.channels)  # (C, H, W)
    height, width = map(int, pixels.shape[1:])
    kind, channels = ("TIFF", f"{len(pixels)} channels") if is_tiff(encoded) else _describe(encoded)
    facts.formats[kind] += 1
    facts.channels[channels] += 1
    facts.sides[1 << (max(height, width) - 1).bit_length()] += 1
    facts.pixels = facts.pixels + histogram(pixels)
    return height, width


def _describe(encoded: bytes) -> tuple[str, str]:
    """Read the format and the channels of a good image from its header."""
    with Image.open(BytesIO(encoded), formats=FORMATS) as image:
        channels = "16-bit gray" if image.mode.startswith("I") else CHANNELS.get(image.mode, image.mode)
        if "transparency" in image.info and "alpha" not in channels:
            channels += " with alpha"
        return str(image.format), channels


def _check_table(facts: Facts, table: Index, checks: Checks) -> None:
    """Compare the table beside a local shard with the shard, or write the table if `checks.write_table` is set."""
    beside = Path(f"{facts.path}{TABLE}")
    if checks.write_table:
        write_table(facts.path, table)
    elif beside.exists():
        try:
            if beside.stat().st_size > LARGEST_TABLE:
                raise ShardError(f"{beside}: a table may have {LARGEST_TABLE} bytes at most. Remove the file.")
            stored = parse_table(beside.read_bytes(), str(beside))
        except ShardError as error:
            facts.refused.append(str(error))
            return
        if not all(np.array_equal(a, b) for a, b in zip(stored, table, strict=True)):
            facts.refused.append(f"{beside}: belongs to another shard. {REPLACE_INDEX}")
