"""Iterate over batches that the worker processes of a `torch.utils.data.DataLoader` make."""

import functools
import itertools
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from rich.filesize import decimal
from torch.utils.data import DataLoader, get_worker_info

from tessera.data.batch import Batch
from tessera.data.batch_sampler import BatchSampler
from tessera.data.collate import Collator
from tessera.data.dataset import MOST_NAMED, EvaluationDataset, TrainDataset
from tessera.data.failures import skipped
from tessera.data.shards import ShardError
from tessera.data.shared_memory import BufferRing, SharedBatch
from tessera.data.workers import POLL, WorkersError, WorkerStates, receive, start_worker
from tessera.runtime.collectives import Share, rank
from tessera.runtime.machine import memory

AHEAD = 2
"""Number of batches that each worker prepares in advance, if they fit in `BUFFERED` of the memory."""
BUFFERED = 0.25
"""Largest share of the machine's memory for the prepared batches of a loader in all processes."""
MOST_BUFFERED = 0.5
"""Largest share for the number of workers that the user gave."""

log = logging.getLogger(__name__)
_said = set[str]()


class Buffers(NamedTuple):
    """Workers of a process and the memory of the batches that they prepare."""

    workers: int
    ahead: int
    """Number of batches that each worker prepares in advance."""
    note: str = ""
    """Sentence about the workers and batches that the memory does not allow; empty if it allows all."""


def prepared_bytes(size: int, workers: int, ahead: int, *, pinned: bool) -> int:
    """Return the size in bytes of the batches that the workers of a process prepare.

    Each worker has a buffer for each batch in advance, and one for the batch that the parent process copies. With
    `pinned`, the parent keeps pinned copies of all batches in advance, of the batch in use and of the one that it
    copies. CUDA rounds their sizes up to powers of two.

    Args:
        size: size of a batch in bytes.
    """
    copies = workers * ahead + 2 if pinned and workers else 0
    return workers * (ahead + 1) * size + copies * (1 << max(size - 1, 0).bit_length())


def fit_buffers(workers: int, size: int, *, given: bool, pinned: bool) -> Buffers:
    """Return the number of workers and of batches in advance whose memory fits the machine.

    First, each worker prepares one batch in place of `AHEAD`, then there are fewer workers, but at least one. The order
    of the samples does not depend on either. The buffers are anonymous, so the size of /dev/shm does not limit them.

    Args:
        workers: number of workers of this process.
        size: size of a batch in bytes.
        given: True if the user chose the number of workers, which is then not lowered.
        pinned: True if the parent process copies batches to pinned memory.

    Raises:
        WorkersError: the given number of workers needs more than `MOST_BUFFERED` of the memory.
    """
    processes, machine = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), memory()

    def needed(workers: int, ahead: int) -> int:
        return processes * prepared_bytes(size, workers, ahead, pinned=pinned)

    wanted, limit = needed(workers, AHEAD), BUFFERED * machine
    if not workers or wanted <= limit:
        return Buffers(workers, AHEAD)
    most = next((n for n in range(workers, 1, -1) if needed(n, 1) <= limit), 1)
    kept = workers if given else most
    kind = "shared and pinned" if pinned else "shared"
    if kept > 1 and needed(kept, 1) > MOST_BUFFERED * machine:
        accepted = next((n for n in range(kept, 1, -1) if needed(n, 1) <= MOST_BUFFERED * machine), 1)
        raise WorkersError(
            f"--workers {kept} needs {decimal(needed(kept, 1))} of {kind} memory for prepared batches on a node, but "
            f"this machine has {decimal(machine)}. Use --workers {accepted} or fewer, or --accumulate for smaller "
            "batches."
        )
    note = f"{kept} workers of each process prepare one batch each, which takes {decimal(needed(kept, 1))} of {kind} "
    note += f"memory on a node: {workers} workers with {AHEAD} batches would take {decimal(wanted)} of "
    note += f"{decimal(machine)}"
    if kept > most:
        note += f". --workers {most} would take at most a quarter"
    return Buffers(kept, 1, note)


