"""Memory that worker processes share with their parent: batches travel in it without being copied or allocated anew.

A worker fills a slot and sends its number along with what else belongs to the batch; the parent copies the pixels to
where it needs them, into pinned memory say, and the slot is free. The memory is made before the workers are forked,
reused as long as they live, and belongs to no file: /dev/shm may be small.
"""

import itertools
import mmap
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from data.batch import Batch

UNRESERVED = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | 0x4000
"""shared, and not counted before it is used: MAP_NORESERVE, which Python's own module has no name for"""

_numbers = itertools.count()
_pools: "weakref.WeakValueDictionary[int, Pool]" = weakref.WeakValueDictionary()


class Pool:
    """Slots of equal size for each of some workers.

    Args:
        workers: processes that fill slots.
        slots: of each worker.
        size: of a slot, in bytes. Memory is taken when it is first written to: what no batch needs costs nothing.
    """

    def __init__(self, workers: int, slots: int, size: int):
        self.number, self.slots, self.size = next(_numbers), slots, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        whole = mmap.mmap(-1, max(workers * slots * self.size, 1), flags=UNRESERVED)
        self._memory = torch.frombuffer(whole, dtype=torch.uint8)
        self._taken = memoryview(mmap.mmap(-1, workers * slots))  # a byte each: 1 from the worker, 0 from the parent
        _pools[self.number] = self

    def take(self, worker: int) -> "Slot | None":
        """A free slot of a worker, in that worker; None: all are on their way or not yet emptied."""
        for index in range(worker * self.slots, (worker + 1) * self.slots):
            if not self._taken[index]:
                self._taken[index] = 1
                return Slot(self, index)
        return None

    def memory(self, index: int) -> Tensor:
        """(size,) uint8."""
        return self._memory[index * self.size : (index + 1) * self.size]

    def free(self, index: int) -> None:
        self._taken[index] = 0


@dataclass(frozen=True)
class Slot:
    """One slot, in the worker and in its parent."""

    pool: Pool
    index: int

    @property
    def memory(self) -> Tensor:
        return self.pool.memory(self.index)

    def free(self) -> None:
        self.pool.free(self.index)

    def __reduce__(self) -> tuple[Any, ...]:
        return _slot, (self.pool.number, self.index)


def _slot(number: int, index: int) -> Slot:
    return Slot(_pools[number], index)


@dataclass
class Parcel:
    """A batch on its way from a worker, without its pixels: they stay in the slot until it is opened."""

    batch: Batch
    slot: Slot

    @classmethod
    def packed(cls, batch: Batch, slot: Slot) -> "Parcel | Batch":
        """A batch whose memory is the beginning of the slot; any other is left as it is, and the slot is free."""
        if batch.memory is None or batch.memory.data_ptr() != slot.memory.data_ptr():
            slot.free()
            return batch
        return cls(batch.over(torch.empty_like(batch.memory, device="meta")), slot)

    def open(self, *, pinned: bool = False) -> Batch:
        """The batch with pixels of its own."""
        assert self.batch.memory is not None
        pixels = self.slot.memory[: len(self.batch.memory)]
        batch = self.batch.over(pixels).pin_memory() if pinned else self.batch.over(pixels.clone())
        self.slot.free()
        return batch

    def pin_memory(self) -> Batch:
        """What torch's loader calls in a thread of its own."""
        return self.open(pinned=True)
