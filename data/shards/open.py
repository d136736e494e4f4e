"""Opening of shards: check that the shards can be read, and count their samples."""

import dataclasses
import logging
import os
import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from typing import NamedTuple, TypedDict

import numpy as np

from tessera.data.shards import remote
from tessera.data.shards.errors import MAKE_INDEX_AGAIN, MOST_LISTED, ResourceError, ShardError
from tessera.data.shards.index import FOLDER_INDEX
from tessera.data.shards.patterns import FolderIndices, Listed, PixelMoments, Shards, expand_with
from tessera.data.shards.progress import show_progress
from tessera.data.shards.retry import DEFAULT, SourceConfig
from tessera.data.shards.shard import Shard, warn_once
from tessera.data.shards.shard_list import ShardList

THREADS = 16

log = logging.getLogger(__name__)


class Sources(NamedTuple):
    """Opened sources of a data mixture, with their weights."""

    lists: list[ShardList]
    weights: list[float]


WeightedShards = Shards | Mapping[str, float] | Sources
"""Shards without weights, or a mixture. A mixture is a dict that maps each shard pattern to its share of the samples,
or a `Sources` with opened shards."""


class SourcePlan(TypedDict):
    """Weight and size of one source of a mixture, and its mean number of shards and images per loader worker."""

    weight: float
    shards: int
    images: int
    bytes: int
    shards_per_worker: float
    images_per_worker: float


class _Opened(NamedTuple):
    """An opened shard with its size and counts."""

    shard: Shard
    samples: int
    labelled: int
    """Number of samples with a label, or -1 if unknown."""
    size: int
    """Size of the shard in bytes."""
    moments: PixelMoments | None = None


def open_shards(shards: Shards, *, progress: bool = True, source: SourceConfig = DEFAULT) -> ShardList:
    """Open shards and count their samples.

    The counts come from `index.json`, from the cache, from the tables beside the shards, or from the tar headers.

    Args:
        shards: shard patterns (see `Shards`), or a list of opened shards, which is returned unchanged.
        progress: True shows the progress on stderr.
        source: settings for access to shards.

    Raises:
        ShardError: a pattern is wrong, or a shard cannot be used. The message lists the first 20 unusable shards with
            the reasons. If the settings skip unreadable shards, unusable shards raise the error only if no shard can be
            used or the cache cannot be written.
    """
    if isinstance(shards, ShardList):
        return shards
    if isinstance(shards, Mapping):
        raise ShardError(
            "a mixture with weights was given, but weights are possible for training data only. "
            "Give a path, a pattern, or a list of paths and patterns."
        )
    indices = FolderIndices(source)
    paths = expand_with(indices, shards)
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(indices.read_beside, {path.rpartition("/")[0]: path for path in paths}.values()))
    opened, errors = _open_all(paths, indices, progress)
    _report(errors, len(paths), source)
    found = [opened[place] for place in sorted(opened)]
    for shard in {remote.host(one.shard.path): one.shard for one in found}.values():
        _probe_ranges(shard)
    counts, labelled, sizes = np.array([[one.samples, one.labelled, one.size] for one in found], dtype=np.int64).T
    statistics = {one.moments for one in found}
    moments = statistics.pop() if len(statistics) == 1 else None  # None if the shards have different statistics
    return ShardList(
        [one.shard for one in found],
        counts,
        labelled,
        sizes,
        unreadable=[paths[place] for place in sorted(errors)],
        source=source,
        mean=moments and moments.mean,
        std=moments and moments.std,
    )


def _open_all(
    paths: list[str], indices: FolderIndices, progress: bool
) -> tuple[dict[int, _Opened], dict[int, ShardError]]:
    """Open all shards.

    Return two dicts whose keys are positions in `paths`: the opened shards, and the errors of unusable shards.
    """
    opened: dict[int, _Opened] = {}
    errors: dict[int, ShardError] = {}
    verifies = indices.source.verify and os.environ.get("LOCAL_RANK", "0") == "0"  # one process of each node
    for place, path in enumerate(paths):
        if path in indices.entries and remote.is_remote(path) and not verifies:
            opened[place] = _from_index(path, indices.entries[path], indices.source)
    # Begin at a random shard. Processes that start at the same time then begin at different shards, so that each
    # process finds most shard indices in the cache, where another process has stored them.
    first = random.SystemRandom().randrange(len(paths))
    unknown = [place for place in [*range(first, len(paths)), *range(first)] if place not in opened]
    bar = show_progress("reading shards", len(unknown), "shards") if progress else nullcontext(lambda _: None)
    with ThreadPoolExecutor(THREADS) as pool, bar as show:
        futures = {pool.submit(_open, paths[place], indices, verifies): place for place in unknown}
        try:
            for done, future in enumerate(as_completed(futures), 1):
                try:
                    opened[futures[future]] = future.result()
                except ShardError as error:
                    errors[futures[future]] = error
                show(done)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return opened, errors


