"""Lists of tar shards: from names to samples."""

import dataclasses
import glob
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
from braceexpand import braceexpand
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TaskID
from webdataset.shardlists import expand_urls

from data.shards import remote
from data.shards.cache import CacheError
from data.shards.index import FOLDER_INDEX, REMAKE, read_folder
from data.shards.reader import Reader as Reader
from data.shards.retry import DEFAULT
from data.shards.retry import SourceConfig as SourceConfig
from data.shards.shard import Shard, ShardList, say_once
from data.shards.tar import ShardError
from data.shards.tar import cache_folder as cache_folder

LARGEST_FOLDER_INDEX = 2**28  # bytes; a hundred thousand shards take about 20 MB

log = logging.getLogger(__name__)


class Sources(NamedTuple):
    """The sources of a mixture that were opened."""

    lists: list[ShardList]
    weights: list[float]


Pattern = str | os.PathLike[str]
Shards = Pattern | Sequence[Pattern] | ShardList
"""A path, a glob, a brace range such as `train-{000000..000099}.tar`, or one of them as a URL (`https://`, `s3://`,
`gs://` and what else fsspec opens); the `index.json` of a folder; `pipe:COMMAND`; or several of them; or what was
opened before. Shards are `.tar` or `.tar.gz`."""
WeightedShards = Shards | Mapping[str, float] | Sources
"""The same, or several of them with their shares of the samples."""

MOST_LISTED = 20
THREADS = 16


def expand(shards: Shards, source: SourceConfig = DEFAULT) -> list[str]:
    """Paths and URLs of the shards, in the order of the patterns and of index.json; those of a glob are sorted.

    Raises:
        ShardError: a pattern that matches nothing or cannot be asked, a shard named twice, or none named.
    """
    return _expand(shards, _Indices(source))


def _expand(shards: Shards, indices: "_Indices") -> list[str]:
    if isinstance(shards, ShardList):
        return [shard.path for shard in shards.shards]
    patterns = [shards] if isinstance(shards, (str, os.PathLike)) else list(shards)
    paths = [path for pattern in patterns for path in _matches(os.path.expanduser(os.fspath(pattern)), indices)]
    if not paths:
        raise ShardError("no shards were named")
    if twice := [path for path, count in Counter(paths).items() if count > 1]:
        raise ShardError(
            f"named more than once: {', '.join(twice[:MOST_LISTED])}; use weights to see shards more often"
        )
    return paths


def _matches(pattern: str, indices: "_Indices") -> list[str]:
    pattern = pattern.removeprefix("file://")
    if os.path.exists(pattern):
        return indices.read(pattern) if pattern.endswith(FOLDER_INDEX) else [pattern]
    try:
        if pattern.startswith(remote.PIPE):
            return list(braceexpand(pattern, escape=False))  # a command keeps its backslashes
        braced = expand_urls(pattern)
    except ValueError as error:
        raise ShardError(f"{pattern}: {error}") from error
    paths = []
    for path in braced:
        if remote.is_remote(path):
            found = remote.matches(path, indices.source) if "*" in path or "[" in path else [path]
        else:
            found = [_file(one) for one in sorted(glob.glob(path))] if glob.has_magic(path) else [path]
        if not found:
            raise ShardError(f"{pattern}: no file matches")
        for one in found:
            paths += indices.read(one) if remote.without_query(one).endswith(FOLDER_INDEX) else [one]
    return paths


def _file(name: str) -> str:
    """The path of a file that was found: never a command or a URL, which only a user names."""
    return f"./{name}" if remote.is_remote(name) else name


