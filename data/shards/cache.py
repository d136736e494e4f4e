"""A folder of files that stays below a bound: what was fetched or unpacked once, for all processes of a node.

An entry is written as `NAME.part` and renamed. The lock is on that part: a second process waits for the first, and a
fetcher that dies leaves a part without a lock, which the next one takes over. `bytes` counts what the folder holds, and
what is still being written. It may say too much after a kill and never too little: room is counted before it is used.
Whoever would exceed the bound looks at all entries, removes those that were not used for longest, down to nine tenths,
and writes the true count. Who has an entry open keeps it, and fetches it again the next time.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from data.shards.tar import ShardError

SPARED = 2**28  # bytes of disk that are left free
AHEAD = 2**26  # bytes; at most so many are counted before they come, where the size is not known
KEPT = 0.9  # of the bound, after removing
PART = ".part"


class CacheError(ShardError):
    """The folder cannot take an entry."""


class Cache:
    """The entries below `folder`, which together take at most `limit` bytes. Usable from threads and after a fork.

    Args:
        folder: on a disk of this node; it is made when it is needed.
        limit: bytes.
    """

    def __init__(self, folder: Path, limit: int):
        self.folder, self.limit = folder, limit

    def find(self, name: str, size: int | None = None) -> int | None:
        """A descriptor of the entry, to be closed by the caller; None if there is none of that size in bytes."""
        try:
            descriptor = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        if size is not None and os.fstat(descriptor).st_size != size:  # something else has written to it
            os.close(descriptor)
            self.remove(name)
            return None
        with suppress(OSError):
            os.utime(descriptor)
        return descriptor

    def open(self, name: str, fill: Callable[["Sink"], None], size: int | None = None) -> int:
        """A descriptor of the entry, to be closed by the caller; one process makes it by `fill`, the others wait.

        Args:
            name: letters and digits, evenly spread.
            fill: writes the content; what it raises is raised here, and nothing is kept.
            size: of the entry in bytes, where it is known.

        Raises:
            CacheError: it does not fit, or the folder cannot be written to.
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
                    if _is(descriptor, part):  # else another one has finished it, or given up
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
        """Forgets an entry, if it is there."""
        with suppress(OSError):
            self._path(name).unlink()

    def _path(self, name: str) -> Path:
        return self.folder / name[:2] / name

    def _make(self, descriptor: int, part: Path, path: Path, fill: Callable[["Sink"], None], size: int | None) -> bool:
        """Under the lock on `part`; whether the descriptor is now that of the entry."""
        if path.exists():  # made between the look and the lock
            part.unlink()
            return False
        sink = Sink(self, descriptor)
        try:
            sink.reserve(size or 0)
            fill(sink)
            if size is not None and sink.written != size:
                raise CacheError(f"{part}: {sink.written} bytes were written, not {size}")
            sink.close()
            part.rename(path)
            return True
        except BaseException:  # what did not fit must not keep the disk full
            part.unlink(missing_ok=True)
            sink.restart()
            sink.close()
            raise

    def count(self, descriptor: int, old: int, new: int) -> None:
        """Makes the file of a part `new` bytes long, where it was counted as `old`, and makes room for it.

        Raises:
            CacheError: it is larger than the bound, or than the disk.
        """
        if new > self.limit:
            raise CacheError(
                f"{self.folder} may hold {self.limit / 1e9:.3g} GB, and one shard or block needs more than "
                f"{new / 1e9:.3g} GB; raise source.cache_gb"
            )
        with self._counter() as counter:
            total = _number(counter)
            if total is None or total + new - old > self.limit:
                total = self._evict(int(KEPT * self.limit) - (new - old))
            if new > old and not self._fits(new - old):  # the disk is smaller than the bound
                total = self._evict(total - (new - old) - self.limit // 10)
                if not self._fits(new - old):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if new < old:
                os.ftruncate(descriptor, new)
            os.pwrite(counter, b"%20d" % max(total + new - old, 0), 0)
            if new > old:
                _allocate(descriptor, old, new)

    def _fits(self, size: int) -> bool:
        return shutil.disk_usage(self.folder).free >= size + SPARED

    @contextmanager
    def _counter(self) -> Iterator[int]:
        descriptor = os.open(self.folder / "bytes", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)

    def _evict(self, target: int) -> int:
        """Removes entries, those unused for longest first, until `target` bytes are left or none.

        Returns what is left, in bytes, parts included.
        """
        total, entries = 0, []
        for folder in os.scandir(self.folder):
            if not folder.is_dir():
                continue
            for entry in os.scandir(folder.path):
                try:
                    status = entry.stat()
                    if entry.name.endswith(PART) and _dead(entry.path):
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
    """Where the content of an entry is written."""

    def __init__(self, cache: Cache, descriptor: int):
        self._cache, self._descriptor, self._reserved = cache, descriptor, 0
        self.written = 0
        os.ftruncate(descriptor, 0)  # what a killed process left

    def reserve(self, size: int) -> None:
        """Makes room for `size` bytes in all."""
        if size > self._reserved:
            self._resize(size)

    def write(self, data: bytes) -> None:
        """Adds `data`.

        Raises:
            CacheError: there is no room.
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
        """Begins anew."""
        self.written = 0

    def close(self) -> None:
        """Gives back what was not used."""
        self._resize(self.written)

    def _resize(self, size: int) -> None:
        if size == self._reserved:
            return
        try:
            self._cache.count(self._descriptor, self._reserved, size)
        except OSError as error:
            raise _unwritable(self._cache.folder, error) from error
        self._reserved = size


def _is(descriptor: int, path: Path) -> bool:
    """Whether `path` names the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _dead(part: str) -> bool:
    """Removes a part whose writer is gone; says whether it was one."""
    descriptor = os.open(part, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is(descriptor, Path(part)):
            os.unlink(part)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def _number(counter: int) -> int | None:
    try:
        return int(os.pread(counter, 32, 0))
    except ValueError:  # new, or damaged
        return None


def _allocate(descriptor: int, old: int, new: int) -> None:
    """Makes the file `new` bytes long, on the disk as well where that is possible."""
    try:
        os.posix_fallocate(descriptor, old, new - old)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        os.ftruncate(descriptor, new)


def _unwritable(folder: Path, error: OSError) -> CacheError:
    return CacheError(
        f"cannot write {folder}: {error.strerror}; set TESSERA_CACHE to a local folder with space, "
        "or source.cache_gb to less than its disk has"
    )
