"""A shard is a tar on a disk, at a URL, or in the output of a command, or a local folder of images.

A local tar is read without a copy. From a remote tar, byte ranges with neighbouring samples are downloaded to the cache
of the node. Byte ranges are not possible for three kinds of shards, which are stored completely in the cache: a
`.tar.gz` (which is decompressed), the output of a command, and a file of a web server that lacks byte ranges.
"""

import functools
import hashlib
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tessera.data.shards import remote
from tessera.data.shards.cache import Cache, CacheError, Sink, cache_folder
from tessera.data.shards.errors import MAKE_INDEX_AGAIN, MAKE_SHARD_AGAIN, ShardError, unreadable
from tessera.data.shards.folder import list_images
from tessera.data.shards.index import LARGEST_TABLE, TABLE, parse_table
from tessera.data.shards.pieces import CHECKSUM, checksum, first_version, is_intact
from tessera.data.shards.retry import DEFAULT, NoRangesError, SourceConfig
from tessera.data.shards.tar import Index, scan_tar
from tessera.runtime.errors import printable
from tessera.runtime.files import atomic_write

ENDINGS = (".tar", ".tar.gz")
"""Ends of the file names of shards."""

log = logging.getLogger(__name__)


class _NoTableError(Exception):
    """Raised if no table exists beside a remote shard."""


@functools.lru_cache(maxsize=4096)
def _resolved(path: str) -> str:
    """Return an absolute path without symbolic links. The path of a shard is resolved for every sample."""
    return os.path.realpath(path)