class _Indices:
    """What the `index.json` of folders say, each of them read once."""

    def __init__(self, source: SourceConfig):
        self.source = source
        self.entries: dict[str, _Listed] = {}
        self._asked: set[str] = set()

    def read(self, path: str) -> list[str]:
        """The shards that the index at `path` lists.

        Raises:
            ShardError: there is none, or it is not one.
        """
        shards = self._read(path)
        if shards is None:
            raise ShardError(f"{path}: not found; name shards, or an index of them")
        return shards

    def look(self, shard: str) -> None:
        """Looks for an index beside a shard, and only warns of one that is none: others write such files too.

        Raises:
            ShardError: its server does not answer, where shards that do not come are not to be skipped.
        """
        folder = remote.without_query(shard).rpartition("/")[0]
        path = f"{folder}/{FOLDER_INDEX}" if folder else FOLDER_INDEX
        if shard.startswith(remote.PIPE) or shard in self.entries or path in self._asked:
            return
        try:
            self._read(path, lenient=True)
        except ShardError as error:
            if self.source.unreadable == "stop":
                raise
            log.warning("not used: %s", error)

    def _read(self, path: str, *, lenient: bool = False) -> list[str] | None:
        self._asked.add(path)
        written = 0
        if remote.is_remote(path):
            content = remote.read_small(path, self.source, LARGEST_FOLDER_INDEX)
        else:
            try:
                with open(path, "rb") as file:
                    content = file.read(LARGEST_FOLDER_INDEX + 1)
                    written = os.fstat(file.fileno()).st_mtime_ns
            except OSError:
                content = None
        if content is None:
            return None
        folder = remote.without_query(path)[: -len(FOLDER_INDEX)].rpartition("/")
        try:
            listed = read_folder(content, path).shardlist
        except ShardError as error:
            if not lenient:
                raise
            log.warning("not used: %s", error)
            return None
        entries = {
            "".join(folder[:2]) + entry.url: _Listed(
                entry.nsamples, -1 if entry.labelled is None else entry.labelled, entry.filesize, entry.sha256, written
            )
            for entry in listed
        }
        if not folder[1]:
            entries = {_file(path): entry for path, entry in entries.items()}
        self.entries |= entries
        return list(entries)


def open_shards(shards: Shards, *, progress: bool = True, source: SourceConfig = DEFAULT) -> ShardList:
    """Counts the samples of shards: by their index.json, by what the cache knows, or by reading headers.

    Args:
        shards: see `Shards`; shards that were opened are given back.
        progress: show a bar on stderr if it takes longer than a second.
        source: how they are reached.

    Raises:
        ShardError: naming all shards that cannot be used (the first 20 of them), and why; only if none can, where
            unreadable ones are to be skipped.
    """
    if isinstance(shards, ShardList):
        return shards
    if isinstance(shards, Mapping):
        raise ShardError("weights have no meaning here: give a path, a pattern or a list of them")
    indices = _Indices(source)
    paths = _expand(shards, indices)
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(indices.look, {path.rpartition("/")[0]: path for path in paths}.values()))
    opened: dict[int, _Opened] = {}
    errors: dict[int, ShardError] = {}
    for place, path in enumerate(paths):
        if path in indices.entries and remote.is_remote(path):
            opened[place] = _known(path, indices.entries[path], source)
    # Processes that start together begin at different places, and so do most of the reading for each other.
    first = random.SystemRandom().randrange(len(paths))
    unknown = [place for place in [*range(first, len(paths)), *range(first)] if place not in opened]
    with ThreadPoolExecutor(THREADS) as pool:
        futures = {pool.submit(_open, paths[place], indices): place for place in unknown}
        try:
            for future in _shown(futures) if progress else as_completed(futures):
                try:
                    opened[futures[future]] = future.result()
                except ShardError as error:
                    errors[futures[future]] = error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    _judge(errors, len(paths), source)
    found = [opened[place] for place in sorted(opened)]
    for shard in {remote.host(one.shard.path): one.shard for one in found}.values():
        _ask(shard)
    counts, labelled, sizes = np.array([[one.samples, one.labelled, one.size] for one in found], dtype=np.int64).T
    return ShardList(
        [one.shard for one in found], counts, labelled, sizes, [paths[place] for place in sorted(errors)], source
    )


