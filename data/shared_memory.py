"""A ring of buffers in memory that worker processes share with their parent.

A worker fills a buffer with pixels, and sends the batch to the parent with the index of the buffer in place of the
pixels. The parent copies the pixels into its own memory, for example pinned memory, and frees the buffer. Pixels
therefore do not pass through a pipe, and no shared memory is allocated for each batch. The shared memory is anonymous,
because /dev/shm may be small. It is created before the workers are forked, and is used until the workers exit.
"""

import itertools
import mmap
import weakref
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tessera.data.batch import Batch

UNRESERVED = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | 0x4000
"""Flags for shared memory that the system does not reserve in advance. 0x4000 is MAP_NORESERVE, which Python's module
`mmap` does not define."""

_numbers = itertools.count()
_rings: "weakref.WeakValueDictionary[int, BufferRing]" = weakref.WeakValueDictionary()


class BufferRing:
    """Shared buffers of equal size for several workers.

    Args:
        workers: number of worker processes, which fill the buffers.
        buffers: number of buffers of each worker.
        size: size of a buffer in bytes. The system provides memory at the first write, so unused bytes cost nothing.

    Raises:
        OSError: the system refuses to map the memory.
    """

    def __init__(self, workers: int, buffers: int, size: int) -> None:
        self.number, self.buffers, self.size = next(_numbers), buffers, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        everything = mmap.mmap(-1, max(workers * buffers * self.size, 1), flags=UNRESERVED)
        self._memory = torch.frombuffer(everything, dtype=torch.uint8)
        # One byte per buffer: a worker writes 1 to take a buffer, and the parent writes 0 to free a buffer.
        self._taken = memoryview(mmap.mmap(-1, workers * buffers))
        _rings[self.number] = self

    def take(self, worker: int) -> "Buffer | None":
        """Mark a free buffer of `worker` as taken, and return it; None if no buffer is free.

        Only the process of this worker may call the method.
        """
        for index in range(worker * self.buffers, (worker + 1) * self.buffers):
            if not self._taken[index]:
                self._taken[index] = 1
                return Buffer(self.number, index)
        return None

    def memory(self, index: int) -> Tensor:
        """Return the memory of a buffer: (size,) uint8."""
        return self._memory[index * self.size : (index + 1) * self.size]

    def free(self, index: int) -> None:
        """Mark a buffer as free, so that the worker can use the buffer again."""
        self._taken[index] = 0


class Buffer(NamedTuple):
    """Reference to a buffer: the number of its ring (equal in workers and parent), and its index in the ring."""

    ring: int
    index: int

    @property
    def memory(self) -> Tensor:
        """Memory of the buffer: (size,) uint8."""
        return _rings[self.ring].memory(self.index)

    def free(self) -> None:
        """Mark the buffer as free, so that the worker can use the buffer again."""
        _rings[self.ring].free(self.index)


@dataclass
class SharedBatch:
    """A batch that a worker sends to its parent, without the pixels. `open` copies them from the shared buffer."""

    batch: Batch
    buffer: Buffer

    @classmethod
    def from_batch(cls, batch: Batch, buffer: Buffer) -> "SharedBatch | Batch":
        """Return a batch that refers to the buffer, if the pixels of `batch` lie at the start of the buffer.

        If the batch uses other memory, return the batch unchanged and free the buffer.
        """
        if batch.memory is None or batch.memory.data_ptr() != buffer.memory.data_ptr():
            buffer.free()
            return batch
        return cls(batch.in_memory(torch.empty_like(batch.memory, device="meta")), buffer)

    def open(self, *, pinned: bool = False) -> Batch:
        """Return the batch with a copy of its pixels, and free the buffer."""
        size = 0 if self.batch.memory is None else len(self.batch.memory)
        memory = self.buffer.memory[:size]
        opened = self.batch.in_memory(memory).pin_memory() if pinned else self.batch.in_memory(memory.clone())
        self.buffer.free()
        return opened

    def pin_memory(self) -> Batch:
        """Return the batch in pinned memory. DataLoader calls this method in its pinning thread."""
        return self.open(pinned=True)
