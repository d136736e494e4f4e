"""One shard wherever it lies: on a disk, behind a URL, or as the output of a command.

A plain local tar is read in place. Of a remote tar, stretches of neighbouring samples are fetched into the cache of the
node. What cannot be read from the middle is fetched whole: a `.tar.gz`, which is decompressed on the way, a command's
output, and what a web server without byte ranges sends.
"""

import functools
import hashlib
import logging
import os
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from data.shards import remote
from data.shards.cache import Cache, Sink
from data.shards.index import LARGEST_TABLE, REMAKE, TABLE, read_table
from data.shards.retry import DEFAULT, NoRangesError, SourceConfig
from data.shards.tar import REMEDY, Index, ShardError, cache_folder, walk

log = logging.getLogger(__name__)


class _NoTableError(Exception):
    """Nothing there, and nothing to keep."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard as it was when it was opened. Path, size and version name what the cache knows of it."""

    path: str
    """a path, a URL, or `pipe:COMMAND`"""
    size: int
    """bytes as it is stored; 0 where that is not known"""
    version: str
    """changes when the shard does, as far as file system or server say: times, an ETag, a checksum"""
    modified: int = 0
    """of a local one: nanoseconds since 1970"""
    sha256: str | None = None
    """from an index.json; compared where the whole shard is fetched"""
    source: SourceConfig = field(default=DEFAULT, repr=False, compare=False)

    @classmethod
    def at(cls, path: str, source: SourceConfig = DEFAULT) -> "Shard":
        """The shard at `path`.

        Raises:
            ShardError: nothing there that could be one.
        """
        if path.startswith(remote.PIPE):
            return cls(path, 0, "", source=source)
        if os.path.isdir(path):
            raise ShardError(
                f"{path}: is a folder; shards in it are '{path}/*.tar', and `python -m data.make_shards {path} SHARDS` "
                "makes shards of images"
            )
        if not remote.without_query(path).endswith((".tar", ".tar.gz")):
            raise ShardError(f"{path}: not named .tar or .tar.gz")
        if remote.is_remote(path):
            return cls(path, *remote.describe(path, source), source=source)
        try:
            status = os.stat(path)
        except OSError as error:
            raise ShardError(f"{path}: {error.strerror}; restore the shard or remove it from the list") from error
        if not status.st_size:
            raise ShardError(f"{path}: has 0 bytes; {REMEDY}")
        # the second time is the system's own: a copy may keep the first one of the file that it replaces
        version = f"{status.st_mtime_ns}\n{status.st_ctime_ns}"
        return cls(path, status.st_size, version, status.st_mtime_ns, source=source)

    @property
    def name(self) -> str:
        """The last part of its path: samples are `name/key`."""
        return remote.without_query(self.path).rpartition("/")[2]

    @property
    def plain(self) -> bool:
        """Whether it is read in place."""
        return not remote.is_remote(self.path) and not self._packed

    @property
    def in_parts(self) -> bool:
        """Whether parts of it can be fetched.

        Raises:
            ShardError: its server does not answer.
        """
        if self._packed or self.path.startswith(remote.PIPE) or not remote.is_remote(self.path):
            return False
        return remote.takes_ranges(self.path, self.source)

    @property
    def _packed(self) -> bool:
        return remote.without_query(self.path).endswith(".gz")

    @property
    def cache(self) -> Cache:
        """What is kept of shards."""
        return Cache(cache_folder() / "pieces-v1", int(self.source.cache_gb * 1e9))

    def entry(self, part: str) -> str:
        """Name of a part of the shard in the cache."""
        path = self.path if remote.is_remote(self.path) else os.path.realpath(self.path)
        identity = f"{path}\n{self.size}\n{self.version}\n{part}"
        return hashlib.sha256(identity.encode(errors="surrogateescape")).hexdigest()[:32]

    def open(self) -> int:
        """A descriptor of the plain tar, to be closed by the caller; fetches or decompresses it if need be.

        Raises:
            OSError: a local one cannot be read.
            ShardError: the shard is damaged or too large, does not come, or the cache folder cannot take it.
        """
        if self.plain:
            return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)

        def fill(sink: Sink) -> None:
            if self.size and not self._packed:
                sink.reserve(self.size)
            remote.fetch(self.path, sink, self.source, size=self.size, sha256=self.sha256)

        return self.cache.open(self.entry("whole"), fill)

    def part(self, start: int, end: int) -> int:
        """A descriptor of these bytes of a shard that is `in_parts`, to be closed by the caller.

        Raises:
            ShardError: it has changed, does not come, or the cache folder cannot take it.
        """

        def fill(sink: Sink) -> None:
            sink.write(remote.read_range(self.path, start, end, self.size, self.source))

        try:
            return self.cache.open(self.entry(f"{start}-{end}"), fill, end - start)
        except NoRangesError:
            raise ShardError(f"{self.path}: its server has stopped to send byte ranges; start again") from None

    def index(self) -> Index:
        """From the cache, the table beside the shard, or else its headers.

        Raises:
            ShardError: the shard cannot be used.
        """
        cached = self._load(Index._fields)
        if cached is not None:
            return Index(**cached)
        table = self._fetched_table() if remote.is_remote(self.path) else self._table()
        if table is not None:
            return table
        if self.in_parts:
            folder = self.path.rpartition("/")[0]
            say_once(
                f"{folder}: shards without a table SHARD.tar{TABLE} beside them are fetched whole, to see where their "
                "samples lie; `python -m data.check_shards SHARDS --write_index true` makes tables to put there"
            )
        try:
            index = walk(self.open(), self.path)
        except OSError as error:
            raise ShardError(f"{self.path}: {error.strerror}; restore the shard or remove it from the list") from error
        _keep(self._kept, index)
        return index

    def summary(self) -> np.ndarray:
        """The index' summary, alone if it is in the cache: (3,) int64.

        Raises:
            ShardError: the shard cannot be used.
        """
        cached = self._load(("summary",))
        return self.index().summary if cached is None else cached["summary"]

    def _table(self) -> Index | None:
        """From the file beside a local shard, if it is not older."""
        path = self.path + TABLE
        try:
            if os.stat(path).st_mtime_ns < self.modified:
                say_once(f"{path} is older than its shard and is not used; {REMAKE}")
                return None
            with open(path, "rb") as file:
                return self._checked(file.read(LARGEST_TABLE + 1), path)
        except OSError:
            return None

    def _fetched_table(self) -> Index | None:
        """From the file beside a remote shard, if there is one."""
        if self.path.startswith(remote.PIPE) or "?" in self.path:
            return None
        path = self.path + TABLE

        def fill(sink: Sink) -> None:
            content = remote.read_small(path, self.source, LARGEST_TABLE)
            if content is None:
                raise _NoTableError
            sink.write(content)

        try:
            descriptor = self.cache.open(self.entry("table"), fill)
        except _NoTableError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            content = os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)
        try:
            return self._checked(content, path)
        except ShardError:
            self.cache.remove(self.entry("table"))  # it may be the copy that is damaged
            raise

    def _checked(self, content: bytes, path: str) -> Index:
        index = read_table(content, path)
        if self.size and not self._packed and index.summary[2] != self.size:
            raise ShardError(
                f"{path}: is of a shard of {index.summary[2]} bytes, and {self.path} has {self.size}; {REMAKE}"
            )
        return index

    @property
    def _kept(self) -> Path:
        return cache_folder() / "index-v1" / (self.entry("index") + ".npz")

    def _load(self, names: tuple[str, ...]) -> dict[str, np.ndarray] | None:
        try:
            with np.load(self._kept) as arrays:
                return {name: arrays[name] for name in names}
        except Exception:  # missing, or damaged in whatever way: it is made again
            return None


