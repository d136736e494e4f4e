"""A cache folder of bounded size, shared by all processes of a node.

The cache keeps downloaded and decompressed shard data, one file per entry. A process writes an entry to `NAME.part`,
and renames the file to `NAME` when the entry is complete. The writer holds a lock on the part file, and all other
processes that need the entry wait for this lock. If the writer dies, the operating system releases the lock, and the
next process writes the entry from the beginning.

A writer scans the folder about twice for every 1 % of the size limit that is written. If more than 90 % of the limit is
in use, the writer removes the least recently used entries until 85 % is in use. Indices of shards stay 30 days longer
than other entries. If the disk is nearly full, the writer also removes entries. A process that has a removed entry open
can still read the entry. A process that needs the entry later makes it again.

An entry that holds a byte range or an index ends in a checksum, which detects damage by a power cut or a faulty disk.
"""

import errno
import fcntl
import functools
import logging
import os
import random
import shutil
import time
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from rich.filesize import decimal

from tessera.data.failures import EXHAUSTED, ResourceError
from tessera.runtime.machine import file_system
from tessera.runtime.preemption import check_wait

SPARE_BYTES = 2**28
"""Disk space in bytes that the cache leaves free."""
FULL, KEPT = 0.9, 0.85  # used fractions of the size limit at which eviction begins and ends
SCANNED = 0.005  # mean number of bytes written between two scans of the folder, as a fraction of the size limit
NETWORK_DISKS = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "afs", "panfs", "wekafs")
"""Types of file systems on network disks."""
PART = ".part"
INDEX = ".index"
"""Ending of the names of indices. An index is small, but may take a download of its shard to make."""
INDEX_LEAD = 30 * 86400 * 10**9  # nanoseconds by which an index counts as used later than it was
POLL = 0.05  # maximum number of seconds between two attempts to get a lock
RECENT = 10**10  # nanoseconds in which a further use of an entry is not recorded, because every record is a write
CHECKSUM = 4  # size in bytes of the CRC-32 at the end of an entry
READ_SIZE = 2**20  # number of bytes that are read at once to compute a checksum
MOST_INTACT = 2**16  # maximum number of cached files that a process remembers as intact

_intact: set[tuple[str, int]] = set()
"""Names and inode numbers of cached files whose checksums this process has verified."""
_versions: dict[str, str] = {}
"""Maps the name of a cache entry to the version identifier (such as an ETag) that is stored in the entry."""

log = logging.getLogger(__name__)


def is_on_network(folder: Path) -> bool:
    """Return True if a folder is known to be on a network disk."""
    return file_system(folder) in NETWORK_DISKS


def cache_folder() -> Path:
    """Return the folder of the cache.

    The folder is $TESSERA_CACHE if the variable is set, otherwise the subfolder `tessera` of the user's cache folder.

    Raises:
        CacheError: the variable is not set, and the user has no home folder.
    """
    if folder := os.environ.get("TESSERA_CACHE"):
        return Path(folder)
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "tessera"
    try:
        return Path.home() / ".cache" / "tessera"
    except RuntimeError as error:  # HOME is not set, and the user database has no entry
        raise CacheError("there is no home folder for the cache. Set TESSERA_CACHE to a local folder.") from error


class CacheError(ResourceError):
    """Raised if an entry cannot be written to the cache."""


def node_cache(gigabytes: float) -> "Cache":
    """Return the cache of the node, limited to `gigabytes` GB.

    Raises:
        CacheError: there is no folder for the cache.
    """
    return _node_cache(os.environ.get("TESSERA_CACHE"), os.environ.get("XDG_CACHE_HOME"), gigabytes)


@functools.lru_cache(maxsize=16)
def _node_cache(_: str | None, __: str | None, gigabytes: float) -> "Cache":
    """Return the cache of the node. The environment variables are arguments, so that a change gives another cache."""
    return Cache(cache_folder() / "pieces-v1", int(gigabytes * 1e9))


