"""One tar shard: where its samples lie, found once and kept in a cache folder.

The layout is that of webdataset: neighbouring members with the same name up to the first dot are one sample. Only
members that hold an image or a label are ever read, as bytes at an offset; nothing is unpickled, and no member's name
becomes a path. A `.tar.gz` cannot be read from the middle, so it is decompressed once into the cache folder.
"""

import fcntl
import functools
import gzip
import hashlib
import io
import logging
import os
import re
import shutil
import tarfile
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

IMAGES = ("jpg", "jpeg", "png", "webp")
OTHER_IMAGES = ("bmp", "gif", "tif", "tiff", "heic", "avif", "jp2")  # not read, and worth a word
LABEL = "cls"
LARGEST_MEMBER = 256 * 2**20  # bytes of one image or label
LARGEST_HEADER = 2**20  # bytes of an extended header; names and sizes need less
LARGEST_UNPACKED = 64 * 2**30  # bytes of one decompressed shard
SPARED = 2**28  # bytes of disk that decompressing leaves free
REMEDY = "make the shard again or remove it"

log = logging.getLogger(__name__)


class ShardError(ValueError):
    """A shard that cannot be used. The message names it, says what to do, and is meant for the user."""


def cache_folder() -> Path:
    """Where indices and decompressed shards are kept: $TESSERA_CACHE, else `tessera` in the user's cache."""
    if folder := os.environ.get("TESSERA_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tessera"


@contextmanager
def exclusive(target: Path) -> Iterator[None]:
    """Makes the folder of `target` and holds a lock on it against other processes and threads.

    Raises:
        ShardError: the folder cannot be written to, also by what runs under the lock.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_name(target.name + ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise ShardError(f"cannot write {target}: {error}; set TESSERA_CACHE to a local folder with space") from error


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


def walk(path: str, shard: str) -> Index:
    """Reads the headers of the plain tar at `path`; errors speak of `shard`.

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


@dataclass(frozen=True)
class Shard:
    """A tar file as it was when it was opened. Path, size and times of change name what the cache knows of it."""

    path: str
    size: int
    modified: int
    """nanoseconds since 1970"""
    changed: int
    """the same, of the last change by the system's own clock: a copy may keep the time of the file that it replaces"""

    @classmethod
    def at(cls, path: str) -> "Shard":
        """The shard at `path`.

        Raises:
            ShardError: nothing there that could be one.
        """
        if not path.endswith((".tar", ".tar.gz")) or os.path.isdir(path):
            raise ShardError(f"{path}: not named .tar or .tar.gz; those of a folder are FOLDER/*.tar")
        try:
            status = os.stat(path)
        except OSError as error:
            raise ShardError(f"{path}: {error.strerror}; restore the shard or remove it from the list") from error
        if not status.st_size:
            raise ShardError(f"{path}: has 0 bytes; {REMEDY}")
        return cls(path, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    def tar(self) -> str:
        """Path of the plain tar; decompresses a `.tar.gz` if that has not been done yet.

        Raises:
            ShardError: the shard is damaged or too large, or the cache folder cannot take it.
        """
        if not self.path.endswith(".gz"):
            return self.path
        target = self._cached("unpacked-v1", ".tar")
        if not target.exists():
            with exclusive(target):
                part = target.with_name(target.name + ".part")  # the lock lets us overwrite what a killed process left
                if not target.exists():
                    try:
                        _unpack(self.path, part)
                        part.replace(target)
                    finally:  # what did not fit must not keep the disk full
                        part.unlink(missing_ok=True)
        return str(target)

    def index(self) -> Index:
        """From the cache, or else from the headers.

        Raises:
            ShardError: the shard cannot be used.
        """
        cached = self._load(Index._fields)
        if cached is not None:
            return Index(**cached)
        index = walk(self.tar(), self.path)
        _keep(self._cached("index-v1", ".npz"), index)
        return index

    def summary(self) -> np.ndarray:
        """The index' summary, alone if it is in the cache: (3,) int64.

        Raises:
            ShardError: the shard cannot be used.
        """
        cached = self._load(("summary",))
        return self.index().summary if cached is None else cached["summary"]

    def _cached(self, folder: str, ending: str) -> Path:
        identity = f"{os.path.realpath(self.path)}\n{self.size}\n{self.modified}\n{self.changed}"
        digest = hashlib.sha256(identity.encode(errors="surrogateescape")).hexdigest()
        return cache_folder() / folder / (digest[:32] + ending)

    def _load(self, names: tuple[str, ...]) -> dict[str, np.ndarray] | None:
        try:
            with np.load(self._cached("index-v1", ".npz")) as arrays:
                return {name: arrays[name] for name in names}
        except Exception:  # missing, or damaged in whatever way: it is made again
            return None


def _keep(target: Path, index: Index) -> None:
    part = target.with_name(f"{target.name}.{uuid.uuid4().hex}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            np.savez(file, **index._asdict())
        part.replace(target)
    except OSError as error:
        _warn_once(
            f"the indices of shards are not kept in {target.parent}: {error.strerror}; every start reads them anew"
        )


@functools.cache
def _warn_once(message: str) -> None:
    log.warning(message)


def _unpack(path: str, target: Path) -> None:
    """Decompresses `path`; leaves OSError to trouble with `target`."""
    limit = min(LARGEST_UNPACKED, shutil.disk_usage(target.parent).free - SPARED)
    done = 0
    with target.open("wb") as sink:
        for chunk in _chunks(path):
            done += len(chunk)
            if done > limit:
                raise ShardError(
                    f"{path}: needs more than the {limit} bytes that one shard may take in {target.parent}"
                )
            sink.write(chunk)


def _chunks(path: str) -> Iterator[bytes]:
    try:
        with gzip.open(path) as source:
            while chunk := source.read(2**20):
                yield chunk
    except (OSError, EOFError, zlib.error) as error:
        raise ShardError(f"{path}: cannot be decompressed ({error}); {REMEDY}") from error
