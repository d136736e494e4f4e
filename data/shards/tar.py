"""One tar: where its samples lie.

The layout is that of webdataset: neighbouring members with the same name up to the first dot are one sample. Only
members that hold an image or a label are ever read, as bytes at an offset; nothing is unpickled, and no member's name
becomes a path.
"""

import io
import logging
import os
import re
import tarfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from runtime.errors import UserError

IMAGES = ("jpg", "jpeg", "png", "webp")
OTHER_IMAGES = ("bmp", "gif", "tif", "tiff", "heic", "avif", "jp2")  # not read, and worth a word
LABEL = "cls"
LARGEST_MEMBER = 256 * 2**20  # bytes of one image or label
LARGEST_HEADER = 2**20  # bytes of an extended header; names and sizes need less
REMEDY = "make the shard again or remove it"

log = logging.getLogger(__name__)


class ShardError(UserError, ValueError):
    """A shard that cannot be used. The message names it, says what to do, and is meant for the user."""


def cache_folder() -> Path:
    """Where indices, and what is fetched or unpacked, are kept: $TESSERA_CACHE, else `tessera` in the user's cache."""
    if folder := os.environ.get("TESSERA_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tessera"


class Index(NamedTuple):
    """Where the S samples of one tar lie."""

    keys: np.ndarray
    """uint8: all names one after the other, in UTF-8"""
    ends: np.ndarray
    """(S,) int64: where each name ends"""
    images: np.ndarray
    """(S, 2) int64: offset and size in bytes"""
    labels: np.ndarray
    """(S, 2) int64: the same, or -1 for a sample without a label"""
    summary: np.ndarray
    """(3,) int64: samples, samples with a label, bytes of the tar"""

    def key(self, sample: int) -> str:
        start = self.ends[sample - 1] if sample else 0
        return self.keys[start : self.ends[sample]].tobytes().decode(errors="backslashreplace")


class _Headers(io.BufferedReader):
    """A tar for `tarfile`, which by itself would read a header of any claimed size into memory."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= LARGEST_HEADER:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return super().read(size)


def walk(path: str | int, shard: str) -> Index:
    """Reads the headers of the plain tar at `path`, or of an open one, which it closes; errors speak of `shard`.

    A tar that stops after a whole member but without the end mark is accepted with a warning.

    Raises:
        ShardError: not a tar, cut short, a broken header, a member that is too large or there twice, no images.
    """
    samples: list[tuple[str, dict[str, tuple[int, int]]]] = []
    unread: list[str] = []
    try:
        size = os.path.getsize(path)
        with _Headers(io.FileIO(path)) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            while (member := archive.next()) is not None:
                archive.members.clear()  # pyright: ignore[reportAttributeAccessIssue]  # they take a kilobyte each
                end = member.offset_data + member.size
                if member.size < 0 or end > size:
                    raise ShardError(f"{shard}: truncated at byte {size}, expected {end} ({member.name}); {REMEDY}")
                if not _add(samples, member, shard) and _ending(member.name) in (*IMAGES, *OTHER_IMAGES):
                    unread.append(member.name)
            file.seek(archive.offset)
            rest = file.read(tarfile.BLOCKSIZE)
    except ShardError:
        raise
    except OSError as error:
        raise ShardError(f"{shard}: {error.strerror}; restore the shard or remove it from the list") from error
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:  # all of them come from bad headers
        raise ShardError(f"{shard}: not a whole tar ({error}); {REMEDY}") from error
    if any(rest):
        raise ShardError(f"{shard}: broken header at byte {archive.offset}; {REMEDY}")
    if not rest:
        log.warning("%s: ends at byte %d without an end mark; it may have been longer", shard, size)
    elif size - archive.offset > LARGEST_HEADER:
        log.warning("%s: the %d bytes after its end mark are not read", shard, size - archive.offset)
    if unread and samples:
        log.warning(
            "%s: %d images are not read, the first %s: KEY has no dot, and the ending is %s",
            shard, len(unread), unread[0], ", ".join(IMAGES),
        )  # fmt: skip
    return _index(samples, size, shard)


def _ending(name: str) -> str:
    return name.rpartition(".")[2].lower()


def _add(samples: list[tuple[str, dict[str, tuple[int, int]]]], member: tarfile.TarInfo, shard: str) -> bool:
    """Adds a member to the last sample or to a new one, if it is an image or a label; says whether it is."""
    found = re.match(r"((?:.*/|)[^.]+)[.]([^/]*)$", member.name)  # webdataset's rule
    if not found or member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        return False
    key, extension = found[1], found[2].lower()
    if not samples or samples[-1][0] != key:
        samples.append((key, {}))
    if extension not in (*IMAGES, LABEL):
        return False
    if extension in samples[-1][1]:
        raise ShardError(f"{shard}: holds {member.name} twice; make the shard again with one name a sample")
    if member.size > LARGEST_MEMBER:
        raise ShardError(f"{shard}: {member.name} has {member.size} bytes, more than {LARGEST_MEMBER}; leave it out")
    samples[-1][1][extension] = (member.offset_data, member.size)
    return True


def _index(samples: list[tuple[str, dict[str, tuple[int, int]]]], size: int, shard: str) -> Index:
    keys, images, labels = [], [], []
    for key, members in samples:
        if image := next((place for extension, place in members.items() if extension != LABEL), None):
            keys.append(key.encode(errors="surrogateescape"))
            images.append(image)
            labels.append(members.get(LABEL, (-1, -1)))
    if not images:
        names = " or ".join(f"KEY.{extension}" for extension in IMAGES)
        raise ShardError(f"{shard}: holds no images; name them {names}, without a dot in KEY")
    return Index(
        keys=np.frombuffer(b"".join(keys), dtype=np.uint8),
        ends=np.cumsum([len(key) for key in keys]),
        images=np.array(images, dtype=np.int64),
        labels=np.array(labels, dtype=np.int64),
        summary=np.array([len(images), sum(offset >= 0 for offset, _ in labels), size], dtype=np.int64),
    )


def is_member(header: bytes, key: str, size: int) -> bool:
    """Whether 512 bytes are the header of a file of `size` bytes that belongs to the sample `key`."""
    plain = header.startswith(key.encode() + b".") and header[124:136].rstrip(b" \0") == b"%011o" % size
    if plain and header[156:157] in (tarfile.REGTYPE, tarfile.AREGTYPE):
        return True  # nearly always, and quickly
    try:
        found = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    short = key.isascii() and len(key) < tarfile.LENGTH_NAME - 8  # others stand in a header of their own, before it
    named = found.name.startswith(key + ".") or not short
    return found.size == size and found.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and named
