"""A cache folder of bounded size, shared by all processes of a node.

The cache keeps downloaded and decompressed files. An entry is written as `NAME.part` and then renamed. The writer
holds a lock on the part file. Other processes wait for that lock. If a writer dies, the lock is released, and the
next process starts the entry again.

The file `bytes` holds the total size of the folder, including space reserved by writers. After a kill this number may
be too high, but never too low, because space is counted before it is used. A process that would exceed the limit scans
the folder, removes the least recently used entries until nine tenths of the limit are in use, and writes the correct
total. A process that holds a removed entry open can still read it; the next open downloads it again.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from data.shards.errors import ShardError

SPARE_BYTES = 2**28
"""Number of bytes on the disk that the cache leaves free."""
AHEAD = 2**26  # maximum number of bytes to reserve in advance for an entry of unknown size
KEPT = 0.9  # fraction of the cache limit down to which eviction shrinks the cache
PART = ".part"


def cache_folder() -> Path:
    """Return the cache folder: $TESSERA_CACHE, or `tessera` in the user's cache folder."""
    if folder := os.environ.get("TESSERA_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tessera"


class CacheError(ShardError):
    """Raised if an entry cannot be written to the cache folder."""


class Cache:
    """Cache in `folder`, whose entries take at most `limit` bytes in total. Threads and forks may share it.

    Args:
        folder: a folder on a local disk; created when it is needed.
        limit: maximum total size of the entries in bytes.
    """

    def __init__(self, folder: Path, limit: int):
        self.folder, self.limit = folder, limit

    def find(self, name: str, size: int | None = None) -> int | None:
        """Return a descriptor of an entry, or None if no entry has `size` bytes. The caller closes the descriptor."""
        try:
            descriptor = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        if size is not None and os.fstat(descriptor).st_size != size:  # another program has changed the file
            os.close(descriptor)
            self.remove(name)
            return None
        with suppress(OSError):
            os.utime(descriptor)
        return descriptor

    def open(self, name: str, fill: Callable[["Sink"], None], size: int | None = None) -> int:
        """Return a descriptor of an entry, which the caller closes.

        If the entry does not exist, one process fills the entry while other processes wait.

        Args:
            name: name of the entry, made of evenly distributed letters and digits, such as a hash.
            fill: writes the content. Its exceptions are raised here, and the entry is discarded.
            size: size of the entry in bytes; None if unknown.

        Raises:
            CacheError: the entry does not fit, or the folder cannot be written.
        """
        path = self._path(name)
        part = path.with_name(name + PART)
        try:
            while (found := self.find(name, size)) is None:
                path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                made = False
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                    if _names(part, descriptor):  # False if another process has renamed or removed the part file
                        made = self._make(descriptor, part, path, fill, size)
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
                finally:
                    if not made:
                        os.close(descriptor)
                if made:
                    return descriptor
            return found
        except OSError as error:
            raise _unwritable(self.folder, error) from error

    def remove(self, name: str) -> None:
        """Remove an entry if it exists."""
        with suppress(OSError):
            self._path(name).unlink()

    def _path(self, name: str) -> Path:
        return self.folder / name[:2] / name

    def _make(self, descriptor: int, part: Path, path: Path, fill: Callable[["Sink"], None], size: int | None) -> bool:
        """Fill the locked part file and rename it to `path`. Return False if the entry already exists."""
        if path.exists():  # another process made the entry before this process got the lock
            part.unlink()
            return False
        sink = Sink(self, descriptor)
        try:
            sink.reserve(size or 0)
            fill(sink)
            if size is not None and sink.written != size:
                raise CacheError(f"{part}: {sink.written} bytes were written, not {size}. Start again.")
            sink.close()
            part.rename(path)
            return True
        except BaseException:  # other processes may hold the part file open; empty it to free disk space
            part.unlink(missing_ok=True)
            sink.restart()
            sink.close()
            raise

    def resize(self, descriptor: int, old: int, new: int) -> None:
        """Resize a part file from `old` to `new` bytes and update the total size. Remove entries if necessary.

        Raises:
            CacheError: the part file exceeds the limit of the cache.
            OSError: the disk is full.
        """
        if new > self.limit:
            raise CacheError(
                f"{self.folder} may hold {self.limit / 1e9:.3g} GB, but one shard or block needs more than "
                f"{new / 1e9:.3g} GB. Raise source.cache_gb."
            )
        with self._counter() as counter:
            total = _read_total(counter)
            if total is None or total + new - old > self.limit:
                total = self._evict(int(KEPT * self.limit) - (new - old))
            if new > old and not self._fits(new - old):  # the disk is full, but the cache is not
                total = self._evict(total - (new - old) - self.limit // 10)
                if not self._fits(new - old):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if new < old:
                os.ftruncate(descriptor, new)
            os.pwrite(counter, b"%20d" % max(total + new - old, 0), 0)
            if new > old:
                _allocate(descriptor, old, new)

    def _fits(self, size: int) -> bool:
        return shutil.disk_usage(self.folder).free >= size + SPARE_BYTES

    @contextmanager
    def _counter(self) -> Iterator[int]:
        """Lock the file `bytes` and yield its descriptor."""
        descriptor = os.open(self.folder / "bytes", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)

    def _evict(self, target: int) -> int:
        """Remove the least recently used entries until at most `target` bytes are left.

        Return the remaining size in bytes, including the part files of running writers.
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
                    entries.append((status.st_mtime_ns, status.st_size, entry.path))
        for _, size, path in sorted(entries):
            if total <= target:
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
            total -= size
        return total


class Sink:
    """Writer of the content of one entry."""

    def __init__(self, cache: Cache, descriptor: int):
        self._cache, self._descriptor, self._reserved = cache, descriptor, 0
        self.written = 0
        os.ftruncate(descriptor, 0)  # a killed process may have left a partial write in the file

    def reserve(self, size: int) -> None:
        """Ensure that at least `size` bytes are reserved for the entry."""
        if size > self._reserved:
            self._resize(size)

    def write(self, data: bytes) -> None:
        """Append `data`.

        Raises:
            CacheError: the cache or its disk has no room.
        """
        if self.written + len(data) > self._reserved:
            ahead = min(2 * self._reserved, self._reserved + AHEAD, self._cache.limit)
            self._resize(max(self.written + len(data), ahead))
        view = memoryview(data)
        try:
            while view:
                count = os.pwrite(self._descriptor, view, self.written)
                self.written += count
                view = view[count:]
        except OSError as error:
            raise _unwritable(self._cache.folder, error) from error

    def restart(self) -> None:
        """Discard the content written so far, so that the next write starts at the beginning."""
        self.written = 0

    def close(self) -> None:
        """Release the reserved bytes that were not written."""
        self._resize(self.written)

    def _resize(self, size: int) -> None:
        if size == self._reserved:
            return
        try:
            self._cache.resize(self._descriptor, self._reserved, size)
        except OSError as error:
            raise _unwritable(self._cache.folder, error) from error
        self._reserved = size


def _names(path: Path, descriptor: int) -> bool:
    """Return True if `path` still names the open file `descriptor`."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _remove_if_abandoned(part: str) -> bool:
    """Remove a part file if no writer has locked it. Return True if none has."""
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


def _read_total(counter: int) -> int | None:
    """Return the total size in the file `bytes`; None if the file is new or damaged."""
    try:
        return int(os.pread(counter, 32, 0))
    except ValueError:
        return None


def _allocate(descriptor: int, old: int, new: int) -> None:
    """Extend a file from `old` to `new` bytes, and reserve disk space if the file system supports that."""
    try:
        os.posix_fallocate(descriptor, old, new - old)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        os.ftruncate(descriptor, new)


def _unwritable(folder: Path, error: OSError) -> CacheError:
    return CacheError(
        f"cannot write {folder}: {error.strerror}. Set TESSERA_CACHE to a local folder with space, "
        "or source.cache_gb to less than its disk has."
    )
