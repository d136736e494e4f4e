"""Samples of a list of shards, by number, wherever the shards lie.

The order takes blocks of neighbours, so a block of a remote shard is one request, kept in the cache for the other
workers and processes of the node; small blocks of data that the cache can hold are read with their neighbours.
"""

import functools
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from data.shards.cache import CacheError
from data.shards.index import REMAKE
from data.shards.shard import ShardList
from data.shards.tar import REMEDY, Index, ShardError, is_member

KEPT_SAMPLES = 2_000_000  # whose places a reader remembers, about 60 bytes each
KEPT_FILES = 128
LARGEST_PART = 64 * 2**20  # bytes of one request
USUAL_PART = 8 * 2**20  # bytes, where the size of a request is free
FETCHERS = 4  # requests of one reader at a time
MOST_LOST = 10  # shards in a row
HEADER = 512  # bytes before each member

log = logging.getLogger(__name__)
T = TypeVar("T")


class UnreadableError(ShardError):
    """A shard that has become unreadable, and is to be skipped."""


class _File:
    """An open tar, closed when the last reference goes."""

    def __init__(self, path: str):
        self.descriptor = -1
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(self.descriptor)
        self.size, self.modified = status.st_size, status.st_mtime_ns

    def __del__(self):
        if self.descriptor >= 0:
            os.close(self.descriptor)


