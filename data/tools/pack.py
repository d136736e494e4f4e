"""One shard written: image files in, a tar with its table and a record of what went in.

The bytes depend on the files and the recipe alone. A shard has its name only when it is whole and on the disk.
"""

import functools
import hashlib
import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Literal

import numpy as np
from PIL import Image

from data.decode import FORMATS, ImageError, decode
from data.shards.index import write_table
from data.shards.tar import LABEL, walk
from data.tools.listing import NO_LABEL, REASONS, Links, Listing, inside
from data.tools.parallel import Advance
from data.tools.shard_folder import PART, Record

Format = Literal["keep", "jpeg", "png", "webp"]

DIGEST = 16  # bytes
ENDINGS = {"jpeg": "jpg", "png": "png", "webp": "webp"}


class LeftOut(Exception):  # noqa: N818
    """A file that does not become a sample. The message is the reason."""


class WriteError(RuntimeError):
    """A shard that cannot be written. The message is meant for the user."""


@dataclass(frozen=True)
class Recipe:
    """What is done to each image."""

    format: Format = "keep"
    resize: int | None = None
    """most pixels of the shorter side"""
    quality: int = 90
    verify: bool = True
    max_pixels: int = 178_956_970
    links: Links = "inside"

    @property
    def encodes(self) -> bool:
        return self.format != "keep" or self.resize is not None


def read(listing: Listing, entry: int, links: Links) -> bytes:
    """The file of an entry, as it was when it was listed.

    Raises:
        LeftOut: it is gone, has changed, or is no regular file within the folder of images.
    """
    path = os.path.join(listing.root, listing.path(entry))
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe in its place must not make us wait
    try:
        if links == "inside":
            path = os.path.realpath(path)
            if not inside(path, listing.root):
                raise LeftOut(REASONS[-2])
            flags |= os.O_NOFOLLOW
        with open(os.open(path, flags), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise LeftOut(REASONS[-3])
            size = int(listing.sizes[entry])
            content = file.read(size + 1)
    except OSError as error:
        raise LeftOut(f"cannot be read: {error.strerror}") from error
    if len(content) != size or status.st_mtime_ns != listing.modified[entry]:
        raise LeftOut("has changed since it was listed")
    return content


def digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST).digest()


def prepare(content: bytes, recipe: Recipe) -> tuple[bytes, str, int]:
    """Bytes to store, their ending, and the longer side of the picture in pixels.

    Untouched unless the recipe asks for another size or format. What is encoded again stands upright, is RGB, white
    where it was transparent, and has no metadata.

    Raises:
        LeftOut: not a good image.
    """
    found = _format(content)
    try:
        if not recipe.encodes and not recipe.verify:
            return content, ENDINGS[found], max(_size(content, recipe.max_pixels))
        pixels = decode(content, max_pixels=recipe.max_pixels)  # (3, H, W)
    except ImageError as error:
        raise LeftOut(str(error)) from error
    height, width = pixels.shape[1:]
    wanted = found if recipe.format == "keep" else recipe.format
    shrinks = recipe.resize is not None and min(height, width) > recipe.resize
    if wanted == found and not shrinks:
        return content, ENDINGS[found], max(height, width)
    picture = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    if recipe.resize is not None and shrinks:
        scale = recipe.resize / min(height, width)
        size = max(recipe.resize, round(width * scale)), max(recipe.resize, round(height * scale))
        picture = picture.resize(size, Image.Resampling.BICUBIC)
    file = BytesIO()
    try:
        picture.save(file, wanted, **({} if wanted == "png" else {"quality": recipe.quality}))
    except (OSError, ValueError) as error:  # too wide for the format
        raise LeftOut(f"cannot be written as {wanted}: {error}") from error
    return file.getvalue(), ENDINGS[wanted], max(picture.size)


def _format(content: bytes) -> str:
    """By the first bytes: a file's own ending is often wrong."""
    if content.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    if content.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if content.startswith(b"RIFF") and content[8:12] == b"WEBP":
        return "webp"
    raise LeftOut("not a JPEG, PNG or WebP image, or its header is damaged")


