"""Lists of tar shards: from names to samples."""

import functools
import glob
import os
import random
import re
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TaskID
from webdataset.shardlists import expand_urls

from data.tars import REMEDY, Index, Shard, ShardError
from data.tars import cache_folder as cache_folder

Pattern = str | os.PathLike[str]
Shards = Pattern | Sequence[Pattern]
"""A path, a glob, a brace range such as `train-{000000..000099}.tar`, or several of them. Local `.tar` or `.tar.gz`."""
WeightedShards = Shards | Mapping[str, float]
"""The same, or several of them with their shares of the samples."""

MOST_LISTED = 20
THREADS = 16
KEPT_SAMPLES = 2_000_000  # whose places a reader remembers, about 60 bytes each
KEPT_FILES = 128


def expand(shards: Shards) -> list[str]:
    """Paths of the shards, in the order of the patterns; those of a glob are sorted.

    Raises:
        ShardError: a URL, a glob that matches nothing, a shard named twice, or none named.
    """
    patterns = [shards] if isinstance(shards, (str, os.PathLike)) else list(shards)
    paths = [path for pattern in patterns for path in _matches(os.path.expanduser(os.fspath(pattern)))]
    if not paths:
        raise ShardError("no shards were named")
    if twice := [path for path, count in Counter(paths).items() if count > 1]:
        raise ShardError(
            f"named more than once: {', '.join(twice[:MOST_LISTED])}; use weights to see shards more often"
        )
    return paths


def _matches(pattern: str) -> list[str]:
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://|pipe:", pattern):
        raise ShardError(f"{pattern}: only local shards can be read; copy them to a disk and name them there")
    if os.path.exists(pattern):
        return [pattern]
    try:
        braced = expand_urls(pattern)
    except ValueError as error:
        raise ShardError(f"{pattern}: {error}") from error
    paths = []
    for path in braced:
        found = sorted(glob.glob(path)) if glob.has_magic(path) else [path]
        if not found:
            raise ShardError(f"{pattern}: no file matches")
        paths += found
    return paths


@dataclass(frozen=True)
class ShardList:
    """Shards that were opened: S of them."""

    shards: list[Shard]
    counts: np.ndarray
    """(S,) int64: samples"""
    labelled: np.ndarray
    """(S,) int64: samples that have a label"""

    @property
    def images(self) -> int:
        return int(self.counts.sum())


def open_shards(shards: Shards, *, progress: bool = True) -> ShardList:
    """Counts the samples of shards, reading the headers of those that the cache does not know yet.

    Args:
        shards: see `Shards`.
        progress: show a bar on stderr if it takes longer than a second.

    Raises:
        ShardError: naming all shards that cannot be used (the first 20 of them), and why.
    """
    if isinstance(shards, Mapping):
        raise ShardError("weights have no meaning here: give a path, a pattern or a list of them")
    paths = expand(shards)
    # Processes that start together begin at different places, and so do most of the reading for each other.
    first = random.SystemRandom().randrange(len(paths))
    opened: dict[int, tuple[Shard, np.ndarray]] = {}
    errors: dict[int, ShardError] = {}
    with ThreadPoolExecutor(THREADS) as pool:
        futures = {pool.submit(_open, paths[place]): place for place in [*range(first, len(paths)), *range(first)]}
        try:
            for future in _shown(futures) if progress else as_completed(futures):
                try:
                    opened[futures[future]] = future.result()
                except ShardError as error:
                    errors[futures[future]] = error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    if errors:
        listed = "\n  ".join(str(errors[place]) for place in sorted(errors)[:MOST_LISTED])
        more = f"\n  and {len(errors) - MOST_LISTED} more" if len(errors) > MOST_LISTED else ""
        raise ShardError(f"{len(errors)} of {len(paths)} shards cannot be used:\n  {listed}{more}")
    summaries = np.stack([opened[place][1] for place in range(len(paths))])  # (S, 3)
    return ShardList([opened[place][0] for place in range(len(paths))], summaries[:, 0], summaries[:, 1])


def _shown(futures: Collection[Future]) -> Iterator[Future]:
    """The futures as they complete; with a bar on stderr from the first second on."""
    start = time.monotonic()
    with ExitStack() as stack:
        bar, task = None, TaskID(0)
        for done, future in enumerate(as_completed(futures), 1):
            yield future
            if bar is None and time.monotonic() - start > 1:
                columns = (*Progress.get_default_columns(), MofNCompleteColumn())
                bar = stack.enter_context(Progress(*columns, console=Console(stderr=True)))
                task = bar.add_task("reading shards", total=len(futures))
            if bar is not None:
                bar.update(task, completed=done)