class Reader:
    """Reads samples of a list of shards. It opens files when they are first needed: make one in each process.

    Its methods raise `UnreadableError` for a shard that has vanished, has changed or does not come, if such shards are
    to be skipped, and else ShardError; and ShardError for the tenth in a row, or when no shard is left.

    Args:
        readers: of this process, which share what is kept in memory and open.
        block: neighbouring samples that are read at about the same time (see `Order`); None if all are, one after the
            other.
    """

    def __init__(self, shards: ShardList, readers: int = 1, block: int | None = None):
        self._shards = shards
        kept = max(KEPT_SAMPLES // int(shards.counts.max()) // readers, 4)
        self._index = functools.lru_cache(kept)(functools.partial(_load_index, shards))
        files = max(KEPT_FILES // readers, 1)
        self._file = functools.lru_cache(files)(lambda shard: _File(shards.shards[shard].path))
        self._plain = functools.lru_cache(2**16)(lambda shard: shards.shards[shard].plain)
        total = int(shards.sizes.sum())
        usual = max(USUAL_PART * shards.images // max(total, 1), 1)  # samples
        if block is None:
            self._together = usual
        elif total <= shards.source.cache_gb * 1e9 / 2:  # all of it will be read and can be kept
            self._together = max(usual // block, 1) * block
        else:
            self._together = block
        self._lost: dict[int, str] = {}
        self._lost_in_a_row = 0

    def name(self, shard: int, sample: int) -> str:
        """`shard.tar/key`."""
        return f"{self._shards.shards[shard].name}/{self._tried(shard, lambda: self._index(shard)).key(sample)}"

    def image(self, shard: int, sample: int) -> bytes:
        """The encoded image."""

        def read() -> bytes:
            offset, size = map(int, self._index(shard).images[sample])
            return self._member(shard, sample, offset, size, size)

        return self._tried(shard, read)

    def label(self, shard: int, sample: int) -> int:
        """The class of the sample.

        Raises:
            ShardError: it has none, or not an integer.
        """
        offset, size = map(int, self._tried(shard, lambda: self._index(shard)).labels[sample])
        if offset < 0:
            raise ShardError(f"labels are needed here, and {self.name(shard, sample)} has none; add KEY.cls members")
        text = self._tried(shard, lambda: self._member(shard, sample, offset, size, min(size, 64)))
        try:
            return int(np.int64(int(text)))
        except (ValueError, OverflowError):
            name = self.name(shard, sample)
            raise ShardError(f"labels are needed here, and that of {name} is {text!r}, not an integer") from None

    def prepare(self, shards: Sequence[int] | np.ndarray, samples: Sequence[int] | np.ndarray) -> None:
        """Fetches what these samples need and the cache lacks, several requests at a time.

        What fails here is said where the sample is read.
        """
        wanted = [
            (int(shard), int(sample)) for shard, sample in zip(shards, samples, strict=True) if not self._plain(shard)
        ]
        if not wanted:
            return
        with ThreadPoolExecutor(FETCHERS) as pool:
            self._all(pool, self._index, {(shard,) for shard, _ in wanted})
            parts = {(shard, *part) for (shard, _), part in self._all(pool, self._part, set(wanted))}
            self._all(pool, lambda *part: os.close(self._open(*part)[0]), parts)

    def _all(self, pool: ThreadPoolExecutor, do: Callable[..., T], calls: set[Any]) -> list[tuple[Any, T]]:
        """What `do` gives for each call, whose first argument is a shard; without the shards that are lost."""

        def one(call: tuple[int, ...]) -> list[tuple[Any, T]]:
            try:
                return [(call, self._tried(call[0], lambda: do(*call)))]
            except UnreadableError:
                return []

        return [given for found in pool.map(one, calls) for given in found]

    def _tried(self, shard: int, do: Callable[[], T]) -> T:
        """What `do` gives; a shard that has failed is not asked again."""
        try:
            if shard in self._lost:
                raise ShardError(self._lost[shard])
            given = do()
            self._lost_in_a_row = 0
            return given
        except CacheError:
            raise
        except ShardError as error:
            if self._shards.source.unreadable == "stop":
                raise
            self._lost_in_a_row += shard not in self._lost
            self._lost[shard] = str(error)
            if self._lost_in_a_row >= MOST_LOST or len(self._lost) == len(self._shards.shards):
                raise ShardError(f"{self._lost_in_a_row} shards in a row cannot be read; the last: {error}") from error
            raise UnreadableError(str(error)) from error

    def _member(self, shard: int, sample: int, offset: int, size: int, wanted: int) -> bytes:
        """The first `wanted` bytes of a member, once its header is found before it."""
        index, plain = self._index(shard), self._plain(shard)
        for _ in range(1 if plain else 2):
            header, data, name = (self._in_place if plain else self._fetched)(shard, sample, offset, wanted)
            if len(data) == wanted and is_member(header, index.key(sample), size):
                return data
            if not plain:
                self._shards.shards[shard].cache.remove(name)  # damaged on the disk, perhaps
        raise ShardError(
            f"{self._shards.shards[shard].path}: {index.key(sample)} is not at byte {offset}, where the index says; "
            f"the shard has changed, or its index is of another one: {REMAKE}"
        )

    def _fetched(self, shard: int, sample: int, offset: int, wanted: int) -> tuple[bytes, bytes, str]:
        """A member's header and the beginning of its content; and the name of the entry of the cache with both."""
        start, end = offset - HEADER, offset + wanted
        part = self._part(shard, sample)
        if not part[0] <= start <= end <= part[1]:  # a label far from its image
            part = (start, end)
        descriptor, first, name = self._open(shard, *part)
        try:
            return *_both(descriptor, offset - first, wanted), name
        finally:
            os.close(descriptor)

    def _in_place(self, shard: int, _sample: int, offset: int, wanted: int) -> tuple[bytes, bytes, str]:
        """The same of a shard on a disk."""
        opened = self._shards.shards[shard]
        path = opened.path
        try:
            file, expected = self._file(shard), int(self._index(shard).summary[2])
            if file.size != expected:
                raise ShardError(f"{path}: was {expected} bytes when it was opened and is now {file.size}; {REMEDY}")
            if file.modified != opened.modified:
                raise ShardError(f"{path}: has changed since it was opened; start again")
            header, data = _both(file.descriptor, offset, wanted)
        except OSError as error:
            raise ShardError(f"{path}: {error.strerror}; restore the shard or remove it from the list") from error
        if len(data) != wanted:
            size = os.fstat(file.descriptor).st_size
            raise ShardError(f"{path}: truncated at byte {size} while in use, expected {offset + wanted}; {REMEDY}")
        return header, data, path

    def _part(self, shard: int, sample: int) -> tuple[int, int]:
        """The bytes that are fetched for a sample: of its block and perhaps more, or of less if they are too many."""
        index = self._index(shard)
        first = sample // self._together * self._together
        last = min(first + self._together, len(index.images))
        while (span := _span(index, first, last))[1] - span[0] > LARGEST_PART and last - first > 1:
            middle = (first + last) // 2
            first, last = (first, middle) if sample < middle else (middle, last)
        if span[1] - span[0] > LARGEST_PART:
            offset, size = map(int, index.images[sample])
            return offset - HEADER, offset + size
        return span

    def _open(self, shard: int, start: int, end: int) -> tuple[int, int, str]:
        """A descriptor of some bytes of a shard, where in the shard they begin, and their name in the cache."""
        opened = self._shards.shards[shard]
        whole = opened.entry("whole")
        if not opened.in_parts:
            return opened.open(), 0, whole
        descriptor = opened.cache.find(whole)  # left from when its headers were read
        if descriptor is not None:
            return descriptor, 0, whole
        return opened.part(start, end), start, opened.entry(f"{start}-{end}")


def warn_of_small_cache(sources: Sequence[ShardList], spans: Sequence[int]) -> None:
    """Says when a cache cannot hold what is read at the same time, `spans` samples of each source."""
    limit = min(opened.source.cache_gb for opened in sources) * 1e9
    needed = 0.0
    for opened, span in zip(sources, spans, strict=True):
        shard = next((shard for shard in opened.shards if not shard.plain), None)
        if shard is not None:
            with suppress(ShardError):  # said where it is read
                needed += float(opened.sizes.sum()) * (min(span / opened.images, 1) if shard.in_parts else 1)
    if needed > limit:
        log.warning(
            "about %.3g GB of shards that are fetched or unpacked are in use at a time, and the cache may hold %.3g: "
            "raise source.cache_gb or lower stream.window_gb, or they are fetched again and again",
            needed / 1e9,
            limit / 1e9,
        )


def _both(descriptor: int, offset: int, wanted: int) -> tuple[bytes, bytes]:
    """A member's header and the beginning of its content, which lies at `offset`."""
    return os.pread(descriptor, HEADER, offset - HEADER), os.pread(descriptor, wanted, offset)


def _span(index: Index, first: int, last: int) -> tuple[int, int]:
    """Where the members of some neighbours begin and end, headers included."""
    labels = index.labels[first:last]
    places = np.concatenate([index.images[first:last], labels[labels[:, 0] >= 0]])  # (M, 2)
    return int(places[:, 0].min()) - HEADER, int(places.sum(1).max())


def _load_index(shards: ShardList, shard: int) -> Index:
    opened, index = shards.shards[shard], shards.shards[shard].index()
    if index.summary[0] != shards.counts[shard]:
        raise ShardError(
            f"{opened.path}: has {index.summary[0]} samples, and {shards.counts[shard]} in index.json or when it was "
            f"opened: it has changed; start again, or if it is the index, {REMAKE}"
        )
    return index