@functools.lru_cache(maxsize=16)
def _cache(_: str | None, __: str | None, gigabytes: float) -> Cache:
    """Return the cache of shard data. The first arguments are the variables that `cache_folder` reads."""
    return Cache(cache_folder() / "pieces-v1", int(gigabytes * 1e9))


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard with its size and version at the time of opening.

    Path, size and version identify the entries of the shard in the cache.
    """

    path: str
    """Path, URL, or `pipe:COMMAND`. The path of a folder of images ends in a slash."""
    size: int
    """Size of the stored file, or of all images of a folder, in bytes; 0 if unknown."""
    version: str
    """String that changes when a file changes: file times, an ETag, a checksum or a hash; empty if unknown."""
    modified: int = 0
    """Modification time of a local shard in nanoseconds since 1970; 0 for a remote shard."""
    sha256: str | None = None
    """SHA-256 from an `index.json`; None if unknown. The SHA-256 is checked if the complete shard is downloaded."""
    classes: tuple[str, ...] | None = None
    """Class names of a folder of images; None for a tar, and for a folder without classes."""
    source: SourceConfig = field(default=DEFAULT, repr=False, compare=False)

    @classmethod
    def at(cls, path: str, source: SourceConfig = DEFAULT) -> "Shard":
        """Return the shard at `path`.

        Raises:
            ShardError: the file does not exist, is empty, or is not named `.tar` or `.tar.gz`; the server does not
                answer; or a folder of images cannot be used.
        """
        if path.startswith(remote.PIPE):
            return cls(path, 0, "", source=source)
        if path.endswith("/") and not remote.is_remote(path):
            return cls._of_folder(path, source)
        if not remote.without_query(path).endswith(ENDINGS):
            if not remote.is_remote(path) and not os.path.exists(path):
                where = "" if os.path.isabs(path) else f" in {os.getcwd()}"
                raise ShardError(f"{path}: does not exist{where}. Check the name of the file or folder.")
            raise ShardError(
                f"{path}: the file name must end in .tar or .tar.gz. Rename the file or remove it from the list."
            )
        if remote.is_remote(path):
            return cls(path, *remote.describe(path, source), source=source)
        try:
            status = os.stat(path)
        except OSError as error:
            raise unreadable(path, error) from error
        if not status.st_size:
            raise ShardError(f"{path}: has 0 bytes. {MAKE_SHARD_AGAIN}")
        # A file that replaces the shard may have the same modification time. Programs cannot set the change time, so
        # the change time shows the replacement.
        version = f"{status.st_mtime_ns}\n{status.st_ctime_ns}"
        return cls(path, status.st_size, version, status.st_mtime_ns, source=source)

    @classmethod
    def _of_folder(cls, path: str, source: SourceConfig) -> "Shard":
        listed = list_images(path)
        for count, reason in listed.left_out:
            warn_once(f"{path}: files that are left out: {count:,} ({reason})")
        size = int(listed.table.summary[2])
        shard = cls(path, size, listed.version, source=source, classes=listed.classes)
        if shard._load_cached(("summary",)) is None:
            shard._store(listed.table)
        return shard

    @property
    def name(self) -> str:
        """File name of the shard. In messages, the name of a sample is `FILE/KEY`."""
        return remote.without_query(self.path).removesuffix("/").rpartition("/")[2]

    @property
    def is_folder(self) -> bool:
        """True for a local folder of images."""
        return self.path.endswith("/") and not remote.is_remote(self.path)

    @property
    def is_local(self) -> bool:
        """True for an uncompressed local tar or a folder of images, which are read without a copy in the cache."""
        return not remote.is_remote(self.path) and not self._is_gzip

    @property
    def supports_ranges(self) -> bool:
        """True if byte ranges of the shard can be downloaded.

        Raises:
            ShardError: the server does not answer.
        """
        if self._is_gzip or self.path.startswith(remote.PIPE) or not remote.is_remote(self.path):
            return False
        return remote.supports_ranges(self.path, self.source)

    @property
    def _is_gzip(self) -> bool:
        return remote.without_query(self.path).endswith(".gz")

    @property
    def cache(self) -> Cache:
        """Cache of downloaded and decompressed shard data."""
        return _cache(os.environ.get("TESSERA_CACHE"), os.environ.get("XDG_CACHE_HOME"), self.source.cache_gb)

    def cache_name(self, part: str) -> str:
        """Return the name of the cache entry for a part of this shard, for example for a byte range."""
        path = self.path if remote.is_remote(self.path) else _resolved(os.path.abspath(self.path))
        identity = f"{path}\n{self.size}\n{self.version}\n{part}"
        return hashlib.sha256(identity.encode(errors="surrogateescape")).hexdigest()[:32]

    def open(self) -> int:
        """Return a file descriptor of the uncompressed tar, which the caller closes.

        If needed, the shard is first downloaded or decompressed into the cache.

        Raises:
            OSError: a local shard cannot be read.
            ShardError: the shard is damaged, is too large or cannot be downloaded, or the cache cannot be written.
        """
        if self.is_local:
            return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)

        def fill(sink: Sink) -> None:
            if self.size and not self._is_gzip:
                sink.reserve(self.size)
            check = None if self.sha256 else self._check_version  # a checksum says more than a version
            remote.fetch(self.path, sink, self.source, size=self.size, sha256=self.sha256, check=check)

        return self.cache.open(self.cache_name("whole"), fill)

    def open_range(self, start: int, end: int) -> int:
        """Return a descriptor of a cached file that begins with the bytes `start` to `end` - 1 of the shard.

        A checksum follows these bytes. A damaged file is downloaded again. The caller closes the descriptor.

        Raises:
            ShardError: the shard has changed or cannot be downloaded, or the cache cannot be written.
        """

        def fill(sink: Sink) -> None:
            data = remote.read_range(self.path, start, end, self.size, self.source, self._check_version)
            sink.write(data + checksum(data))

        name = self.cache_name(f"{start}-{end}")
        try:
            descriptor = self.cache.open(name, fill, end - start + CHECKSUM)
            if is_intact(descriptor, name, end - start):
                return descriptor
            os.close(descriptor)
            log.warning("%s: the copy of bytes %d to %d in the cache is damaged. They are downloaded again",
                        self.path, start, end)  # fmt: skip
            self.cache.remove(name)
            return self.cache.open(name, fill, end - start + CHECKSUM)
        except NoRangesError:
            raise ShardError(
                f"{self.path}: the server stopped supporting byte ranges during the run. Restart the run."
            ) from None

    def _check_version(self, stated: list[str]) -> None:
        """Compare the versions that a server states for this shard with the version of its first answer.

        The version of the first answer is the version at the time of opening. If the shard was opened from
        `index.json`, without a request, the version is kept in the cache with the data that it describes.

        Raises:
            ShardError: the shard has changed on the server.
        """
        if not stated or self.version.removeprefix("W/") in stated:
            return
        held = self.version
        if not held or held == self.sha256:
            held = first_version(self.cache, self.cache_name("version"), stated[0])
        if held not in stated:
            raise ShardError(
                f"{self.path}: has changed on the server (version {printable(stated[0])[:100]}, before "
                f"{printable(held)[:100]}). Restore the shard. If the change is intended, make its index.json again or "
                f"remove the folder {self.cache.folder}, and restart the run."
            )

    def verify(self) -> None:
        """Compare the SHA-256 of the stored file with `index.json`. A remote shard is downloaded completely.

        Raises:
            ShardError: the checksums differ, `index.json` has no checksum, or the shard cannot be read.
        """
        if self.is_folder or self.path.startswith(remote.PIPE):
            return
        if self.sha256 is None:
            raise ShardError(f"{self.path}: source.verify needs the SHA-256 in index.json. {MAKE_INDEX_AGAIN}")
        if remote.is_remote(self.path):
            os.close(self.open())
            return
        try:
            with open(self.path, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise unreadable(self.path, error) from error
        if found != self.sha256.lower():
            raise ShardError(
                f"{self.path}: its SHA-256 differs from index.json, so the shard or the index has changed. "
                f"{MAKE_SHARD_AGAIN} If the index is wrong: {MAKE_INDEX_AGAIN}"
            )

    def index(self) -> Index:
        """Return the index of the shard: from the cache, from the table beside the shard, or from the tar headers.

        Without a cache, a folder of images is listed again.

        Raises:
            ShardError: the shard cannot be used.
        """
        cached = self._load_cached(Index._fields)
        if cached is not None:
            return Index(**cached)
        if self.is_folder:
            listed = list_images(self.path)
            if listed.version != self.version:
                raise ShardError(f"{self.path}: has changed since it was opened. Restart the run.")
            return listed.table
        table = self._remote_table() if remote.is_remote(self.path) else self._local_table()
        if table is not None:
            return table
        if self.supports_ranges:
            folder = self.path.rpartition("/")[0]
            warn_once(
                f"{folder}: shards without a table SHARD.tar{TABLE} beside them are downloaded completely to find "
                "their samples. `tessera check_shards SHARDS --write_index true` writes tables for local copies."
            )
        try:
            index = scan_tar(self.open(), self.path)
        except OSError as error:
            raise unreadable(self.path, error) from error
        self._store(index)
        return index

    def summary(self) -> np.ndarray:
        """Return the counts and the size in `Index.summary`: (3,) int64.

        If the index is in the cache, only its summary is read.

        Raises:
            ShardError: the shard cannot be used.
        """
        cached = self._load_cached(("summary",))
        return self.index().summary if cached is None else cached["summary"]

    def _local_table(self) -> Index | None:
        """Read the table beside a local shard. Return None if no table exists or the table is older than the shard."""
        path = self.path + TABLE
        try:
            if os.stat(path).st_mtime_ns < self.modified:
                warn_once(f"{path} is older than its shard and is not used. {MAKE_INDEX_AGAIN}")
                return None
            with open(path, "rb") as file:
                return self._parse(file.read(LARGEST_TABLE + 1), path)
        except OSError:
            return None

    def _remote_table(self) -> Index | None:
        """Download the table beside a remote shard. Return None if no table exists."""
        if self.path.startswith(remote.PIPE) or "?" in self.path:
            return None
        path = self.path + TABLE

        def fill(sink: Sink) -> None:
            content = remote.read_small(path, self.source, LARGEST_TABLE)
            if content is None:
                raise _NoTableError
            sink.write(content)

        name = self.cache_name("table")
        for cached in (self.cache.find(name), None):
            try:
                descriptor = self.cache.open(name, fill) if cached is None else cached
            except _NoTableError:
                return None
            with os.fdopen(descriptor, "rb") as file:
                content = os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)
            try:
                return self._parse(content, path)
            except ShardError:
                self.cache.remove(name)  # the cached copy may be damaged, so discard the copy
                if cached is None:
                    raise
        raise AssertionError("unreachable: the second attempt returns or raises")

    def _parse(self, content: bytes, path: str) -> Index:
        index = parse_table(content, path)
        if self.size and not self._is_gzip and index.summary[2] != self.size:
            raise ShardError(
                f"{path}: belongs to a shard of {index.summary[2]} bytes, but {self.path} has {self.size} bytes. "
                f"{MAKE_INDEX_AGAIN}"
            )
        return index

    @property
    def _cached_index(self) -> Path:
        name = self.cache_name("index")
        return cache_folder() / "index-v1" / name[:2] / f"{name}.npz"  # folders stay short, because writing lists them

    def _load_cached(self, names: tuple[str, ...]) -> dict[str, np.ndarray] | None:
        try:
            with np.load(self._cached_index) as arrays:
                return {name: arrays[name] for name in names}
        except Exception:  # NumPy raises many kinds of errors for missing or damaged files
            return None

    def _store(self, index: Index) -> None:
        try:
            target = self._cached_index
            target.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(target) as path, path.open("wb") as file:
                np.savez(file, **index._asdict())
        except (OSError, CacheError) as error:
            reason = f"{cache_folder()}: {error.strerror}" if isinstance(error, OSError) else str(error)
            warn_once(
                f"the indices of shards cannot be stored: {reason}. "
                "Every start of a run reads the tar headers or lists the folders again."
            )


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning once. Later calls with the same message log nothing."""
    log.warning(message)
