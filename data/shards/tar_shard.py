"""Shards that are tars: on a disk, at a URL, or in the output of a command.

A local tar is read without a copy. From a remote tar, byte ranges with neighbouring samples are downloaded to the cache
of the node, from which all loader workers and processes of the node read. Byte ranges are not possible for three kinds
of tars, which are stored completely in the cache: a `.tar.gz` (which is decompressed), the output of a command, and a
file of a web server that lacks byte ranges.
"""

import functools
import logging
import os
import resource
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from tessera.data.failures import (
    MAKE_INDEX_AGAIN,
    MAKE_SHARD_AGAIN,
    SampleError,
    ShardError,
    unreadable,
    warn_once,
)
from tessera.data.shards import remote
from tessera.data.shards.access import SourceConfig
from tessera.data.shards.cache import Sink, first_version
from tessera.data.shards.index import CLASSES, LARGEST_CLASSES, LARGEST_TABLE, TABLE, parse_classes, parse_table
from tessera.data.shards.samples import field_of, label_number
from tessera.data.shards.shard import Shard
from tessera.data.shards.tar_index import (
    LABEL,
    LARGEST_MEMBER,
    Index,
    is_described,
    is_member,
    read_sample,
    scan_tar,
    whole_number,
)
from tessera.runtime.user_error import printable