class Batches:
    """Iterable of batches. Every iteration starts at the first batch. `len` is the number of batches of this process.

    Args:
        dataset: returns the decoded samples.
        batches: for each batch, the indices of its samples in `dataset`.
        collator: makes a batch from samples.
        workers: number of worker processes.
        total: number of images in the shards, over all processes.
        given: True if the user chose the number of workers, which is then not lowered.

    Raises:
        WorkersError: the given workers need too much memory.
    """

    def __init__(
        self,
        dataset: TrainDataset | EvaluationDataset,
        batches: BatchSampler | Sequence[Sequence[int]],
        collator: Collator,
        workers: int,
        total: int,
        *,
        given: bool = False,
    ) -> None:
        self.total, self.dataset, self.batches, self.collator = total, dataset, batches, collator
        self.first_skipped: str | None = None
        """Name of the first sample that was left out, and the reason."""
        self._pinned = torch.cuda.is_available()
        found = fit_buffers(min(workers, len(batches)), collator.size, given=given, pinned=self._pinned)
        self.workers, self._ahead, self.lowered = found
        if self.lowered and rank() == 0 and self.lowered not in _said:
            _said.add(self.lowered)
            log.warning("%s", self.lowered)

    @property
    def buffered_bytes(self) -> int:
        """Size in bytes of the shared and pinned memory of the batches that the workers of this process prepare."""
        return prepared_bytes(self.collator.size, self.workers, self._ahead, pinned=self._pinned)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        # An evaluation within a run is not interrupted, because other processes may wait for this process in a
        # collective. The run saves a checkpoint and ends after the evaluation.
        interruptible = isinstance(self.dataset, TrainDataset)
        shares = itertools.cycle(self._shares())
        for batch in receive(self._loader, self.workers, interruptible=interruptible):
            if isinstance(batch, _Failure):
                raise ShardError(batch.message)
            if isinstance(batch, SharedBatch):
                batch = batch.open()
            for name in batch.skipped:
                self.first_skipped = self.first_skipped or name
                self._log_skipped(name)
            batch.share = next(shares)
            if batch.keys:
                yield batch

    def _shares(self) -> list[Share | None]:
        """Return the share of this process in each forward pass of a step."""
        batches = self.batches
        if not isinstance(batches, BatchSampler):
            return [None]
        return [batches.share(micro) for micro in range(batches.accumulation)]

    def _log_skipped(self, name: str) -> None:
        """Log a corrupt image, unless it was logged before. Each of the first `MOST_NAMED` images is logged; later ones
        are only logged when the number of different images has doubled."""
        if name in skipped:
            return
        skipped.add(name)
        count = len(skipped)
        if count <= MOST_NAMED or count & (count - 1) == 0:
            log.warning("skipped %s (%d %s so far)", name, count, "image" if count == 1 else "different images")

    def _ring(self) -> BufferRing | None:
        """Return the shared buffers of the workers; None if there are no workers or the system refuses the memory.

        Each worker gets one buffer for each batch that it prepares in advance, and one more buffer for the batch that
        the parent process is copying.
        """
        if not self.workers:
            return None
        try:
            return BufferRing(self.workers, self._ahead + 1, self.collator.size)
        except OSError as error:
            log.warning(
                "The system refuses shared memory for loader workers (%s). Batches will be sent more slowly.",
                error.strerror,
            )
            return None

    def _loader(self, states: WorkerStates) -> DataLoader:
        workers = self.workers
        of_main_thread = threading.current_thread() is threading.main_thread()
        start = functools.partial(start_worker, states=states, of_main_thread=of_main_thread)
        return DataLoader(
            self.dataset,
            batch_sampler=self.batches,  # pyright: ignore[reportArgumentType] - torch expects lists
            collate_fn=_SharedCollator(self.collator, self._ring(), states),
            num_workers=workers,
            prefetch_factor=self._ahead if workers else None,
            # Workers must be children of this process, and must set signal handlers before they start threads. Only the
            # start method `fork` guarantees both.
            multiprocessing_context="fork" if workers else None,
            pin_memory=self._pinned,
            worker_init_fn=start,
            timeout=POLL if workers else 0,
            # Without this generator, DataLoader would draw a seed from torch's global generator whenever a run starts
            # or resumes. This draw would change all later random values of the global generator.
            generator=torch.Generator(),
        )


@dataclass
class _Failure:
    """Message of a `ShardError` that a worker returns in place of a batch.

    The worker does not raise the error, because DataLoader would add a traceback to the message.
    """

    message: str


@dataclass
class _SharedCollator:
    """Collator that writes a batch to a shared buffer of its worker.

    If there are no shared buffers, or none of them is free, the batch is written to new memory.
    """

    collator: Collator
    ring: BufferRing | None
    states: WorkerStates
    failure: _Failure | None = None
    """First failure of this worker. After a failure, the worker reads no further samples."""

    def __call__(self, samples: Any) -> Batch | SharedBatch | _Failure:
        if self.failure:
            return self.failure
        info = get_worker_info()
        buffer = self.ring.take(info.id) if self.ring and info else None
        if info:
            self.states.working(info.id, True)
        try:
            batch = self.collator(samples, buffer.memory if buffer else None)
        except ShardError as error:
            self.failure = _Failure(str(error))
            return self.failure
        finally:
            if info:
                self.states.working(info.id, False)
        return SharedBatch.from_batch(batch, buffer) if buffer else batch