@dataclass(frozen=True)
class ShardList:
    """Shards that were opened: S of them."""

    shards: list[Shard]
    counts: np.ndarray
    """(S,) int64: samples"""
    labelled: np.ndarray
    """(S,) int64: samples that have a label; -1 where that is not known before a label is read"""
    sizes: np.ndarray
    """(S,) int64: bytes as they are stored, of a command's output as it came"""
    unreadable: list[str] = field(default_factory=list)
    """shards that were named, cannot be opened, and are left out"""
    source: SourceConfig = DEFAULT

    @property
    def images(self) -> int:
        return int(self.counts.sum())

    def all_labelled(self) -> bool:
        """Whether every sample has a label.

        Raises:
            ShardError: a shard whose index.json does not say it cannot be asked.
        """
        if ((self.labelled >= 0) & (self.labelled < self.counts)).any():
            return False
        unknown = np.flatnonzero(self.labelled < 0)
        return all(self.shards[shard].summary()[1] == self.counts[shard] for shard in unknown)

    @property
    def mean_bytes(self) -> float:
        """Of a sample."""
        return float(self.sizes.sum()) / self.images


def _keep(target: Path, index: Index) -> None:
    part = target.with_name(f"{target.name}.{uuid.uuid4().hex}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            np.savez(file, **index._asdict())
        part.replace(target)
    except OSError as error:
        say_once(
            f"the indices of shards are not kept in {target.parent}: {error.strerror}; every start reads them anew"
        )


@functools.cache
def say_once(message: str) -> None:
    """Warns, and of each thing once."""
    log.warning(message)