def _report(errors: dict[int, ShardError], total: int, source: SourceConfig) -> None:
    """Raise a `ShardError` that lists the unusable shards, or log the list if the settings skip unreadable shards."""
    if not errors:
        return
    listed = "\n  ".join(str(errors[place]) for place in sorted(errors)[:MOST_LISTED])
    more = f"\n  and {len(errors) - MOST_LISTED} more" if len(errors) > MOST_LISTED else ""
    message = f"{len(errors)} of {total} shards cannot be used:\n  {listed}{more}"
    if (
        source.unreadable == "stop"
        or len(errors) == total
        or any(isinstance(e, ResourceError) for e in errors.values())
    ):
        raise ShardError(message)
    log.warning("unusable shards are left out: %s", message)


def _probe_ranges(shard: Shard) -> None:
    """Check whether the web server of a shard supports byte ranges, so that loader workers need not check again."""
    try:
        _ = shard.supports_ranges
    except ShardError:
        if shard.source.unreadable == "stop":
            raise


def _from_index(path: str, listed: Listed, source: SourceConfig) -> _Opened:
    """Return a remote shard from its entry in `index.json`, without a request to the server."""
    shard = Shard(path, listed.size, listed.sha256 or "", sha256=listed.sha256, source=source)
    return _Opened(shard, listed.samples, listed.labelled, listed.size, listed.moments)


def _open(path: str, indices: FolderIndices, verifies: bool) -> _Opened:
    listed = indices.entries.get(path)
    if verifies and listed is not None and remote.is_remote(path):
        opened = _from_index(path, listed, indices.source)
        opened.shard.verify()
        return opened
    shard = Shard.at(path, indices.source)
    if verifies:
        dataclasses.replace(shard, sha256=listed and listed.sha256).verify()
    if listed is not None and listed.size == shard.size and listed.written >= shard.modified:
        shard = dataclasses.replace(shard, sha256=listed.sha256)
        return _Opened(shard, listed.samples, listed.labelled, shard.size, listed.moments)
    if listed is not None and listed.size != shard.size:
        raise ShardError(
            f"{path}: has {shard.size} bytes, but {FOLDER_INDEX} lists {listed.size}. The shard may have been "
            f"truncated. Copy or make the shard again. If the index is wrong: {MAKE_INDEX_AGAIN}"
        )
    if listed is not None:
        warn_once(f"{os.path.dirname(path)}/{FOLDER_INDEX} is not used for shards that are newer than this index")
    samples, labelled, size = map(int, shard.summary())
    return _Opened(shard, samples, labelled, shard.size or size)


def open_sources(shards: WeightedShards, *, progress: bool = True, source: SourceConfig = DEFAULT) -> Sources:
    """Open the sources of a mixture. Shards without weights form one source of weight 1.

    Raises:
        ShardError: the mixture is empty, or the shards of a source cannot be opened by `open_shards`.
    """
    if isinstance(shards, Sources):
        return shards
    if not isinstance(shards, Mapping):
        return Sources([open_shards(shards, progress=progress, source=source)], [1.0])
    if not shards:
        raise ShardError("the mixture names no shards. Give at least one pattern with a weight.")
    lists = [open_shards(one, progress=progress, source=source) for one in shards]
    return Sources(lists, [float(weight) for weight in shards.values()])


def plan(
    shards: WeightedShards, *, world_size: int = 1, workers: int = 0, source: SourceConfig = DEFAULT
) -> list[SourcePlan]:
    """Return the weight and size of each source, and its mean number of shards and images per loader worker.

    Raises:
        ShardError: the shards cannot be opened by `open_sources`.
    """
    readers = world_size * max(workers, 1)
    return [
        SourcePlan(
            weight=weight,
            shards=len(opened.shards),
            images=opened.images,
            bytes=int(opened.sizes.sum()),
            shards_per_worker=len(opened.shards) / readers,
            images_per_worker=opened.images / readers,
        )
        for opened, weight in zip(*open_sources(shards, source=source), strict=True)
    ]