class _Listed(NamedTuple):
    """What an index says of a shard: samples, those with a label or -1, bytes, checksum; and when, in nanoseconds."""

    samples: int
    labelled: int
    size: int
    sha256: str | None
    written: int


class _Opened(NamedTuple):
    """A shard, its samples, those with a label, and its bytes."""

    shard: Shard
    samples: int
    labelled: int
    size: int


def _judge(errors: dict[int, ShardError], total: int, source: SourceConfig) -> None:
    """Raises what is wrong, or warns of it."""
    if not errors:
        return
    listed = "\n  ".join(str(errors[place]) for place in sorted(errors)[:MOST_LISTED])
    more = f"\n  and {len(errors) - MOST_LISTED} more" if len(errors) > MOST_LISTED else ""
    message = f"{len(errors)} of {total} shards cannot be used:\n  {listed}{more}"
    if source.unreadable == "stop" or len(errors) == total or any(isinstance(e, CacheError) for e in errors.values()):
        raise ShardError(message)
    log.warning("left out: %s", message)


def _ask(shard: Shard) -> None:
    """Finds out whether a web server sends parts of files, before there are workers that would all do so."""
    try:
        _ = shard.in_parts
    except ShardError:
        if shard.source.unreadable == "stop":
            raise


def _known(path: str, listed: _Listed, source: SourceConfig) -> _Opened:
    """A remote shard by its index alone."""
    shard = Shard(path, listed.size, listed.sha256 or "", sha256=listed.sha256, source=source)
    return _Opened(shard, listed.samples, listed.labelled, listed.size)


def _open(path: str, indices: _Indices) -> _Opened:
    shard = Shard.at(path, indices.source)
    listed = indices.entries.get(path)
    if listed is not None and listed.size == shard.size and listed.written >= shard.modified:
        return _Opened(dataclasses.replace(shard, sha256=listed.sha256), listed.samples, listed.labelled, shard.size)
    if listed is not None and listed.size != shard.size:
        raise ShardError(
            f"{path}: has {shard.size} bytes, and {listed.size} by {FOLDER_INDEX}: was it cut short? Copy or make it "
            f"again; if the index is wrong, {REMAKE}"
        )
    if listed is not None:
        say_once(f"{os.path.dirname(path)}/{FOLDER_INDEX} is not used where it is older than a shard")
    samples, labelled, size = map(int, shard.summary())
    return _Opened(shard, samples, labelled, shard.size or size)


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


def open_sources(shards: WeightedShards, *, progress: bool = True, source: SourceConfig = DEFAULT) -> Sources:
    """The sources of a mixture and their weights; one source of weight 1 when none are given.

    Raises:
        ShardError: as `open_shards`.
    """
    if isinstance(shards, Sources):
        return shards
    if not isinstance(shards, Mapping):
        return Sources([open_shards(shards, progress=progress, source=source)], [1.0])
    if not shards:
        raise ShardError("no shards were named")
    lists = [open_shards(one, progress=progress, source=source) for one in shards]
    return Sources(lists, [float(weight) for weight in shards.values()])


def plan(
    shards: WeightedShards, *, world_size: int = 1, workers: int = 0, source: SourceConfig = DEFAULT
) -> list[dict[str, Any]]:
    """What a run would read, one entry a source: weight, shards, images, bytes, shards and images per worker.

    Raises:
        ShardError: as `open_shards`.
    """
    readers = world_size * max(workers, 1)
    return [
        {
            "weight": weight,
            "shards": len(opened.shards),
            "images": opened.images,
            "bytes": int(opened.sizes.sum()),
            "shards_per_worker": len(opened.shards) / readers,
            "images_per_worker": opened.images / readers,
        }
        for opened, weight in zip(*open_sources(shards, source=source), strict=True)
    ]