class Cache:
    """Cache of files in a folder, with a limit on their total size. Threads and forked processes may share a `Cache`.

    Args:
        folder: folder on a local disk. The folder is created when the first entry is written.
        limit: maximum total size of the entries in bytes.
    """

    def __init__(self, folder: Path, limit: int):
        self.folder, self.limit, self._folder = folder, limit, str(folder)

    def find(self, name: str, size: int | None = None) -> int | None:
        """Return a file descriptor of an entry, which the caller closes. Return None if the entry does not exist.

        If `size` is given and the entry does not have this size in bytes, the entry is removed and None is returned.
        """
        try:
            # Use a string, because this function runs for every sample, and making a `Path` is slow.
            descriptor = os.open(f"{self._folder}/{name[:2]}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        status = os.fstat(descriptor)
        if size is not None and status.st_size != size:  # another program has changed the file
            os.close(descriptor)
            self.remove(name)
            return None
        if abs(time.time_ns() - status.st_mtime_ns) > RECENT:
            with suppress(OSError):
                os.utime(descriptor)
        return descriptor

    def open(self, name: str, fill: Callable[["Sink"], None], size: int | None = None) -> int:
        """Return a file descriptor of an entry, which the caller closes.

        If the entry does not exist, one process writes the entry while all other processes wait.

        Args:
            name: name of the entry, such as a hash. The first two characters are also the name of the subfolder that
                holds the entry.
            fill: function that writes the content of the entry to a `Sink`. If the function raises an exception, the
                entry is discarded and the exception is raised again.
            size: size of the entry in bytes; None if unknown.

        Raises:
            CacheError: the entry does not fit into the cache, or the folder cannot be written.
        """
        if (size or 0) > self.limit:
            raise self.too_small(size or 0)
        try:
            if (found := self.find(name, size)) is not None:
                return found
            path = self._path(name)
            part = path.with_name(name + PART)
            while (found := self.find(name, size)) is None:
                path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                made = False
                try:
                    _lock(descriptor)
                    if _names(part, descriptor):  # another process may have renamed or removed the part file
                        made = self._make(descriptor, part, path, fill)
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
                finally:
                    if not made:
                        os.close(descriptor)
                if made:
                    return descriptor
            return found
        except OSError as error:
            raise _unwritable(self.folder, error) from error

    def open_checked(self, name: str, make: Callable[[], Iterable[bytes]], size: int | None = None) -> int:
        """Return a file descriptor of an entry that ends in a checksum. A damaged entry is made again.

        Args:
            name: name of the entry.
            make: function that returns the parts of the content, without the checksum.
            size: size of the content in bytes; None if unknown.

        Raises:
            CacheError: as for `open`, or the disk returns other bytes than were written.
        """

        def fill(sink: Sink) -> None:
            crc = 0
            for part in make():
                sink.write(part)
                crc = zlib.crc32(part, crc)
            sink.write(crc.to_bytes(CHECKSUM, "big"))

        for _ in range(2):
            descriptor = self.open(name, fill, None if size is None else size + CHECKSUM)
            if _is_intact(descriptor, name):
                return descriptor
            os.close(descriptor)
            log.warning("an entry of the cache %s is damaged, and is made again: %s", self.folder, name)
            self.remove(name)
        raise CacheError(f"the cache {self.folder} returns other bytes than were written. Check its disk.")

    def remove(self, name: str) -> None:
        """Remove an entry if it exists."""
        with suppress(OSError):
            self._path(name).unlink()

    def _path(self, name: str) -> Path:
        return self.folder / name[:2] / name

    def _make(self, descriptor: int, part: Path, path: Path, fill: Callable[["Sink"], None]) -> bool:
        """Fill the locked part file and rename it to `path`. Return False if the entry already exists, else True."""
        if path.exists():  # another process wrote the entry before this process got the lock
            part.unlink()
            return False
        sink = Sink(self, descriptor)
        try:
            fill(sink)
            part.rename(path)
            return True
        except BaseException:
            # Truncate the removed file, because it occupies disk space while other processes have it open.
            part.unlink(missing_ok=True)
            sink.restart()
            raise

    def too_small(self, size: int) -> CacheError:
        """Return the error for an entry of `size` bytes, which does not fit into the cache."""
        return CacheError(
            f"the cache {self.folder} is limited to {decimal(self.limit)}, but one shard or block needs at "
            f"least {decimal(size)}. Raise source.cache_gb."
        )

    def make_room(self, size: int) -> None:
        """Make room for `size` bytes: remove old entries if the cache or the disk is nearly full.

        Raises:
            OSError: the disk is still full after old entries were removed, or the folder cannot be read.
        """
        missing = size + SPARE_BYTES - shutil.disk_usage(self.folder).free
        if missing > 0 or random.SystemRandom().random() * SCANNED * self.limit < size:
            self._evict(size, missing)
            if missing > 0 and size + SPARE_BYTES > shutil.disk_usage(self.folder).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _evict(self, size: int, missing: int) -> None:
        """Remove the least recently used entries if `size` more bytes would fill the cache, or the disk lacks space.

        `missing` is the number of bytes that the disk lacks, and is 0 or negative if the disk has enough space.
        """
        total, entries = 0, []
        for folder in os.scandir(self.folder):
            if not folder.is_dir():
                continue
            for entry in os.scandir(folder.path):
                try:
                    status = entry.stat()
                    if entry.name.endswith(PART) and _remove_if_abandoned(entry.path):
                        continue
                except FileNotFoundError:
                    continue
                total += status.st_size
                if not entry.name.endswith(PART):
                    used = status.st_mtime_ns + INDEX_LEAD * entry.name.endswith(INDEX)
                    entries.append((used, status.st_size, entry.path))
        target = total if total + size <= FULL * self.limit else KEPT * self.limit - size
        if missing > 0:
            target = min(target, total - missing - self.limit // 10)
        for _, occupied, path in sorted(entries):
            if total <= target:
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
            total -= occupied


class Sink:
    """Writes the content of one cache entry."""

    def __init__(self, cache: Cache, descriptor: int):
        self._cache, self._descriptor = cache, descriptor
        self.restart()  # remove content that a killed process may have left in the file

    def write(self, data: bytes) -> None:
        """Append `data` to the entry.

        Raises:
            CacheError: the data does not fit into the cache or on its disk.
        """
        if self.written + len(data) > self._cache.limit:
            raise self._cache.too_small(self.written + len(data))
        view = memoryview(data)
        try:
            self._cache.make_room(len(data))
            while view:
                count = os.pwrite(self._descriptor, view, self.written)
                self.written += count
                view = view[count:]
        except OSError as error:
            raise _unwritable(self._cache.folder, error) from error

    def restart(self) -> None:
        """Discard the content written so far, so that the next write starts at the beginning."""
        self.written = 0
        os.ftruncate(self._descriptor, 0)


def _lock(descriptor: int) -> None:
    """Lock a file. Wait for the process that holds the lock, but not if this process was asked to stop."""
    start, pause = time.monotonic(), 0.001
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            check_wait(start)
        time.sleep(pause)
        pause = min(2 * pause, POLL)


def _names(path: Path, descriptor: int) -> bool:
    """Return True if `path` still refers to the open file `descriptor`."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _remove_if_abandoned(part: str) -> bool:
    """Remove a part file that no writer has locked, and return True. Return False if a writer has locked the file."""
    descriptor = os.open(part, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _names(Path(part), descriptor):
            os.unlink(part)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def _unwritable(folder: Path, error: OSError) -> CacheError:
    if error.errno in EXHAUSTED and error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return CacheError(
            f"cannot use the cache {folder}: {error.strerror}. Raise the limit (`ulimit -n` for open files), or use "
            "fewer loader workers."
        )
    return CacheError(
        f"cannot write to the cache {folder}: {error.strerror}. Set TESSERA_CACHE to a local folder with more free "
        "space, or set source.cache_gb to less than the free space of the disk."
    )


def _is_intact(descriptor: int, name: str) -> bool:
    """Return True if a cached file ends in the CRC-32 of the bytes before it. Each process checks a file once."""
    status = os.fstat(descriptor)
    file = (name, status.st_ino)
    if file in _intact:
        return True
    size, crc, place = status.st_size - CHECKSUM, 0, 0
    while place < size and (data := os.pread(descriptor, min(READ_SIZE, size - place), place)):
        crc, place = zlib.crc32(data, crc), place + len(data)
    if place != size or crc.to_bytes(CHECKSUM, "big") != os.pread(descriptor, CHECKSUM, size):
        return False
    if len(_intact) >= MOST_INTACT:
        _intact.clear()
    _intact.add(file)
    return True


def first_version(cache: Cache, name: str, version: str) -> str:
    """Return the version identifier in the cache entry `name`. If the entry does not exist, store `version` in it."""
    if name not in _versions:
        with os.fdopen(cache.open(name, lambda sink: sink.write(version.encode())), "rb") as file:
            _versions[name] = os.pread(file.fileno(), 2**16, 0).decode(errors="replace")
    return _versions[name]
