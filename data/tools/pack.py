"""Write one shard: its tar, its table and its record.

The bytes of a shard depend only on the files and the recipe. A shard is written to a temporary file, which is renamed
after all bytes are on the disk.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from pydantic import Field
from webdataset.writer import TarWriter

from tessera.data import decoders
from tessera.data.batch import ViewParameters
from tessera.data.decode import ImageError, Picture, decode, stored_type
from tessera.data.decoders import DECODERS, decoder_of, is_webp, known_formats
from tessera.data.failures import ShardError, is_exhausted
from tessera.data.headers import HeaderError, is_jpeg, is_png, raise_lack_of_memory
from tessera.data.maps import checked_map, cut_map, encode_map, map_member
from tessera.data.pages import single_page
from tessera.data.shards.index import write_table
from tessera.data.shards.listing import MISSING, NO_LABEL, REASONS, Listing
from tessera.data.shards.tar_index import LABEL, scan_tar
from tessera.data.statistics import histogram
from tessera.runtime.files import atomic_write
from tessera.runtime.settings import Settings

QUALITY = 90
"""Quality of JPEG and WebP images that are encoded again."""
EXTENSIONS = {"jpeg": "jpg", "png": "png", "webp": "webp"}


class LeftOut(Exception):  # noqa: N818
    """Raised if a file cannot be stored as a sample. The message states the reason."""


class Recipe(Settings):
    """Settings for checking and encoding each image."""

    resize: int | None = Field(default=None, ge=8)
    """maximum length of the shorter side in pixels; larger images are downscaled and encoded again"""
    max_pixels: int = Field(default=178_956_970, ge=1)
    """maximum number of pixels of an image; larger images are left out"""


class Prepared(NamedTuple):
    """An image that is ready to be stored."""

    content: bytes
    extension: str
    histogram: np.ndarray | None
    """Histogram of the pixel values of each channel: (3, 256) int64; None if the image was not decoded."""
    map: bytes | None = None
    """Encoded map; None if the image has no map."""


def read(listing: Listing, entry: int) -> bytes:
    """Return the content of the file of an entry.

    Raises:
        LeftOut: the file cannot be read, or has changed since it was listed.
    """
    path = os.path.join(listing.root, listing.path(entry))
    return _read(path, int(listing.sizes[entry]), int(listing.modified[entry]))


def read_map(listing: Listing, entry: int) -> bytes | None:
    """Return the content of the map of an entry, or None if the entry has no map.

    Raises:
        LeftOut: the map cannot be read, for the reasons that `read` lists.
    """
    maps = listing.maps
    if maps is None or maps.sizes[entry] == MISSING:
        return None
    size = int(maps.sizes[entry])
    try:
        if size in REASONS:
            raise LeftOut(REASONS[size])
        return _read(os.path.join(maps.root, maps.path(listing.path(entry))), size, int(maps.modified[entry]))
    except LeftOut as error:
        raise LeftOut(f"the map cannot be used: {error}") from error


def _read(path: bytes, size: int, modified: int) -> bytes:
    """Return the content of a file.

    Raises:
        LeftOut: the file cannot be read, or its size or modification time differs from the listed one.
        ShardError: memory, file descriptors or disk space have run out.
    """
    try:
        with open(path, "rb") as file:
            status, content = os.fstat(file.fileno()), file.read(size + 1)
    except OSError as error:
        if is_exhausted(error):  # the file may be intact, so raise an error instead of leaving the file out
            raise ShardError(
                f"{os.fsdecode(path)} cannot be read: {error.strerror}. Use fewer --workers, or raise the limit "
                "(`ulimit -n` for open files)."
            ) from error
        raise LeftOut(f"the file cannot be read: {error.strerror}") from error
    if len(content) != size or status.st_mtime_ns != modified:
        raise LeftOut("the file has changed since it was listed")
    return content


def prepare(content: bytes, recipe: Recipe, encoded_map: bytes | None = None) -> Prepared:
    """Check an image file and its map, and encode the image again if the recipe requires another size.

    If the image is not encoded again, the content of the file is kept unchanged. Otherwise the stored image is upright
    and RGB, has no metadata, and shows white where the original was transparent; formats of the registry become PNG. A
    map is encoded again only if the image is resized. Maps are resized with nearest-neighbour interpolation.

    Raises:
        LeftOut: the image is damaged, is too large, has an unknown format, or cannot be encoded; or the map is damaged
            or does not have the size of the upright image.
    """
    found = _format(content)
    try:
        kind = stored_type(content, max_pixels=recipe.max_pixels) if found in EXTENSIONS or recipe.resize else "uint8"
        if recipe.resize is not None and kind != "uint8":
            raise LeftOut(f"an image of the type {kind}, but --resize makes images of 8 bits. Leave --resize out")
        if found not in EXTENSIONS and recipe.resize is None:
            page = single_page(content, "first", recipe.max_pixels)  # a run says which pages are samples
            image = decoders.read(found, page, channels=None, max_pixels=recipe.max_pixels)
            size = image.values.shape[:2] if image.orientation < 5 else image.values.shape[1::-1]  # upright (H, W)
            return Prepared(content, _extension(found), None, _prepare_map(encoded_map, size, size[::-1]))
        if kind != "uint8":
            size = Picture(content, max_pixels=recipe.max_pixels, pixel_type=kind).size
            return Prepared(content, _extension(found), None, _prepare_map(encoded_map, size, (size[1], size[0])))
        pixels = decode(content, max_pixels=recipe.max_pixels)  # (3, H, W)
    except (ImageError, HeaderError) as error:
        raise LeftOut(str(error)) from error
    height, width = map(int, pixels.shape[1:])
    wanted = found if found in EXTENSIONS else "png"
    shrinks = recipe.resize is not None and min(height, width) > recipe.resize
    if wanted == found and not shrinks:
        checked = _prepare_map(encoded_map, (height, width), (width, height))
        return Prepared(content, EXTENSIONS[found], histogram(pixels), checked)
    picture = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    if recipe.resize is not None and shrinks:
        scale = recipe.resize / min(height, width)
        size = max(recipe.resize, round(width * scale)), max(recipe.resize, round(height * scale))
        picture = picture.resize(size, Image.Resampling.BICUBIC)
    file = BytesIO()
    try:
        picture.save(file, wanted, **({} if wanted == "png" else {"quality": QUALITY}))
    except (OSError, ValueError) as error:  # for example, an image that is too wide for the format
        raise_lack_of_memory(error)
        raise LeftOut(f"the image cannot be written as {wanted}: {error}") from error
    counts = np.array(picture.histogram(), dtype=np.int64).reshape(3, 256)
    resized = _prepare_map(encoded_map, (height, width), picture.size)
    return Prepared(file.getvalue(), EXTENSIONS[wanted], counts, resized)


def _prepare_map(encoded: bytes | None, size: tuple[int, int], stored: tuple[int, int]) -> bytes | None:
    """Check the map of an image of `size` (H, W), and resize it to the `stored` size (width, height).

    Raises:
        LeftOut: the map is damaged or does not have the size of the image.
    """
    if encoded is None:
        return None
    try:
        values = checked_map(encoded, size)
    except ImageError as error:
        raise LeftOut(f"the map cannot be used: {error}") from error
    if stored == size[::-1]:
        return encoded
    view = ViewParameters(np.array([(0, 0, *size)]), stored[::-1], np.array([False]))
    return encode_map(cut_map(values, view)[0], map_member(encoded))


def _format(content: bytes) -> str:
    """Detect the image format by the first bytes of a file, because file name extensions are often wrong."""
    if is_jpeg(content):
        return "jpeg"
    if is_png(content):
        return "png"
    if is_webp(content):
        return "webp"
    if (name := decoder_of(content)) is not None:
        return name
    raise LeftOut(f"the file is not a {known_formats()} image, or its header is damaged")


def _extension(found: str) -> str:
    """Return the file name extension of a format that `_format` returns."""
    return EXTENSIONS.get(found) or DECODERS[found].EXTENSION


def key(path: bytes) -> str:
    """Return the sample key of a path.

    The extension is removed. Each dot, backslash, unprintable character and undecodable byte is replaced by `_`.
    """
    text = os.path.splitext(path)[0].decode(errors="replace")
    return "".join(c if c.isprintable() and c not in ".\\\ufffd" else "_" for c in text)


def shared_keys(listing: Listing) -> set[str]:
    """Return all sample keys that several files have in common, such as `a` for `a.jpg` and `a.png`."""
    counts = Counter(key(listing.path(entry)) for entry in range(len(listing)))
    return {name for name, count in counts.items() if count > 1}


def sample_key(path: bytes, shared: set[str]) -> str:
    """Return the unique sample key of a path. If other paths have the same key, a hash of the path is appended."""
    name = key(path)
    return f"{name}-{hashlib.blake2b(path, digest_size=16).hexdigest()[:12]}" if name in shared else name


@dataclass
class Record:
    """Record of one finished shard."""

    nsamples: int = 0
    labelled: int = 0
    mapped: int = 0
    """Number of samples with a map."""
    filesize: int = 0
    sha256: str = ""
    left_out: list[tuple[int, str]] = field(default_factory=list)
    """(entry of the listing, reason) for each file that was left out of the shard."""
    pixels: list[list[int]] | None = None
    """Histogram of the 256 pixel values of each channel; None if the images were not decoded."""

    def write(self, path: Path) -> None:
        """Write the record to a file."""
        with atomic_write(path, sync=True) as temporary:
            temporary.write_text(json.dumps(vars(self)))


def write_samples(path: Path, samples: Iterable[dict[str, Any]]) -> None:
    """Write samples to a tar. A sample is a dict from file extensions to contents. The key `__key__` holds its name.

    The bytes of the tar depend only on the samples, because the headers hold no user, host name or time.
    """
    with (
        path.open("wb") as file,
        TarWriter(file, encoder=False, mtime=0, user="", group="", mode=0o644) as writer,
    ):
        for sample in samples:
            writer.write(sample)
            writer.tarstream.members.clear()  # `tarfile` would keep 1 KB per member in memory


def write_shard(target: Path, entries: np.ndarray, listing: Listing, shared: set[str], recipe: Recipe) -> Record:
    """Write the samples of `entries` to the tar `target`, write its table, and return its record.

    If none of the files is a good image, no tar is written.

    Raises:
        OSError: the tar cannot be written, for example because the disk is full.
    """
    record = Record()
    try:
        with atomic_write(target, sync=True) as temporary:
            write_samples(temporary, _samples(record, entries, listing, shared, recipe))
            if not record.nsamples:
                raise LeftOut("none of the files of the shard is a good image")
            with temporary.open("rb") as file:
                record.sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            record.filesize = temporary.stat().st_size
            write_table(target, scan_tar(str(temporary), str(target)))  # `scan_tar` checks the tar as a run does
    except LeftOut:
        return record
    return record


def _samples(
    record: Record, entries: np.ndarray, listing: Listing, shared: set[str], recipe: Recipe
) -> Iterator[dict[str, Any]]:
    """Yield the samples of a shard as webdataset writes them, and add them to the record."""
    counts, measured = np.zeros((3, 256), dtype=np.int64), True
    for entry in map(int, entries):
        try:
            content = read(listing, entry)
            image = prepare(content, recipe, read_map(listing, entry))
        except LeftOut as error:
            record.left_out.append((entry, str(error)))
            continue
        sample = {"__key__": sample_key(listing.path(entry), shared), image.extension: image.content}
        if (label := int(listing.labels[entry])) != NO_LABEL:
            sample[LABEL] = str(label).encode()
            record.labelled += 1
        if image.map is not None:
            sample[map_member(image.map)] = image.map
            record.mapped += 1
        yield sample
        record.nsamples += 1
        measured &= image.histogram is not None
        if image.histogram is not None:
            counts += image.histogram
    record.pixels = counts.tolist() if measured and counts.any() else None