GZIPPED = (".gz", ".tgz")
"""File name endings of compressed tars."""
LARGEST_REQUEST = 64 * 2**20  # maximum size in bytes of a request for several samples
USUAL_REQUEST = 8 * 2**20  # target size in bytes of a request for several blocks
MOST_HEADERS = 2**16  # number of bytes before a member of a remote shard that are searched for additional headers
HEADER = 512  # size in bytes of the tar header before the content of each member
LONGEST_JSON = 2**20  # maximum number of bytes that are read from a JSON member
LONGEST_LABEL = 64  # maximum number of bytes that are read from a label

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tar(Shard):
    """A tar, whose index comes from the cache, from the table beside the shard, or from the tar headers."""

    modified: int = 0
    """Modification time of a local file in nanoseconds since 1970; 0 for a remote tar."""

    @property
    def name(self) -> str:
        return name_of(self.path)

    @property
    def folder(self) -> str:
        return folder_of(self.path)

    @property
    def names_classes(self) -> str:
        return self.folder

    def class_names(self) -> tuple[str, ...] | None:
        return read_classes(self.folder, self.access.settings)

    @abstractmethod
    def open(self) -> int:
        """Return a file descriptor of the complete, uncompressed tar, which the caller closes.

        Raises:
            OSError: a local shard cannot be read.
            ShardError: the shard is damaged, is too large or cannot be downloaded, or the cache cannot be written.
        """

    def make_index(self) -> Index:
        """Return the table beside the shard, or read the tar headers if there is none."""
        if self._has_usual_members and (table := self._table()) is not None:
            return table
        try:
            return scan_tar(self.open(), self.path, self.access.keys.image, self.access.keys.label_name)
        except OSError as error:
            raise unreadable(self.path, error) from error

    def image(self, index: Index, sample: int) -> bytes:
        return self._member(index, sample, index.images[sample])

    def members(self, index: Index, sample: int) -> dict[str, Any]:
        start, end, key = *_surroundings(index, sample), index.raw_key(sample)
        with self._open_bytes(index, sample, start, end) as (descriptor, first):
            found = read_sample(descriptor, start - first, end - first, key)
        offset = int(index.images[sample, 0])
        if offset - first not in found:
            raise self._changed(index, sample, offset)
        return {"__key__": key.decode(errors="backslashreplace"), "__url__": self.path, **dict(found.values())}

    @contextmanager
    def _open_bytes(self, index: Index, sample: int, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Open a file that holds the bytes `start` to `end` - 1 of the tar, which surround a sample.

        Yield its descriptor, and the byte of the tar at which the file begins.
        """
        descriptor = self.open()
        try:
            yield descriptor, 0
        finally:
            os.close(descriptor)

    def label(self, index: Index, sample: int) -> int:
        keys = self.access.keys
        if index.labels[sample, 0] < 0:
            raise SampleError(
                f"{self.name}/{index.key(sample)} has no label, but labels are needed. Add a member "
                f"KEY.{keys.label_name or LABEL} to the shard."
            )
        if keys.label_field:
            content = self._member(index, sample, index.labels[sample], LONGEST_JSON)
            name = f"{self.name}/{index.key(sample)}"
            return label_number(field_of(content, keys.label_field, name), name)
        text = self._member(index, sample, index.labels[sample], LONGEST_LABEL)
        if (label := whole_number(text)) is None:
            raise SampleError(
                f"the label of {self.name}/{index.key(sample)} is {text!r}, not an integer. Correct the .cls member."
            )
        return label

    def target(self, index: Index, sample: int) -> bytes:
        if index.map_place(sample)[0] < 0:
            return super().target(index, sample)
        return self._member(index, sample, index.maps[sample])

    def _member(self, index: Index, sample: int, place: np.ndarray, most: int = LARGEST_MEMBER) -> bytes:
        """Return at most the first `most` bytes of a member. `place` holds the offset and the size of the member."""
        offset, size = map(int, place)
        content = self._content(index, sample, offset, size, min(size, most))
        if content is None:
            raise self._changed(index, sample, offset)
        return content

    def _changed(self, index: Index, sample: int, offset: int) -> ShardError:
        return ShardError(
            f"{self.path} does not hold {index.key(sample)} at byte {offset}, where its index places the sample. "
            f"The shard has changed, or the index belongs to another shard. {MAKE_INDEX_AGAIN}"
        )

    @property
    def _has_usual_members(self) -> bool:
        """True if the image and the label of a sample are the members that tables list."""
        return self.access.keys.image is self.access.keys.label is None

    def _index_part(self) -> str:
        keys = self.access.keys
        return self._table_version() if self._has_usual_members else f"index by kind {keys.image} {keys.label_name}"

    def _table_version(self) -> str:
        """Return a name of the index that changes if the table beside the shard changes."""
        try:
            status = os.stat(self.path + TABLE)
        except OSError:
            return "index"
        return f"index {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"

    @abstractmethod
    def _content(self, index: Index, sample: int, offset: int, size: int, wanted: int) -> bytes | None:
        """Return `wanted` bytes of content from byte `offset` on, or None if the sample has no member at this byte."""

    @property
    def _is_packed(self) -> bool:
        return remote.without_query(self.path).endswith(GZIPPED)

    def _table(self) -> Index | None:
        """Return the table beside the shard, or None if there is none.

        A table that is older than the shard is used if it fits the shard, because a copy may have changed the times.
        """
        path = self.path + TABLE
        try:
            with open(path, "rb") as file:
                content, modified = file.read(LARGEST_TABLE + 1), os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            return None
        if modified < self.modified and not self._fits(parse_table(content, path)):
            warn_once(f"{path} is older than its shard, does not fit it, and is not used. {MAKE_INDEX_AGAIN}")
            return None
        return self._parsed(content, path)

    def _fits(self, index: Index) -> bool:
        """Return True if the size of the tar and the place of its last sample are those in an index.

        The size of a compressed tar is not compared, because the index holds the size after decompression.
        """
        last = len(index.ends) - 1
        offset, size = map(int, index.images[last])
        size_fits = self._is_packed or index.summary[2] == self.size
        return size_fits and self._content(index, last, offset, size, 0) is not None

    def _parsed(self, content: bytes, path: str) -> Index:
        """Parse the content of a table, and check that the table belongs to this shard."""
        index = parse_table(content, path)
        if self.size and not self._is_packed and index.summary[2] != self.size:
            raise ShardError(
                f"{path} belongs to a shard of {index.summary[2]} bytes, but {self.path} has {self.size} bytes. "
                f"{MAKE_INDEX_AGAIN}"
            )
        return index


class LocalTar(Tar):
    """A local, uncompressed tar."""

    @contextmanager
    def _open_bytes(self, index: Index, sample: int, start: int, end: int) -> Iterator[tuple[int, int]]:
        yield self._unchanged(index).descriptor, 0

    def open(self) -> int:
        return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)

    def _content(self, index: Index, sample: int, offset: int, size: int, wanted: int) -> bytes | None:
        file = self._unchanged(index)
        try:
            header, content = _read_member(file.descriptor, offset, wanted)
        except OSError as error:
            raise unreadable(self.path, error) from error
        if len(content) != wanted:
            now = os.fstat(file.descriptor).st_size
            raise ShardError(
                f"{self.path} was truncated to {now} bytes while in use, but a sample ends at byte "
                f"{offset + wanted}. {MAKE_SHARD_AGAIN}"
            )
        key = index.raw_key(sample)
        fits = is_member(header, key, size) or is_described(file.descriptor, offset, key, size)
        return content if fits else None

    def _unchanged(self, index: Index) -> "_File":
        """Return the opened tar, which must not have changed since the index was made."""
        try:
            file, expected = _opened(self), int(index.summary[2])
        except OSError as error:
            raise unreadable(self.path, error) from error
        if file.size != expected:
            raise ShardError(
                f"{self.path} had {expected} bytes when it was opened, but now has {file.size}. {MAKE_SHARD_AGAIN}"
            )
        if file.modified != self.modified:
            raise ShardError(f"{self.path} has changed since it was opened. Restart the run.")
        return file


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


def kept_files() -> int:
    """Return how many local tars a process may keep open: half of its limit on open files, but at most 4,096."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 4096 if limit == resource.RLIM_INFINITY else min(limit // 2, 4096)


@functools.lru_cache(kept_files())
def _opened(shard: LocalTar) -> _File:
    return _File(shard.path)


def close_files() -> None:
    """Close the local tars that this process keeps open and does not read now."""
    _opened.cache_clear()


def _read_member(descriptor: int, offset: int, wanted: int) -> tuple[bytes, bytes]:
    """Return the tar header and the first `wanted` bytes of the member whose content begins at `offset`."""
    data = os.pread(descriptor, HEADER + wanted, offset - HEADER)  # a network disk answers each read separately
    return data[:HEADER], data[HEADER:]


class PackedTar(Tar):
    """A local `.tar.gz`. The cache holds the decompressed tar."""

    downloads: ClassVar[bool] = True

    def open(self) -> int:
        def fill(sink: Sink) -> None:
            check = None if self.sha256 else self._check_version  # `fetch` checks a known SHA-256 instead
            remote.fetch(self.path, sink, self.access.settings, size=self.size, sha256=self.sha256, check=check)

        return self.cache.open(self.cache_name("whole"), fill, None if self._is_packed else self.size or None)

    def _check_version(self, stated: list[str]) -> None:
        """Do nothing, because a local tar has no server. `RemoteTar` compares the version identifiers of a response."""

    def fetches(self, index: Index, samples: Sequence[int]) -> list[Callable[[], None]]:
        return [lambda: os.close(self.open())]

    def _content(self, index: Index, sample: int, offset: int, size: int, wanted: int) -> bytes | None:
        key = index.raw_key(sample)
        for _ in range(2):
            descriptor, first, name = self._open_range(index, sample, offset - HEADER, offset + wanted)
            try:
                header, content = _read_member(descriptor, offset - first, wanted)
            finally:
                os.close(descriptor)
            fits = len(content) == wanted and is_member(header, key, size)
            if fits or (len(content) == wanted and self._is_described(index, sample, offset, size)):
                return content
            self.cache.remove(name)  # the cached copy may be damaged, so the next attempt downloads again
        return None

    def _is_described(self, index: Index, sample: int, offset: int, size: int) -> bool:
        """Return True if the additional headers of a member state the key of the sample and the size of the member."""
        descriptor, first, _ = self._open_range(index, sample, max(offset - MOST_HEADERS, 0), offset)
        try:
            return is_described(descriptor, offset - first, index.raw_key(sample), size)
        finally:
            os.close(descriptor)

    @contextmanager
    def _open_bytes(self, index: Index, sample: int, start: int, end: int) -> Iterator[tuple[int, int]]:
        descriptor, first, _ = self._open_range(index, sample, start, end)
        try:
            yield descriptor, first
        finally:
            os.close(descriptor)

    def _open_range(self, index: Index, sample: int, start: int, end: int) -> tuple[int, int, str]:
        """Open a cached file that holds the bytes `start` to `end` - 1 of the tar. The bytes belong to a sample.

        Return the descriptor of the file, the byte of the tar at which the file begins, and the name of the cache
        entry.
        """
        return self.open(), 0, self.cache_name("whole")


@dataclass(frozen=True)
class RemoteTar(PackedTar):
    """A tar at a URL, or the output of a command. The cache holds byte ranges, or the complete tar."""

    is_remote: ClassVar[bool] = True

    block: int = 1
    """Minimum number of neighbouring samples that are downloaded together."""
    joined: bool = True
    """True if one request may download several blocks."""

    def class_names(self) -> tuple[str, ...] | None:
        return None if self._is_command else super().class_names()

    @property
    def _is_command(self) -> bool:
        return self.path.startswith(remote.PIPE)

    @property
    def supports_ranges(self) -> bool:
        """True if byte ranges of the shard can be downloaded.

        Raises:
            ShardError: the server does not answer.
        """
        return not self._is_packed and not self._is_command and remote.supports_ranges(self.path, self.access.settings)

    def in_blocks(self, block: int, joined: bool) -> "RemoteTar":
        return replace(self, block=block, joined=joined)

    def fetches(self, index: Index, samples: Sequence[int]) -> list[Callable[[], None]]:
        if not self.supports_ranges:
            return super().fetches(index, samples)
        if (descriptor := self._downloaded()) is not None:
            os.close(descriptor)
            return []
        spans = {self._span(index, sample) for sample in samples}
        return [lambda span=span: os.close(self.open_range(*span)) for span in spans]

    def open_range(self, start: int, end: int) -> int:
        """Return a descriptor of a cached file that begins with the bytes `start` to `end` - 1 of the shard.

        A checksum follows these bytes. A damaged file is downloaded again. The caller closes the descriptor.

        Raises:
            ShardError: the shard has changed or cannot be downloaded, or the cache cannot be written.
        """

        def read() -> list[bytes]:
            return [remote.read_range(self.path, start, end, self.size, self.access.settings, self._check_version)]

        try:
            return self.cache.open_checked(self.cache_name(f"{start}-{end}"), read, end - start)
        except remote.NoRangesError:
            raise ShardError(
                f"The server of {self.path} stopped supporting byte ranges during the run. Restart the run."
            ) from None

    def _open_range(self, index: Index, sample: int, start: int, end: int) -> tuple[int, int, str]:
        if not self.supports_ranges:
            return super()._open_range(index, sample, start, end)
        if (descriptor := self._downloaded()) is not None:
            return descriptor, 0, self.cache_name("whole")
        span = self._span(index, sample)
        if not span[0] <= start <= end <= span[1]:
            span = (start, end)  # the span of a large image has no label or map, which needs a separate request
        return self.open_range(*span), span[0], self.cache_name(f"{span[0]}-{span[1]}")

    def _downloaded(self) -> int | None:
        """Return a descriptor of the complete tar, or None if the tar is not in the cache.

        The complete tar is in the cache if its headers were scanned, because `open` downloads the tar.
        """
        return self.cache.find(self.cache_name("whole"))

    def _span(self, index: Index, sample: int) -> tuple[int, int]:
        """Return the byte range to download for a sample: the sample's block, several blocks, or a part of a block."""
        count = len(index.images)
        usual = max(USUAL_REQUEST * count // max(self.size, 1), 1)  # number of samples in about 8 MiB
        together = max(usual // self.block, 1) * self.block if self.joined else self.block
        first = sample // together * together
        last = min(first + together, count)
        while (span := _bytes_of(index, first, last))[1] - span[0] > LARGEST_REQUEST and last - first > 1:
            middle = (first + last) // 2
            first, last = (first, middle) if sample < middle else (middle, last)
        if span[1] - span[0] > LARGEST_REQUEST:
            offset, size = map(int, index.images[sample])
            return offset - HEADER, offset + size
        return span

    def _check_version(self, stated: list[str]) -> None:
        """Compare the version identifiers of a response, such as its ETag, with the version of the first response.

        The version of the first response is the version at the time of opening. If the shard was opened from
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
                f"{self.path} has changed on the server (version {printable(stated[0])[:100]}, before "
                f"{printable(held)[:100]}). Restore the shard. If the change is intended, make its index.json again or "
                f"remove the folder {self.cache.folder}, and restart the run."
            )

    def _cache_path(self) -> str:
        return self.path

    def _table_version(self) -> str:
        return "index"  # to ask the server for the version of the table would be a request

    def _table(self) -> Index | None:
        if self._is_command:
            return None
        path, content = self.path + TABLE, None
        if "?" not in self.path:
            content = remote.read_small(path, self.access.settings, LARGEST_TABLE)
        if content is not None:
            return self._parsed(content, path)
        if self.supports_ranges:
            warn_once(
                f"Shards of {self.folder} without a table SHARD.tar{TABLE} beside them are downloaded completely to "
                "find their samples. `tessera check_shards SHARDS --write_index true` writes tables for local copies."
            )
        return None


def _bytes_of(index: Index, first: int, last: int) -> tuple[int, int]:
    """Return the byte range of the members of samples `first` to `last` - 1, including their tar headers."""
    labels, maps = (places[first:last] for places in (index.labels, index.maps))
    places = np.concatenate([index.images[first:last], labels[labels[:, 0] >= 0], maps[maps[:, 0] >= 0]])  # (M, 2)
    return int(places[:, 0].min()) - HEADER, int(places.sum(1).max())


def _surroundings(index: Index, sample: int) -> tuple[int, int]:
    """Return the byte range between the samples before and after a sample. It holds all members of the sample."""

    def known(other: int) -> np.ndarray:
        places = [index.images[other], index.labels[other], *index.maps[other : other + 1]]
        return np.array([place for place in places if place[0] >= 0])  # (M, 2)

    before, after = sample - 1, sample + 1
    start = int(known(before).sum(1).max()) if before >= 0 else 0
    end = int(known(after)[:, 0].min()) - HEADER if after < len(index.images) else int(index.summary[2])
    return -(-start // HEADER) * HEADER, end


def name_of(path: str) -> str:
    """Return the file name of a tar at a path or URL."""
    return remote.without_query(path).rpartition("/")[2]


def folder_of(path: str) -> str:
    """Return the folder of a tar, or `pipe:` for the output of a command, which has no folder."""
    return remote.PIPE if path.startswith(remote.PIPE) else remote.without_query(path).rpartition("/")[0]


def read_classes(folder: str, config: SourceConfig) -> tuple[str, ...] | None:
    """Return the class names of a local or remote folder of shards, or None if the folder has no `classes.json`.

    Raises:
        ShardError: the file cannot be read, or is not a list of unique names.
    """
    path = f"{folder}/{CLASSES}" if folder else CLASSES
    content = remote.read_small(path, config, LARGEST_CLASSES)
    return None if content is None else parse_classes(content, path)
