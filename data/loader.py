"""Batches for training and for evaluation: shards, order, decoding and a transform put together.

B images; crop c of image b lies at row c * B + b of a view. What a batch holds depends on the shards, the seed and its
place in the run alone, whatever the number of processes, of worker processes, or the step at which a run was resumed.
"""

import functools
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from data.batch import Batch, Crops, Packing, collate
from data.decode import ImageError, decode
from data.shards import Reader, ShardError, ShardList, Shards, WeightedShards, open_shards, open_sources
from data.stream import LANES, PATTERN, WINDOW, Mixture, Order, sample_rng, step_positions

MOST_SKIPPED = 100  # corrupt images in a row
MOST_NAMED = 10  # corrupt images that get a line of their own in the log

log = logging.getLogger(__name__)


class Transform(Protocol):
    """Makes the crops of one image. It must be picklable, and draw from `rng` alone."""

    @property
    def crops(self) -> tuple[int, ...]:
        """Crops per image in each view."""
        ...

    @property
    def packing(self) -> Packing | None:
        """How the crops are packed, where they are of many sizes."""
        ...

    def __call__(self, image: Tensor, rng: np.random.Generator) -> Crops:
        """From (3, H, W) uint8."""
        ...


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

    Raises:
        ValueError: the batch does not split evenly, or there are fewer images than a batch needs.
        ShardError: shards that cannot be used; while iterating also for one that vanishes or changes, or for more than
            100 corrupt images in a row.
    """
    _check_split(batch_size, world_size, accumulation)
    sources, weights = open_sources(shards, progress=rank == 0)
    orders = [
        Order(source.counts, seed, lanes=lanes, block=block, window=window, source=number)
        for number, source in enumerate(sources)
    ]
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
    training = _Training(transform, sources, mixture, seed, accumulation, positions)
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
) -> "Batches":
    """Every image once, in the order of the shards: one stretch for each process, which differ by at most one image.

    Corrupt images are left out and named in `Batch.skipped`; a batch of nothing else does not appear.

    Args:
        shards: see `Shards`.
        transform: makes the crops; what it draws depends on the place of the image alone.
        batch_size: images of one batch of one process; its last batch may have fewer.
        rank: which of `world_size` processes this is.
        world_size: processes.
        workers: processes that decode for this one; 0 decodes in this one.
        labels: whether to read classes.

    Raises:
        ShardError: shards that cannot be used, or labels that are asked for and missing; while iterating also for a
            label that is not an integer.
    """
    if batch_size < 1:
        raise ValueError(f"a batch has at least one image, not {batch_size}")
    opened = open_shards(shards, progress=rank == 0)
    if labels:
        for shard in np.flatnonzero(opened.labelled < opened.counts)[:1]:
            unlabelled = np.flatnonzero(opened.shards[shard].index().labels[:, 0] < 0)
            Reader(opened).label(int(shard), int(unlabelled[0]))
    part = range(rank * opened.images // world_size, (rank + 1) * opened.images // world_size)
    batches = [part[start : start + batch_size] for start in range(0, len(part), batch_size)]
    return Batches(_Stream(batches, _Evaluation(transform, opened, labels)), opened.images, workers)


def free_cores(processes: int) -> int:
    """Loader processes for each of a node's processes: its share of the cores, less one for itself, 1 to 8."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    cores = len(os.sched_getaffinity(0))
    allocated = int(os.environ.get("SLURM_CPUS_ON_NODE", cores))  # not every SLURM confines a job to them
    return max(1, min(8, min(cores, allocated) // local - 1))


class Batches:
    """Can be iterated again and again; `len` is in batches of this process.

    Args:
        stream: what makes them.
        total: images in the shards, for all processes.
        workers: processes that decode for this one.
    """

    def __init__(self, stream: "_Stream", total: int, workers: int):
        self.total = total
        self._count = len(stream.work)
        workers = min(workers, self._count)
        self._loader = DataLoader(
            stream,
            batch_size=None,
            collate_fn=_same,
            num_workers=workers,
            # Others start threads before signals are arranged, and are no children of this process.
            multiprocessing_context="fork" if workers else None,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=_start_worker,
            generator=torch.Generator(),  # the global one would lose a draw at each start, also at a resumed one
        )

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Batch]:
        skipped = 0
        # forked with SIGTERM held back, so that none comes before a worker has arranged what it does then
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            batches = iter(self._loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for batch in batches:
            if isinstance(batch, _Failure):
                raise ShardError(batch.message)
            for name in batch.skipped:
                skipped += 1
                if skipped <= MOST_NAMED or skipped & (skipped - 1) == 0:  # then only where the count doubles
                    log.warning("corrupt image %s (%d so far)", name, skipped)
            if batch.keys:
                yield batch


@dataclass
class _Failure:
    """A ShardError on its way from a worker, which as an exception would arrive as a traceback."""

    message: str


class _Stream(IterableDataset):
    """One batch for each entry of `work`, in their order; workers take turns."""

    def __init__(self, work: Sequence[Any], make: Callable[[Any], Batch]):
        self.work, self.make = work, make

    def __iter__(self) -> Iterator[Batch | _Failure]:
        info = get_worker_info()
        try:
            for entry in self.work[info.id :: info.num_workers] if info else self.work:
                yield self.make(entry)
        except ShardError as error:
            yield _Failure(str(error))


@dataclass
class _Training:
    """Makes the batch of one forward pass, given its number in the run."""

    transform: Transform
    sources: list[ShardList]
    mixture: Mixture
    seed: int
    accumulation: int
    positions: Callable[..., np.ndarray]
    """of a step and of `micro`, one of its passes"""

    @functools.cached_property
    def _readers(self) -> list[Reader]:
        return [Reader(source, len(self.sources)) for source in self.sources]  # in the process that reads

    def __call__(self, number: int) -> Batch:
        step, micro = divmod(number, self.accumulation)
        positions = self.positions(step, micro=micro)  # (B,)
        keys, images, skipped = [], [], []
        for position, source, shard, sample in zip(positions, *self.mixture(positions), strict=True):
            key, crops, corrupt = self._good(int(position), int(source), int(shard), int(sample))
            keys.append(key)
            images.append(crops)
            skipped += corrupt
        return collate(images, self.transform.crops, keys, packing=self.transform.packing, skipped=skipped)

    def _good(self, position: int, source: int, shard: int, sample: int) -> tuple[str, Crops, list[str]]:
        """Key and crops of the sample at a position, or of the next good one of its lane; and the corrupt ones."""
        reader, skipped = self._readers[source], []
        while len(skipped) < MOST_SKIPPED:
            key = reader.name(shard, sample)
            try:
                image = decode(reader.image(shard, sample))
                return key, self.transform(image, sample_rng(self.seed, position)), skipped
            except ImageError as error:
                skipped.append(f"{key}: {error}")
            _, shards, samples = self.mixture(np.array([position]), later=len(skipped))
            shard, sample = int(shards[0]), int(samples[0])
        first = "\n  ".join(skipped[:MOST_NAMED])
        raise ShardError(f"{MOST_SKIPPED} corrupt images in a row; make these shards again. The first:\n  {first}")


@dataclass
class _Evaluation:
    """Makes a batch of neighbouring samples, given their places in the whole list."""

    transform: Transform
    shards: ShardList
    labels: bool

    @functools.cached_property
    def _reader(self) -> Reader:
        return Reader(self.shards)  # in the process that reads

    def __call__(self, places: range) -> Batch:
        ends = np.cumsum(self.shards.counts)
        keys, images, skipped, labels = [], [], [], []
        for place in places:
            shard = int(np.searchsorted(ends, place, side="right"))
            sample = place - int(ends[shard] - self.shards.counts[shard])
            key = self._reader.name(shard, sample)
            label = self._reader.label(shard, sample) if self.labels else 0
            try:
                images.append(self.transform(decode(self._reader.image(shard, sample)), sample_rng(0, place)))
            except ImageError as error:
                skipped.append(f"{key}: {error}")
                continue
            keys.append(key)
            labels.append(label)
        if not images:  # a batch that only says what was skipped
            return Batch([], self.transform.crops, skipped=skipped)
        known = labels if self.labels else None
        return collate(images, self.transform.crops, keys, known, packing=self.transform.packing, skipped=skipped)


def _same(batch: Any) -> Any:
    return batch


def _start_worker(_: int) -> None:
    """Outlives the scheduler's signals, which reach all processes of a job: only the training process acts on them."""
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Obeys a SIGTERM that comes from the training process itself, as it does at its end."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


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
