"""A shard: a tar, a folder of images, or another kind of storage that comes in by a registry (`shards.registry`)."""

import functools
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from tessera.data.decode import Undecoded
from tessera.data.failures import MAKE_INDEX_AGAIN, SampleError, unreadable, warn_once
from tessera.data.pages import count_pages, single_page
from tessera.data.shards.access import DEFAULT, Access
from tessera.data.shards.cache import INDEX, Cache, CacheError, node_cache
from tessera.data.shards.index import CLASSES
from tessera.data.shards.notes import Note
from tessera.data.shards.stored_index import Header, header_of, map_index, packed, read_header
from tessera.data.shards.tar_index import MAPS, Index, with_pages

FORMAT = 3
"""Version of the indices in the cache. A new version makes all of them again."""


@functools.lru_cache(maxsize=4096)
def _resolved(path: str) -> str:
    """Return an absolute path without symbolic links. The path of a shard is resolved for every sample."""
    return os.path.realpath(path)


@dataclass(frozen=True)
class Shard(ABC):
    """Samples that are stored together, numbered from 0. Blocks of neighbouring samples never cross a shard.

    The path, the size and the version at the time of opening identify the entries of the shard in the cache.
    """

    path: str
    """Path, URL or command under which messages name the shard."""
    size: int
    """Size of the stored data in bytes; 0 if unknown."""
    version: str
    """String that changes when the data change: file times, an ETag, a checksum or a hash; empty if unknown."""
    access: Access = field(default=DEFAULT, repr=False, compare=False)
    sha256: str | None = None
    """SHA-256 from an `index.json`; None if unknown."""
    notes: tuple[Note, ...] = field(default=(), repr=False, compare=False, kw_only=True)
    """Notes on what is left out, apart from those of the index."""

    downloads: ClassVar[bool] = False
    """True if samples are downloaded or decompressed to the cache before they are read."""
    supports_ranges: ClassVar[bool] = False
    """True if parts of the shard can be downloaded, not only the complete shard."""
    is_remote: ClassVar[bool] = False
    """True if samples come from another machine, or from the output of a command."""
    runs_code: ClassVar[bool] = False
    """True if samples are read by code of the user, which may draw random numbers."""
    class_remedy: ClassVar[str] = (
        "Make one of them again from its images, with the class numbers of the other "
        f"(`tessera make_shards --classes {CLASSES}`)"
    )
    """Advice for two sets that number their classes differently."""
    cure: ClassVar[str] = "Make the shards of these images again, without the damaged files."
    """Advice for images that cannot be read."""

    @classmethod
    def at(cls, path: str, access: Access = DEFAULT) -> "Shard":
        """Return the shard at a path or an address. The registry of sources needs this function (`shards.registry`).

        Raises:
            ShardError: the shard cannot be used.
        """
        raise NotImplementedError

    @classmethod
    def check_object(cls, thing: object) -> None:
        """Check that an object is a data set that this class reads. Nothing is read.

        Raises:
            ShardError: the object is no such data set. The message says what to give.
        """
        raise NotImplementedError

    @property
    @abstractmethod
    def name(self) -> str:
        """File name of the shard. In messages, the name of a sample is `NAME/KEY`."""

    @property
    @abstractmethod
    def names_classes(self) -> str:
        """Path of the folder or file that names the classes. Shards of equal path share their class names."""

    @abstractmethod
    def class_names(self) -> tuple[str, ...] | None:
        """Return the class names in the order of the class numbers, in Unicode's form NFC; None if there are none."""

    @abstractmethod
    def make_index(self) -> Index:
        """List the samples: return their names, sizes and byte positions.

        Raises:
            ShardError: the shard cannot be used.
        """

    def index(self) -> Index:
        """Return the index, mapped from the cache of the node. If it is not in the cache, one process makes it.

        Raises:
            ShardError: the shard cannot be used.
        """
        return self._mapped(self.make_index)

    @abstractmethod
    def image(self, index: Index, sample: int) -> Undecoded:
        """Return the image of a sample, encoded if the shard stores files. `index` is the index of this shard.

        Raises:
            ShardError: the image cannot be read.
            ImageError: code of the user cannot decode the image.
        """

    @abstractmethod
    def label(self, index: Index, sample: int) -> int:
        """Return the class number of a sample.

        Raises:
            SampleError: the sample has no label, or its label is not an integer.
            ShardError: the label cannot be read.
        """

    def page(self, index: Index, sample: int) -> Undecoded:
        """Return the image of a sample. If `data.pages` is set, it is a file of the chosen page.

        Raises:
            ImageError: the pages cannot be decoded.
            ShardError: the image cannot be read.
        """
        image, pages = self.image(index, sample), self.access.keys.pages
        if pages is None or not isinstance(image, bytes):
            return image
        return single_page(image, int(index.pages[sample]) if pages == "each" else pages)

    def members(self, index: Index, sample: int) -> dict[str, Any]:
        """Return a sample in the form of webdataset: a dictionary of its members, with `__key__` and `__url__`.

        Raises:
            ImageError: code of the user cannot decode the image.
            ShardError: the sample cannot be read.
        """
        found = {"__key__": index.key(sample), "__url__": self.path, "jpg": self.image(index, sample)}
        if index.labels[sample, 0] >= 0:
            found["cls"] = self.label(index, sample)
        return found

    def target(self, index: Index, sample: int) -> bytes:
        """Return the encoded map of a sample, a PNG or a NumPy array.

        Raises:
            SampleError: the sample has no map.
            ShardError: the map cannot be read.
        """
        raise SampleError(
            f"{self.name}/{index.key(sample)} has no segmentation map or depth map, but maps are needed. Add a "
            f"member KEY.{' or KEY.'.join(MAPS)} to the shard. To use a folder of images and maps, make shards from it "
            "with `tessera make_shards`. "
            f"If the shard already has this member, its index is outdated. {MAKE_INDEX_AGAIN}"
        )

    def identities(self) -> list[Any]:
        """Return values that two shards share if they hold the same samples.

        They are the real path, the SHA-256 and, for a local shard, the device and inode of the file.
        """
        found: list[Any] = [os.path.realpath(self.path)]
        found += [self.sha256.lower()] if self.sha256 else []
        try:
            status = os.stat(self.path)
        except (OSError, ValueError):
            return found
        return [*found, (status.st_dev, status.st_ino)]

    def items(self) -> Iterable[tuple[int, str, np.ndarray]]:
        """Yield the data sets in Python from which the samples come: identity, kind, and numbers (N,) of their items.

        Two shards share a sample if they share a number of the same identity.
        """
        return ()

    def fetches(self, index: Index, samples: Sequence[int]) -> list[Callable[[], None]]:
        """Return functions that download the data of samples. The functions may run in several threads."""
        return []

    def in_blocks(self, block: int, joined: bool) -> "Shard":
        """Return the shard for a sampler that visits blocks of `block` neighbouring samples.

        If `joined` is true, one request may download several blocks.
        """
        return self

    def header(self) -> Header:
        """Return the counts of the index, the hash of the samples, and the notes on what is left out.

        If the index is in the cache, only its header is read.

        Raises:
            ShardError: the shard cannot be used.
        """
        with suppress(CacheError):
            if (descriptor := self.cache.find(self._index_name)) is not None:
                try:
                    found = read_header(descriptor)
                finally:
                    os.close(descriptor)
                if found is not None:
                    return found
        return header_of(self.index())

    @property
    def cache(self) -> Cache:
        """Cache of the node: indices of shards, and downloaded and decompressed data.

        Raises:
            CacheError: there is no folder for the cache.
        """
        return node_cache(self.access.settings.cache_gb)

    def cache_name(self, part: str) -> str:
        """Return the name of the cache entry for a part of this shard, for example for a byte range."""
        identity = f"{self._cache_path()}\n{self.size}\n{self.version}\n{part}"
        return hashlib.sha256(identity.encode(errors="surrogateescape")).hexdigest()[:32]

    def _cache_path(self) -> str:
        return _resolved(os.path.abspath(self.path))

    def _index_part(self) -> str:
        """Return the name of the index in `cache_name`."""
        return "index"

    @functools.cached_property
    def _index_name(self) -> str:
        """Name of the cache entry of the index. It is computed once, because an index is opened for most samples."""
        pages = " each" if self.access.keys.pages == "each" else ""
        return self.cache_name(f"{FORMAT} {self._index_part()}{pages}") + INDEX

    def _mapped(self, make: Callable[[], Index]) -> Index:
        """Return the index, mapped from the cache. If it is not in the cache, store the result of `make` there."""
        made: list[Index | None] = []

        def parts() -> Iterator[bytes]:
            made.append(None)
            made[-1] = index = self.paged(make())
            return packed(index)

        try:
            descriptor = self.cache.open_checked(self._index_name, parts)
        except CacheError as error:
            if None in made:  # `make` itself needs the cache
                raise
            warn_once(
                f"the indices of shards cannot be stored: {error} "
                "Until then, every process reads the tar headers or lists the folders itself."
            )
            return next(filter(None, made), None) or self.paged(make())
        try:
            return map_index(descriptor)
        except OSError as error:
            raise unreadable(self.path, error) from error
        finally:
            os.close(descriptor)

    def paged(self, index: Index) -> Index:
        """Return the index of the pages, if every page is a sample. The header of every image is read."""
        if self.access.keys.pages != "each":
            return index

        def pages_of(sample: int) -> int:
            image = self.image(index, sample)
            return count_pages(image) if isinstance(image, bytes) else 1

        return with_pages(index, pages_of)