def _open(path: str) -> tuple[Shard, np.ndarray]:
    shard = Shard.at(path)
    shard.tar()
    return shard, shard.summary()


def open_sources(shards: WeightedShards, *, progress: bool = True) -> tuple[list[ShardList], list[float]]:
    """The sources of a mixture and their weights; one source of weight 1 when none are given.

    Raises:
        ShardError: as `open_shards`.
    """
    weighted = shards if isinstance(shards, Mapping) else None
    if weighted is None:
        return [open_shards(shards, progress=progress)], [1.0]  # pyright: ignore[reportArgumentType]
    if not weighted:
        raise ShardError("no shards were named")
    return [open_shards(source, progress=progress) for source in weighted], [float(w) for w in weighted.values()]


def plan(shards: WeightedShards, *, world_size: int = 1, workers: int = 0) -> list[dict[str, Any]]:
    """What a run would read, one entry a source: weight, shards, images, bytes, shards and images per worker.

    Raises:
        ShardError: as `open_shards`.
    """
    readers = world_size * max(workers, 1)
    return [
        {
            "weight": weight,
            "shards": len(source.shards),
            "images": source.images,
            "bytes": sum(shard.size for shard in source.shards),
            "shards_per_worker": len(source.shards) / readers,
            "images_per_worker": source.images / readers,
        }
        for source, weight in zip(*open_sources(shards), strict=True)
    ]


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

    Args:
        readers: of this process, which share what is kept in memory and open.
    """

    def __init__(self, shards: ShardList, readers: int = 1):
        self._shards = shards
        kept = max(KEPT_SAMPLES // int(shards.counts.max()) // readers, 4)
        self._index = functools.lru_cache(kept)(functools.partial(_load_index, shards))
        files = max(KEPT_FILES // readers, 1)
        self._file = functools.lru_cache(files)(lambda shard: _File(shards.shards[shard].tar()))

    def name(self, shard: int, sample: int) -> str:
        """`shard.tar/key`."""
        return f"{self._shards.shards[shard].name}/{self._index(shard).key(sample)}"

    def image(self, shard: int, sample: int) -> bytes:
        """The encoded image.

        Raises:
            ShardError: the shard has vanished or changed since it was opened.
        """
        return self._read(shard, *map(int, self._index(shard).images[sample]))

    def label(self, shard: int, sample: int) -> int:
        """The class of the sample.

        Raises:
            ShardError: it has none, or not an integer; or as `image`.
        """
        offset, size = map(int, self._index(shard).labels[sample])
        if offset < 0:
            raise ShardError(f"labels are needed here, and {self.name(shard, sample)} has none; add KEY.cls members")
        text = self._read(shard, offset, min(size, 64))
        try:
            return int(np.int64(int(text)))
        except (ValueError, OverflowError):
            name = self.name(shard, sample)
            raise ShardError(f"labels are needed here, and that of {name} is {text!r}, not an integer") from None

    def _read(self, shard: int, offset: int, size: int) -> bytes:
        opened = self._shards.shards[shard]
        path = opened.path
        try:
            file, expected = self._file(shard), int(self._index(shard).summary[2])
            if file.size != expected:
                raise ShardError(f"{path}: was {expected} bytes when it was opened and is now {file.size}; {REMEDY}")
            if not path.endswith(".gz") and file.modified != opened.modified:
                raise ShardError(f"{path}: has changed since it was opened; start again")
            data = os.pread(file.descriptor, size, offset)
        except OSError as error:
            raise ShardError(f"{path}: {error.strerror}; restore the shard or remove it from the list") from error
        if len(data) != size:
            end = os.fstat(file.descriptor).st_size
            raise ShardError(f"{path}: truncated at byte {end} while in use, expected {offset + size}; {REMEDY}")
        return data


def _load_index(shards: ShardList, shard: int) -> Index:
    index = shards.shards[shard].index()
    if index.summary[0] != shards.counts[shard]:
        raise ShardError(f"{shards.shards[shard].path}: has changed since it was opened; start again")
    return index
