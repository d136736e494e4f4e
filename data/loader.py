"""Batches for training and for evaluation: shards, order, decoding and a transform put together.

B images; crop c of image b lies at row c * B + b of a view. What a batch holds depends on the shards, the seed and its
place in the run alone, whatever the number of processes, of worker processes, or the step at which a run was resumed.
"""

import functools
import logging
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from data.batch import Batch
from data.collate import Transform
from data.dataset import MOST_NAMED, Evaluation, Training
from data.dataset import LoaderConfig as LoaderConfig
from data.decode import MAX_PIXELS
from data.sampler import LANES, PATTERN, WINDOW, Mixture, Order, bounded_windows, step_positions
from data.shards import DEFAULT, ShardError, ShardList, Shards, SourceConfig, WeightedShards, open_shards, open_sources
from data.shards.reader import Reader, warn_of_small_cache
from data.shared_memory import Parcel, Pool
from data.workers import start_worker

AHEAD = 2  # batches that a worker has made before one is asked for

log = logging.getLogger(__name__)


def training_batches(
    shards: WeightedShards,
    transform: Transform,
    *,
    batch_size: int,
    seed: int,
    steps: int,
    first_step: int = 0,
    rank: int = 0,
    world_size: int = 1,
    accumulation: int = 1,
    workers: int = 0,
    lanes: int = LANES,
    block: int | None = None,
    window: int = WINDOW,
    window_gb: float | None = None,
    source: SourceConfig = DEFAULT,
    config: LoaderConfig = LoaderConfig(),  # noqa: B008 - frozen
) -> "Batches":
    """The batches of steps `first_step` to `steps` - 1 for one process: `accumulation` of them a step.

    A corrupt image is replaced by the next good one of its lane and named in `Batch.skipped`.

    Args:
        shards: see `WeightedShards`.
        transform: makes the crops.
        batch_size: images of one step, over all processes and all `accumulation` passes.
        seed: 0 to 2**64 - 1.
        steps: where the run ends, counted from 0.
        first_step: where to begin.
        rank: which of `world_size` processes this is.
        world_size: processes.
        accumulation: forward passes of a step.
        workers: processes that decode for this one; 0 decodes in this one.
        lanes: see `Order`; this and the next two are part of the order.
        block: see `Order`.
        window: see `Order`.
        window_gb: what the windows of all lanes may span, in GB of encoded images; see `bounded_windows`.
        source: how shards are reached.
        config: who decodes and cuts.

    Raises:
        ValueError: the batch does not split evenly, there are fewer images than a batch needs, or `config` cannot be.
        ShardError: shards that cannot be used; while iterating also for one that vanishes or changes, or for more than
            100 corrupt images in a row.
    """
    _check_split(batch_size, world_size, accumulation)
    sources, weights = open_sources(shards, progress=rank == 0, source=source)
    windows = bounded_windows([opened.mean_bytes for opened in sources], window, window_gb, lanes)
    orders = [
        Order(opened.counts, seed, lanes=lanes, block=block, window=windows[number], source=number)
        for number, opened in enumerate(sources)
    ]
    if rank == 0:
        warn_of_small_cache(sources, [order.window * lanes for order in orders])
    mixture = Mixture(orders, weights, seed)
    _check_enough(mixture, batch_size)
    positions = functools.partial(
        step_positions,
        batch_size=batch_size,
        rank=rank,
        world_size=world_size,
        accumulation=accumulation,
        lanes=lanes,
    )
    passes = range(first_step * accumulation, steps * accumulation)
    config, images = config.resolved(transform), batch_size // world_size // accumulation
    training = Training(transform, config, images, sources, mixture, seed, accumulation, positions)
    return Batches(_Stream(passes, training), sum(source.images for source in sources), workers)


