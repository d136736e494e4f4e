"""Reader of samples. A sample is identified by the number of its shard and by its number within the shard.

The sampler visits blocks of neighbouring samples. A block of a remote shard is downloaded in one request and stored in
the cache, from which all loader workers and processes of the node read. If the cache can hold the complete data set and
blocks are small, one request downloads several neighbouring blocks.
"""

import functools
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from tessera.data.shards.classes import CLASSES
from tessera.data.shards.errors import MAKE_INDEX_AGAIN, MAKE_SHARD_AGAIN, ResourceError, ShardError, unreadable
from tessera.data.shards.folder import read_image
from tessera.data.shards.shard_list import ShardList
from tessera.data.shards.tar import LARGEST_LABEL, MAP, Index, is_described, is_member

KEPT_SAMPLES = 2_000_000  # Maximum number of samples whose byte positions are kept in memory, at 60 to 76 bytes each.
KEPT_FILES = 128
LARGEST_REQUEST = 64 * 2**20  # maximum size in bytes of a request for several samples
USUAL_REQUEST = 8 * 2**20  # target size in bytes of a request for several blocks
FETCHERS = 4  # number of simultaneous requests of one reader
MOST_LOST = 10  # reading fails after this number of unreadable shards in a row
MOST_HEADERS = 2**16  # number of bytes before a member of a remote shard that are searched for additional headers
HEADER = 512  # size in bytes of the tar header before the content of each member

log = logging.getLogger(__name__)
T = TypeVar("T")


class UnreadableError(ShardError):
    """Raised if the shard of a sample cannot be read and the settings skip unreadable shards."""


class _File:
    """An open local tar. The descriptor is closed when the object is deleted."""

    def __init__(self, path: str):
        self.descriptor = -1
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(self.descriptor)
        self.size, self.modified = status.st_size, status.st_mtime_ns

    def __del__(self):
        if self.descriptor >= 0:
            os.close(self.descriptor)


