"""Sources of samples: lists of shards (shard.py), whose samples are numbered consecutively."""

import bisect
import functools
import hashlib
import itertools
import resource
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from tessera.data.decode import Undecoded
from tessera.data.failures import (
    CORRECT_INDEX,
    DroppedError,
    NoLabelError,
    SampleError,
    ShardError,
    warn_once,
)
from tessera.data.shards.access import DEFAULT, Access
from tessera.data.shards.index import CLASSES, Statistics
from tessera.data.shards.notes import Note
from tessera.data.shards.samples import Item, item_of, label_number
from tessera.data.shards.shard import Shard
from tessera.data.shards.tar_index import LARGEST_LABEL, Index
from tessera.data.user_code import seeded

KEPT_INDICES = min(max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8, 64), 4096)
"""Maximum number of indices of shards that a source keeps mapped. Each one needs a file descriptor."""
KEPT_SAMPLES = 2_000_000
"""Number of samples whose indices a process keeps, on average. It bounds the memory if the cache cannot be used."""
FETCHERS = 4
"""Number of simultaneous requests of one source."""
MOST_PROBED = 100
"""Maximum number of samples that are read to find out whether the stages of the user yield labels."""

_NO_SEEDS = nullcontext()


@dataclass(eq=False)
class Source:
    """List of S opened shards, whose samples are numbered from 0.

    After a fork, processes read independently. Methods raise `ShardError` for a sample of a shard that vanishes,
    changes, or cannot be downloaded, and `SampleError` for a missing or wrong label or map.
    """

    shards: list[Shard]
    counts: np.ndarray
    """Number of samples of each shard: (S,) int64."""
    labelled: np.ndarray
    """Number of samples with a label in each shard, or -1 if not yet known: (S,) int64."""
    sizes: np.ndarray
    """Size of each shard in bytes; for the output of a command, size of the output: (S,) int64."""
    access: Access = DEFAULT
    digests: tuple[int | None, ...] = ()
    """Hash of the samples of each shard (`Header.digest`); None for a shard that `index.json` lists."""
    notes: tuple[Note, ...] = ()
    """Notes on what is left out of the shards; `notes.describe` makes sentences of them."""
    statistics: Statistics = Statistics()  # noqa: RUF009 - the default is immutable
    """Statistics of the pixels from `index.json`."""
    classes: tuple[str, ...] | None = None
    """Class names in the order of the numbers that `label` returns; None if unknown or not yet read."""
    numbers: tuple[int, ...] | None = None
    """Class number that `label` returns for each class number in the shards; None to return them unchanged."""
    optional_labels: bool = False
    """True to let `label` return -1 for a sample without a label."""
    readers: int = 1
    """Number of sources that are read in this process. They share the limits of kept indices equally."""
    left_out: Mapping[int, np.ndarray] = field(default_factory=dict)
    """Samples that are not numbered (`data.exclude`), by shard: their indices in the shard, sorted, int64."""

    def __post_init__(self) -> None:
        self._ends = np.cumsum(self.counts).tolist()
        self._downloads = any(shard.downloads for shard in self.shards)
        self._last: tuple[int, Item] | None = None  # the sample that the stages made last, for its label
        kept = min(KEPT_INDICES, KEPT_SAMPLES * len(self.counts) // self.images) // self.readers
        self._index = functools.lru_cache(max(kept, 4))(self._load_index)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        # Pickle the fields only, because the cache of indices in `_index` cannot be pickled.
        return Source, tuple(getattr(self, one.name) for one in fields(self))

    @property
    def images(self) -> int:
        """Total number of samples in all shards."""
        return self._ends[-1]

    def first(self, shards: int) -> "Source":
        """Return the source of the first `shards` shards."""
        if shards == len(self.shards):
            return self
        arrays = {name: getattr(self, name)[:shards] for name in ("shards", "counts", "labelled", "sizes")}
        left_out = {shard: samples for shard, samples in self.left_out.items() if shard < shards}
        return replace(self, **arrays, digests=self.digests[:shards], left_out=left_out)

    @property
    def mean_bytes(self) -> float:
        """Mean size of a sample in bytes: total size of the shards divided by the number of samples; 0 if unknown."""
        return float(self.sizes.sum()) / self.images

    @property
    def identity(self) -> list[tuple[str, int]]:
        """Name and number of samples of each shard. Sources of equal identity have their samples in the same order."""
        return [(shard.name, int(count)) for shard, count in zip(self.shards, self.counts, strict=True)]

    def samples_hash(self) -> str:
        """Return a hash of the names of the samples, the sizes of their images, and their labels.

        A copy of the data has the same hash. For shards that an `index.json` lists, the hash is computed from their
        SHA-256. Of remote shards without a SHA-256, it has the versions that their server states, such as ETags. Hashes
        are comparable if they have the same beginning up to the colon.
        """
        digests = self.digests or (None,) * len(self.shards)
        listed, found = None in digests, hashlib.blake2b(digest_size=8)
        versions = [shard.version if shard.is_remote and not shard.sha256 else "" for shard in self.shards]
        for number, (shard, size, digest) in enumerate(zip(self.shards, self.sizes, digests, strict=True)):
            found.update(f"{size} {shard.sha256 if digest is None else digest}{versions[number]}\n".encode())
            if number in self.left_out:
                found.update(self.left_out[number].tobytes())
        kind = "checksums" if listed else "samples"
        return f"{kind}, versions:{found.hexdigest()}" if any(versions) else f"{kind}:{found.hexdigest()}"

    def content(self) -> str | None:
        """Return a hash of the sizes in bytes of all images, or None if the sizes are unknown or equal.

        The same image files have the same hash in a folder, in shards, and in any order. The sizes of the images of
        Parquet files, of data sets of the user and of shards that cannot be read are not known. Sizes that are all
        equal, as those of raw pixels, distinguish no data sets.
        """
        try:
            sizes = np.concatenate(
                [self.numbered(n, shard.index().images[:, 1]) for n, shard in enumerate(self.shards)]
            )
        except ShardError:
            return None
        return hashlib.sha256(np.sort(sizes).tobytes()).hexdigest()[:16] if sizes.all() and np.ptp(sizes) else None

    def number(self, shard: np.ndarray, sample: np.ndarray) -> np.ndarray:
        """Return the index in the source of each sample, given its shard and its index among the samples of the shard
        that are not left out."""
        return (np.cumsum(self.counts) - self.counts)[shard] + sample

    def place(self, number: int) -> tuple[int, int]:
        """Return the shard of a sample, and the index of the sample in the shard."""
        shard = bisect.bisect_right(self._ends, number)
        sample = int(number) - (self._ends[shard - 1] if shard else 0)
        if (left_out := self.left_out.get(shard)) is not None:
            # the number of samples that are left out before each numbered one
            sample += int(np.searchsorted(left_out - np.arange(len(left_out)), sample, side="right"))
        return shard, sample

    def numbered(self, shard: int, rows: np.ndarray) -> np.ndarray:
        """Return the rows of the samples that are not left out: (samples of the shard, ...) -> (counts[shard], ...)."""
        return np.delete(rows, self.left_out[shard], axis=0) if shard in self.left_out else rows

    def in_blocks(self, block: int, readers: int = 1) -> "Source":
        """Return the source for a sampler that visits blocks of `block` neighbouring samples.

        A block of a remote shard is downloaded in one request. If the cache can hold the complete source and blocks are
        small, one request downloads several neighbouring blocks. `readers` is the number of sources of the mixture.
        """
        joined = int(self.sizes.sum()) <= self.access.settings.cache_gb * 1e9 / 2
        return replace(self, shards=[shard.in_blocks(block, joined) for shard in self.shards], readers=readers)

    def name(self, number: int) -> str:
        """Return the name of a sample as `SHARD.tar/KEY`."""
        shard, sample = self.place(number)
        return f"{self.shards[shard].name}/{self._index(shard).key(sample)}"

    def image(self, number: int, at: tuple[int, int] | None = None) -> Undecoded:
        """Return the image of a sample, encoded if the shards store files.

        Args:
            number: index of the sample in the source.
            at: seed of the run and position of the sample in the run, from which random numbers of the user's code
                follow. None stands for the seed 0 and the position `number`.
        """
        if self.access.stages:
            self._last = (number, self._staged(number, at or (0, number)))
            return self._last[1].image
        shard, sample = self.place(number)
        with self._seeded(shard, at or (0, number)):
            return self.shards[shard].page(self._index(shard), sample)

    def stored_image(self, number: int) -> Undecoded:
        """Return the image of a sample as the shards store it, without stages of the user."""
        shard, sample = self.place(number)
        with self._seeded(shard, (0, number)):
            return self.shards[shard].image(self._index(shard), sample)

    def members(self, number: int, at: tuple[int, int] | None = None) -> Any:
        """Return a sample in the form of webdataset, after the stages of the user.

        Raises:
            DroppedError: a stage dropped the sample.
        """
        shard, sample = self.place(number)
        with self._seeded(shard, at or (0, number)):
            found = self.shards[shard].members(self._index(shard), sample)
            return self.access.stages(found, self.name(number)) if self.access.stages else found

    def _staged(self, number: int, at: tuple[int, int]) -> Item:
        """Return the image and the label that the stages of the user make of a sample."""
        return item_of(self.members(number, at), self.access.keys, self.name(number))

    def _seeded(self, shard: int, at: tuple[int, int]) -> AbstractContextManager[Any]:
        """Return a context in which the global random generators are seeded, if the shard runs code of the user."""
        if not (self.shards[shard].runs_code or self.access.stages):
            return _NO_SEEDS
        return seeded(*at)

    def target(self, number: int) -> bytes:
        """Return the encoded map of a sample, a PNG or a NumPy array."""
        shard, sample = self.place(number)
        return self.shards[shard].target(self._index(shard), sample)

    def label(self, number: int) -> int:
        """Return the class number of a sample, renumbered if the source has `numbers`."""
        shard, sample = self.place(number)
        if self.access.stages:
            label = self._staged_label(number)
        elif self.optional_labels and self._index(shard).labels[sample, 0] < 0:
            return -1
        else:
            try:
                with self._seeded(shard, (0, number)):
                    label = self.shards[shard].label(self._index(shard), sample)
            except NoLabelError:
                if self.optional_labels:
                    return -1
                raise
        if self.numbers is None:
            if label > LARGEST_LABEL:
                raise SampleError(
                    f"the label of {self.name(number)} is {label}, but labels may be {LARGEST_LABEL} at most. "
                    "Number the classes from 0, without gaps."
                )
            return label
        if not 0 <= label < len(self.numbers):
            raise SampleError(
                f"the label of {self.name(number)} is {label}, but {CLASSES} names {len(self.numbers)} classes. "
                f"Add the missing names to {CLASSES}, or correct the .cls member."
            )
        return self.numbers[label]

    def _staged_label(self, number: int) -> int:
        if self._last is None or self._last[0] != number:
            self._last = (number, self._staged(number, (0, number)))
        return label_number(self._last[1].label, self.name(number))

    def _first_staged_label(self) -> None:
        """Check that the stages of the user yield a label, with the first sample that they do not drop."""
        for number in range(min(self.images, MOST_PROBED)):
            with suppress(DroppedError):
                self._staged_label(number)
                return

    def prepare(self, numbers: Sequence[int] | np.ndarray) -> None:
        """Download the data of samples to the cache, with several simultaneous requests.

        Byte ranges that are already in the cache are not downloaded again.
        """
        if not self._downloads:
            return
        wanted: dict[int, list[int]] = {}
        for shard, sample in map(self.place, numbers):
            if self.shards[shard].downloads:
                wanted.setdefault(shard, []).append(sample)

        def plan(shard: int) -> list[Callable[[], None]]:
            return self.shards[shard].fetches(self._index(shard), wanted[shard])

        with ThreadPoolExecutor(FETCHERS) as pool:
            planned = [call for calls in pool.map(plan, wanted) for call in calls]
            list(pool.map(lambda call: call(), planned))

    def cached_bytes(self, samples: int) -> float:
        """Return the number of bytes that the cache must hold while `samples` samples are in use."""
        used = min(samples / self.images, 1)
        return sum(
            int(size) * (used if shard.supports_ranges else 1)
            for shard, size in zip(self.shards, self.sizes, strict=True)
            if shard.downloads
        )

    def all_labelled(self) -> bool:
        """Return True if every sample has a label, and the labels can be compared."""
        return self.count_labels() == self.images

    def count_labels(self) -> int:
        """Return the number of samples with a label, or 0 if the labels cannot be compared."""
        try:
            refuse_mixed_classes([self])
        except ShardError as error:
            warn_once(f"labels are left out: {error}")
            return 0
        if self.access.stages:
            try:
                self._first_staged_label()
            except SampleError as error:
                if self._last is not None and self._last[1].label is not None:
                    warn_once(f"labels are left out: {error}")
                return 0
            return self.images
        unknown = np.flatnonzero(self.labelled < 0)
        counted = sum(int(self.shards[shard].header().summary[1]) for shard in unknown)
        return int(self.labelled.clip(0).sum()) + counted

    def require_labels(self) -> None:
        """Check that every sample has a label, unless labels are optional. The check uses index.json or the headers of
        the tar files.

        Raises:
            SampleError: a sample has no label. The message names the sample.
            ShardError: two folders or files number their classes differently (`class_names`).
        """
        refuse_mixed_classes([self])
        if self.access.stages:
            self._first_staged_label()
            return
        if self.optional_labels:
            return
        for shard in np.flatnonzero((self.labelled >= 0) & (self.labelled < self.counts))[:1]:
            unlabelled = np.flatnonzero(self.numbered(int(shard), self.shards[shard].index().labels)[:, 0] < 0)
            self.label(int(self.number(shard, unlabelled[0])))

    def require_targets(self) -> None:
        """Check that every sample has a map. The check reads the index of every shard.

        Raises:
            SampleError: a sample has no map. The message names the sample.
        """
        for shard, opened in enumerate(self.shards):
            maps = opened.index().maps
            maps = self.numbered(shard, maps) if len(maps) else maps
            if not len(maps) or (maps[:, 0] < 0).any():
                self.target(int(self.number(np.int64(shard), maps[:, 0].argmin() if len(maps) else np.int64(0))))

    def class_names(self) -> tuple[str, ...] | None:
        """Return the class names in the order of the class numbers, or None if the classes have no names.

        The class names of a folder of images are those of its subfolders, and a Parquet file may name its own classes.
        Other folders have a `classes.json`.

        Raises:
            ShardError: two folders or files number their classes differently, only some of them name their classes, or
                a `classes.json` cannot be used.
        """
        return shared_class_names(self.shards)

    def _load_index(self, shard: int) -> Index:
        opened, index = self.shards[shard], self.shards[shard].index()
        if index.summary[0] != (count := self.counts[shard] + len(self.left_out.get(shard, ()))):
            raise ShardError(
                f"{opened.path} has {index.summary[0]} samples, but {count} were expected from index.json "
                f"or from an earlier count. The shard or the index has changed. Restart the run. {CORRECT_INDEX}"
            )
        return index


def shared_class_names(shards: Sequence[Shard]) -> tuple[str, ...] | None:
    """Return the class names of several shards, or None if the classes have no names.

    Raises:
        ShardError: as `Source.class_names`.
    """
    by_name = {shard.names_classes: shard for shard in shards}
    remedy = next(iter(by_name.values())).class_remedy
    return equal_names(((name, shard.class_names()) for name, shard in by_name.items()), remedy)


def equal_names(named: Iterable[tuple[str, tuple[str, ...] | None]], remedy: str) -> tuple[str, ...] | None:
    """Return the class names of several sets, which must be equal.

    Args:
        named: name of each set in messages, and its class names (None if it does not name its classes).
        remedy: advice for sets that number their classes differently, without a full stop.

    Raises:
        ShardError: as `Source.class_names`.
    """
    (first, names), *others = named
    for other, found in others:
        if found == names:
            continue
        if found is None or names is None:
            named, unnamed = (first, other) if found is None else (other, first)
            raise ShardError(
                f"{named} names its classes, but {unnamed} does not, so their labels cannot be compared. If both "
                f"number the classes in the same way, name them in both: folders of tars with the same {CLASSES}, "
                "Parquet files with the same metadata. Otherwise, use them separately."
            )
        pairs = enumerate(itertools.zip_longest(names, found))
        number, (one, two) = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
        raise ShardError(
            f"{first} and {other} number their classes differently: class {number} is {_class(one)} in the first, but "
            f"{_class(two)} in the second, so their labels cannot be compared. {remedy}, or use them separately."
        )
    return names


def refuse_mixed_classes(sources: Sequence[Source]) -> None:
    """Raise `ShardError` if the samples of several sources may number their classes differently.

    The class names are read only if several folders or files name classes.
    """
    shards = [shard for one in sources for shard in one.shards]
    if len({shard.names_classes for shard in shards}) > 1 or any(shard.runs_code for shard in shards):
        shared_class_names(shards)  # one data set of the user may consist of several


def _class(name: str | None) -> str:
    return "missing" if name is None else repr(name)