def evaluation_batches(
    shards: Shards,
    transform: Transform,
    *,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    workers: int = 0,
    labels: bool = True,
    max_pixels: int = MAX_PIXELS,
    source: SourceConfig = DEFAULT,
) -> "Batches":
    """Every image once, in the order of the shards: one stretch for each process, which differ by at most one image.

    Workers cut the crops from all pixels: scores are the same on every machine.

    Corrupt images are left out and named in `Batch.skipped`; a batch of nothing else does not appear.

    Args:
        shards: see `Shards`.
        transform: makes the crops; what it draws depends on the place of the image alone.
        batch_size: images of one batch of one process; its last batch may have fewer.
        rank: which of `world_size` processes this is.
        world_size: processes.
        workers: processes that decode for this one; 0 decodes in this one.
        labels: whether to read classes.
        max_pixels: larger images count as corrupt.
        source: how shards are reached.

    Raises:
        ShardError: shards that cannot be used, or labels that are asked for and missing; while iterating also for a
            label that is not an integer.
    """
    if batch_size < 1:
        raise ValueError(f"a batch has at least one image, not {batch_size}")
    opened = open_shards(shards, progress=rank == 0, source=source)
    if labels:
        require_labels(opened)
    part = range(rank * opened.images // world_size, (rank + 1) * opened.images // world_size)
    batches = [part[start : start + batch_size] for start in range(0, len(part), batch_size)]
    evaluation = Evaluation(transform, min(batch_size, opened.images), opened, labels, max_pixels)
    return Batches(_Stream(batches, evaluation), opened.images, workers)


def require_labels(opened: ShardList) -> None:
    """
    Raises:
        ShardError: names a sample without a label, as far as headers or index.json tell.
    """
    for shard in np.flatnonzero((opened.labelled >= 0) & (opened.labelled < opened.counts))[:1]:
        unlabelled = np.flatnonzero(opened.shards[shard].index().labels[:, 0] < 0)
        Reader(opened).label(int(shard), int(unlabelled[0]))


class Batches:
    """Can be iterated again and again; `len` is in batches of this process.

    Args:
        stream: what makes them.
        total: images in the shards, for all processes.
        workers: processes that decode for this one.
    """

    def __init__(self, stream: "_Stream", total: int, workers: int):
        self.total = total
        self.stream, self._workers = stream, min(workers, len(stream.work))

    def __len__(self) -> int:
        return len(self.stream.work)

    def __iter__(self) -> Iterator[Batch]:
        skipped = 0
        # forked with SIGTERM held back, so that none comes before a worker has arranged what it does then
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            batches = iter(self._loader())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for batch in batches:
            if isinstance(batch, _Failure):
                raise ShardError(batch.message)
            if isinstance(batch, Parcel):
                batch = batch.open()
            for name in batch.skipped:
                skipped += 1
                if skipped <= MOST_NAMED or skipped & (skipped - 1) == 0:  # then only where the count doubles
                    log.warning("corrupt image %s (%d so far)", name, skipped)
            if batch.keys:
                yield batch

    def _pool(self) -> Pool | None:
        """The workers' memory: of each, the batches that wait and the one that is being opened."""
        if not self._workers:
            return None
        try:
            return Pool(self._workers, AHEAD + 1, self.stream.make.size)
        except OSError as error:  # where the system promises no more than it has
            log.warning("no memory to share with workers: %s; they send batches more slowly", error.strerror)
            return None

    def _loader(self) -> DataLoader:
        workers = self._workers
        return DataLoader(
            _Stream(self.stream.work, self.stream.make, self._pool()),
            batch_size=None,
            collate_fn=_same,
            num_workers=workers,
            prefetch_factor=AHEAD if workers else None,
            # Others start threads before signals are arranged, and are no children of this process.
            multiprocessing_context="fork" if workers else None,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=start_worker,
            generator=torch.Generator(),  # the global one would lose a draw at each start, also at a resumed one
        )


@dataclass
class _Failure:
    """A ShardError on its way from a worker, which as an exception would arrive as a traceback."""

    message: str


class _Stream(IterableDataset):
    """One batch for each entry of `work`, in their order; workers take turns, and leave pixels in the `pool`."""

    def __init__(self, work: Sequence[Any], make: Training | Evaluation, pool: Pool | None = None):
        self.work, self.make, self._pool = work, make, pool

    def __iter__(self) -> Iterator[Batch | Parcel | _Failure]:
        info = get_worker_info()
        try:
            for entry in self.work[info.id :: info.num_workers] if info else self.work:
                slot = self._pool.take(info.id) if self._pool and info else None
                batch = self.make(entry, slot.memory if slot else None)
                yield Parcel.packed(batch, slot) if slot else batch
        except ShardError as error:
            yield _Failure(str(error))


def _same(batch: Any) -> Any:
    return batch


def _check_split(batch_size: int, world_size: int, accumulation: int) -> None:
    unit = world_size * accumulation
    if batch_size < 1 or batch_size % unit:
        lower = batch_size // unit * unit
        near = f"{lower} and {lower + unit}" if lower > 0 else f"{unit}"
        raise ValueError(
            f"a batch of {batch_size} images does not split evenly over {world_size} processes and {accumulation} "
            f"accumulated passes; the nearest that does: {near}"
        )


def _check_enough(mixture: Mixture, batch_size: int) -> None:
    """An epoch is at least one batch, so that no batch is made of repetitions."""
    for order, quota in zip(mixture.orders, mixture.quotas, strict=True):
        needed = batch_size * int(quota) // PATTERN
        if order.images < needed:
            raise ValueError(
                f"{order.images} images are fewer than the {needed} that a batch of {batch_size} takes of them: "
                f"lower it to {order.images * PATTERN // int(quota)} or less, or add images"
            )