class Reader:
    """Reader of the samples of a list of shards. Files are opened on first use. Each process needs its own reader.

    A shard becomes unreadable if it vanishes, changes, or cannot be downloaded. If the settings do not skip unreadable
    shards, methods raise `ShardError` for an unreadable shard. If the settings skip them, methods raise
    `UnreadableError`, and raise `ShardError` only after ten unreadable shards in a row or when no shard is left.

    Args:
        shards: list of opened shards.
        readers: number of readers in this process. The limits on memory and open files are divided among them.
        block: number of neighbouring samples in a block of the sampler; None if samples are read in order.
    """

    def __init__(self, shards: ShardList, readers: int = 1, block: int | None = None):
        self._shards = shards
        kept = max(KEPT_SAMPLES // int(shards.counts.max()) // readers, 4)
        self._index = functools.lru_cache(kept)(functools.partial(_load_index, shards))
        files = max(KEPT_FILES // readers, 1)
        self._file = functools.lru_cache(files)(lambda shard: _File(shards.shards[shard].path))
        self._is_local = functools.lru_cache(2**16)(lambda shard: shards.shards[shard].is_local)
        total = int(shards.sizes.sum())
        usual = max(USUAL_REQUEST * shards.images // max(total, 1), 1)  # samples
        if block is None:
            self._samples_per_request = usual
        elif total <= shards.source.cache_gb * 1e9 / 2:  # the cache can hold all shards
            self._samples_per_request = max(usual // block, 1) * block
        else:
            self._samples_per_request = block
        self._lost: dict[int, str] = {}
        self._lost_in_a_row = 0

    def name(self, shard: int, sample: int) -> str:
        """Return the name of a sample as `SHARD.tar/KEY`."""
        return f"{self._shards.shards[shard].name}/{self._guard(shard, lambda: self._index(shard)).key(sample)}"

    def image(self, shard: int, sample: int) -> bytes:
        """Return the encoded image of a sample."""

        def read() -> bytes:
            index, opened = self._index(shard), self._shards.shards[shard]
            if opened.is_folder:
                return read_image(opened.path, index, sample)
            offset, size = map(int, index.images[sample])
            return self._member(shard, sample, offset, size, size)

        return self._guard(shard, read)

    def label(self, shard: int, sample: int) -> int:
        """Return the class number of a sample, renumbered if the shards have `ShardList.numbers`.

        Raises:
            ShardError: the sample has no label, its label is not an integer, or classes.json does not name its class.
        """
        offset, size = map(int, self._guard(shard, lambda: self._index(shard)).labels[sample])
        folder = self._shards.shards[shard].is_folder
        if offset < 0:
            remedy = "Add a member KEY.cls to the shard."
            if folder:
                remedy = "Move every image to a direct subfolder of its class; two or more subfolders are needed."
            raise ShardError(f"{self.name(shard, sample)} has no label, but labels are needed. {remedy}")
        if folder:
            return offset if self._shards.numbers is None else self._shards.numbers[offset]
        text = self._guard(shard, lambda: self._member(shard, sample, offset, size, min(size, 64)))
        try:
            label = int(np.int64(int(text)))
        except (ValueError, OverflowError):
            raise ShardError(
                f"the label of {self.name(shard, sample)} is {text!r}, not an integer. Correct the .cls member."
            ) from None
        numbers = self._shards.numbers
        if numbers is None:
            if label > LARGEST_LABEL:
                raise ShardError(
                    f"the label of {self.name(shard, sample)} is {label}, but labels may be {LARGEST_LABEL} at most. "
                    "Number the classes from 0, without gaps."
                )
            return label
        if not 0 <= label < len(numbers):
            raise ShardError(
                f"the label of {self.name(shard, sample)} is {label}, but {CLASSES} names {len(numbers)} classes. "
                f"Add the missing names to {CLASSES}, or correct the .cls member."
            )
        return numbers[label]

    def map(self, shard: int, sample: int) -> bytes:
        """Return the encoded segmentation map of a sample, a PNG.

        Raises:
            ShardError: the sample has no map.
        """
        offset, size = self._guard(shard, lambda: self._index(shard)).map_place(sample)
        if offset < 0:
            raise ShardError(
                f"{self.name(shard, sample)} has no segmentation map, but maps are needed. Add a member KEY.{MAP} to "
                f"the shard; of a folder of images and maps, make shards with data.make_shards. If the shard has this "
                f"member: {MAKE_INDEX_AGAIN}"
            )
        return self._guard(shard, lambda: self._member(shard, sample, offset, size, size))

    def prepare(self, shards: Sequence[int] | np.ndarray, samples: Sequence[int] | np.ndarray) -> None:
        """Download the byte ranges of samples to the cache, with several simultaneous requests.

        Byte ranges that are already in the cache are not downloaded again. If an unreadable shard is skipped, its error
        is raised later, when one of its samples is read.

        Raises:
            ShardError: a shard cannot be read, and the settings do not skip unreadable shards.
        """
        wanted = [
            (int(shard), int(sample))
            for shard, sample in zip(shards, samples, strict=True)
            if not self._is_local(shard)
        ]
        if not wanted:
            return
        with ThreadPoolExecutor(FETCHERS) as pool:
            self._map(pool, self._index, {(shard,) for shard, _ in wanted})
            fetched = self._map(pool, self._has_whole, {(shard,) for shard, _ in wanted})
            in_parts = {shard for (shard,), whole in fetched if not whole}
            requests = {(shard, sample) for shard, sample in wanted if shard in in_parts}
            ranges = {(shard, *span) for (shard, _), span in self._map(pool, self._request, requests)}
            self._map(pool, lambda shard, *span: os.close(self._shards.shards[shard].open_range(*span)), ranges)

    def _map(self, pool: ThreadPoolExecutor, do: Callable[..., T], calls: set[Any]) -> list[tuple[Any, T]]:
        """Call `do(*call)` in the thread pool for each tuple in `calls`. Return each tuple with the result of its call.

        The first argument in each tuple is the number of a shard. If the settings skip unreadable shards, the result
        does not include calls for such shards.
        """

        def one(call: tuple[int, ...]) -> list[tuple[Any, T]]:
            try:
                return [(call, self._guard(call[0], lambda: do(*call)))]
            except UnreadableError:
                return []

        return [result for results in pool.map(one, calls) for result in results]

    def _guard(self, shard: int, do: Callable[[], T]) -> T:
        """Call `do`, which reads `shard`, and return its result. If `shard` failed before, raise the earlier error."""
        try:
            if shard in self._lost:
                raise ShardError(self._lost[shard])
            result = do()
            self._lost_in_a_row = 0
            return result
        except ResourceError:
            raise
        except ShardError as error:
            self._lost_in_a_row += shard not in self._lost
            self._lost[shard] = str(error)
            if self._shards.source.unreadable == "stop":
                raise
            if self._lost_in_a_row >= MOST_LOST or len(self._lost) == len(self._shards.shards):
                raise ShardError(
                    f"{self._lost_in_a_row} shards in a row cannot be read. Last error: {error}"
                ) from error
            raise UnreadableError(str(error)) from error

    def _member(self, shard: int, sample: int, offset: int, size: int, wanted: int) -> bytes:
        """Check the tar header of a member, and return the first `wanted` bytes of its content."""
        index, local = self._index(shard), self._is_local(shard)
        key = index.raw_key(sample)
        for _ in range(1 if local else 2):
            header, data, name = (self._read_local if local else self._read_cached)(shard, sample, offset, wanted)
            if len(data) == wanted and (
                is_member(header, key, size) or self._is_described(shard, sample, offset, size)
            ):
                return data
            if not local:
                self._shards.shards[shard].cache.remove(name)  # the cached copy may be damaged, so download again
        raise ShardError(
            f"{self._shards.shards[shard].path}: {index.key(sample)} is not at byte {offset}, where it should be. "
            f"The shard has changed, or the index belongs to another shard. {MAKE_INDEX_AGAIN}"
        )

    def _is_described(self, shard: int, sample: int, offset: int, size: int) -> bool:
        """Return True if additional headers before the header of a member state the key of its sample and its size."""
        key = self._index(shard).raw_key(sample)
        if self._is_local(shard):
            return is_described(self._file(shard).descriptor, offset, key, size)
        descriptor, first, _ = self._open(shard, sample, max(offset - MOST_HEADERS, 0), offset)
        try:
            return is_described(descriptor, offset - first, key, size)
        finally:
            os.close(descriptor)

    def _read_cached(self, shard: int, sample: int, offset: int, wanted: int) -> tuple[bytes, bytes, str]:
        """Return a member's header, the beginning of its content, and the name of the cache entry that holds them."""
        descriptor, first, name = self._open(shard, sample, offset - HEADER, offset + wanted)
        try:
            return *_read_member(descriptor, offset - first, wanted), name
        finally:
            os.close(descriptor)

    def _read_local(self, shard: int, _sample: int, offset: int, wanted: int) -> tuple[bytes, bytes, str]:
        """Return a member's header, the beginning of its content, and the path of the local shard."""
        opened = self._shards.shards[shard]
        path = opened.path
        try:
            file, expected = self._file(shard), int(self._index(shard).summary[2])
            if file.size != expected:
                raise ShardError(
                    f"{path}: had {expected} bytes when it was opened, but now has {file.size}. {MAKE_SHARD_AGAIN}"
                )
            if file.modified != opened.modified:
                raise ShardError(f"{path}: has changed since it was opened. Restart the run.")
            header, data = _read_member(file.descriptor, offset, wanted)
        except OSError as error:
            raise unreadable(path, error) from error
        if len(data) != wanted:
            size = os.fstat(file.descriptor).st_size
            raise ShardError(
                f"{path}: was truncated to {size} bytes while in use, but a sample ends at byte {offset + wanted}. "
                f"{MAKE_SHARD_AGAIN}"
            )
        return header, data, path

    def _request(self, shard: int, sample: int) -> tuple[int, int]:
        """Return the byte range to download for a sample: the sample's block, several blocks, or a part of a block."""
        index = self._index(shard)
        first = sample // self._samples_per_request * self._samples_per_request
        last = min(first + self._samples_per_request, len(index.images))
        while (span := _span(index, first, last))[1] - span[0] > LARGEST_REQUEST and last - first > 1:
            middle = (first + last) // 2
            first, last = (first, middle) if sample < middle else (middle, last)
        if span[1] - span[0] > LARGEST_REQUEST:
            offset, size = map(int, index.images[sample])
            return offset - HEADER, offset + size
        return span

    def _open(self, shard: int, sample: int, start: int, end: int) -> tuple[int, int, str]:
        """Open a cached file that holds the byte range of a member of a sample.

        Return the descriptor of the file, the byte of the shard at which the file begins, and the name of the cache
        entry.
        """
        opened = self._shards.shards[shard]
        descriptor = self._whole(shard)
        if descriptor is not None:
            return descriptor, 0, opened.cache_name("whole")
        span = self._request(shard, sample)
        if not span[0] <= start <= end <= span[1]:  # the byte range of an image may not contain its label or map
            span = (start, end)
        return opened.open_range(*span), span[0], opened.cache_name(f"{span[0]}-{span[1]}")

    def _whole(self, shard: int) -> int | None:
        """Open the cached copy of a complete shard. Return None if byte ranges of the shard are read instead."""
        opened = self._shards.shards[shard]
        if not opened.supports_ranges:
            return opened.open()
        return opened.cache.find(opened.cache_name("whole"))  # found if it was downloaded to read its headers

    def _has_whole(self, shard: int) -> bool:
        """Return True if the cache holds a complete shard. It is downloaded if byte ranges cannot be read."""
        descriptor = self._whole(shard)
        if descriptor is not None:
            os.close(descriptor)
        return descriptor is not None


def warn_of_small_cache(sources: Sequence[ShardList], spans: Sequence[int]) -> None:
    """Log a warning if the cache cannot hold all shard data that is needed at the same time.

    Args:
        sources: sources of a mixture.
        spans: number of samples that are needed at the same time, for each source.
    """
    limit = min(opened.source.cache_gb for opened in sources) * 1e9
    needed = 0.0
    for opened, span in zip(sources, spans, strict=True):
        shard = next((shard for shard in opened.shards if not shard.is_local), None)
        if shard is not None:
            with suppress(ShardError):  # the error is raised again when the shard is read
                needed += float(opened.sizes.sum()) * (min(span / opened.images, 1) if shard.supports_ranges else 1)
    if needed > limit:
        log.warning(
            "about %.3g GB of downloaded or decompressed shards are in use at a time, but the cache is limited to "
            "%.3g GB. The same data will be downloaded again and again. "
            "Raise source.cache_gb or lower stream.window_gb.",
            needed / 1e9,
            limit / 1e9,
        )


def _read_member(descriptor: int, offset: int, wanted: int) -> tuple[bytes, bytes]:
    """Return the tar header and the first `wanted` bytes of the member whose content begins at `offset`."""
    return os.pread(descriptor, HEADER, offset - HEADER), os.pread(descriptor, wanted, offset)


def _span(index: Index, first: int, last: int) -> tuple[int, int]:
    """Return the byte range of the members of samples `first` to `last` - 1, including their tar headers."""
    labels, maps = (places[first:last] for places in (index.labels, index.maps))
    places = np.concatenate([index.images[first:last], labels[labels[:, 0] >= 0], maps[maps[:, 0] >= 0]])  # (M, 2)
    return int(places[:, 0].min()) - HEADER, int(places.sum(1).max())


def _load_index(shards: ShardList, shard: int) -> Index:
    opened, index = shards.shards[shard], shards.shards[shard].index()
    if index.summary[0] != shards.counts[shard]:
        raise ShardError(
            f"{opened.path}: has {index.summary[0]} samples, but {shards.counts[shard]} were expected from index.json "
            "or from an earlier count. The shard or the index has changed. Restart the run. "
            f"If the index is wrong: {MAKE_INDEX_AGAIN}"
        )
    return index