def _size(content: bytes, max_pixels: int) -> tuple[int, int]:
    try:
        with Image.open(BytesIO(content), formats=FORMATS) as image:
            width, height = image.size
    except Image.DecompressionBombError as error:
        raise LeftOut(str(error)) from error
    except Exception as error:  # Pillow fails in many ways on damaged headers
        raise LeftOut(f"a damaged header: {error}") from error
    if width * height > max_pixels:
        raise LeftOut(f"{width} x {height} pixels are more than the limit of {max_pixels}")
    return width, height


def key(path: bytes) -> str:
    """Name of a sample: its path without ending, dots, backslashes and what cannot be printed."""
    text = os.path.splitext(path)[0].decode(errors="replace")
    if text.isprintable() and not any(c in text for c in ".\\\ufffd"):  # a million of them are made at the start
        return text
    return "".join(c if c.isprintable() and c not in ".\\\ufffd" else "_" for c in text)


def shared_keys(listing: Listing) -> np.ndarray:
    """Ascending entries whose key another one has as well: `a.jpg` and `a.png`."""
    digests = (hashlib.blake2b(key(listing.path(n)).encode(), digest_size=8).digest() for n in range(len(listing)))
    found = np.frombuffer(b"".join(digests), dtype=np.uint64)
    order = np.argsort(found, kind="stable")
    same = found[order][1:] == found[order][:-1]
    return np.sort(order[np.append(same, False) | np.insert(same, 0, False)])


def sample_key(listing: Listing, entry: int, shared: np.ndarray) -> str:
    """The key of an entry; one that others share gets a part that depends on its whole path."""
    path = listing.path(entry)
    place = np.searchsorted(shared, entry)
    own = place < len(shared) and shared[place] == entry
    return f"{key(path)}-{digest(path).hex()[:12]}" if own else key(path)


def write_shard(
    target: Path,
    entries: np.ndarray,
    listing: Listing,
    shared: np.ndarray,
    recipe: Recipe,
    advance: Advance,
) -> Record:
    """Writes the samples of `entries` to the tar `target`, and its table beside it; no tar when none of them is good.

    Raises:
        WriteError: no space, or no right to write.
    """
    part = target.with_name(f".{target.name}{PART}")
    record, sha256, digests = Record(), hashlib.sha256(), []
    try:
        with part.open("wb") as file:
            put = functools.partial(_put, file, sha256)
            for entry in map(int, entries):
                try:
                    content = read(listing, entry, recipe.links)
                    image, ending, side = prepare(content, recipe)
                except LeftOut as error:
                    record.left_out.append((entry, str(error)))
                    advance(1)
                    continue
                name = sample_key(listing, entry, shared)
                put(_member(f"{name}.{ending}", image))
                if (label := int(listing.labels[entry])) != NO_LABEL:
                    put(_member(f"{name}.{LABEL}", str(label).encode()))
                    record.labelled += 1
                record.entries.append(entry)
                record.sides[str(1 << (side - 1).bit_length())] += 1
                digests.append(digest(content))
                advance(1)
            put(iter([bytes(-(file.tell() + 1024) % tarfile.RECORDSIZE + 1024)]))  # two empty blocks, and to a record
            record.filesize = file.tell()
            file.flush()
            os.fsync(file.fileno())
        record.nsamples, record.digests = len(record.entries), b"".join(digests).hex()
        record.sha256 = sha256.hexdigest()
        if record.nsamples:
            table = walk(str(part), str(target))  # what a run will read
            if table.summary[0] != record.nsamples:
                raise WriteError(f"{target}: {record.nsamples} samples were written and {table.summary[0]} can be read")
            write_table(target, table)
            part.replace(target)
    except OSError as error:
        raise WriteError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)
    return record


def _put(file: IO[bytes], sha256: "hashlib._Hash", blocks: Iterator[bytes]) -> None:
    for block in blocks:
        file.write(block)
        sha256.update(block)


def _member(name: str, content: bytes) -> Iterator[bytes]:
    """A member of a tar: nothing in its header depends on the machine or the time."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    yield info.tobuf(tarfile.PAX_FORMAT)
    yield content
    yield bytes(-len(content) % tarfile.BLOCKSIZE)
