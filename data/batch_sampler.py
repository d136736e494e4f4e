"""Cut the order of samples into batches, and each batch into the parts of forward passes and processes.

Like the order itself (`data.sampler`), the parts are pure functions of positions.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch.utils.data import Sampler

from tessera.data.sampler import STREAMS
from tessera.runtime.collectives import Share

_RANGE = re.compile(r"\s*([0-9]{1,15})\s*(?:-\s*([0-9]{1,15})\s*)?")


@dataclass(frozen=True)
class BatchSampler(Sampler[np.ndarray]):
    """Yields the positions (P,) of each forward pass of one process. A step has `accumulation` forward passes.

    Batch b consists of the positions b * batch_size to (b + 1) * batch_size - 1, sorted by virtual stream. Step s takes
    batch s, or a later one if batches are skipped. The sequence is split into one part for each forward pass of all
    processes, and each of these into one part for each process. The sizes of the parts differ by at most `together`.
    The images of a step, and those of each of its forward passes, are therefore the same for any number of processes,
    and each process reads from few streams. They are always the same streams if the batch size is a multiple of the
    number of streams.

    If a forward pass has fewer images than processes, some parts are empty. A process with an empty part computes with
    the first images of the batch, which `runtime.collectives.Share` excludes from losses and statistics: each of its
    parameters still gets a gradient, and the process enters all collectives.

    Raises:
        ValueError: there are fewer images than forward passes, or the batch size is not a multiple of `together`.
    """

    batch_size: int
    """Number of images of one optimizer step, over all processes and forward passes."""
    first_step: int = 0
    steps: int = 1
    """Total number of steps of the run, including the steps before `first_step`."""
    rank: int = 0
    world_size: int = 1
    accumulation: int = 1
    """Number of forward passes per optimizer step, on each process."""
    streams: int = STREAMS
    """Number of virtual streams in the order of samples (V)."""
    skipped: tuple[range, ...] = ()
    """Numbers of the batches that no step takes, as `batch_ranges` returns them."""
    together: int = 1
    """Number of neighbouring images that are always in the same part, as `Method.together` says."""

    def __post_init__(self) -> None:
        if self.batch_size % self.together:
            raise ValueError(
                f"{self.batch_size} images do not split into groups of {self.together} images that are mixed. Choose a "
                f"multiple of {self.together}, or do not mix images."
            )
        if self.batch_size < self.accumulation * self.together:
            raise ValueError(
                f"A batch of {self.batch_size} images is too small for {self.accumulation} accumulated passes. Its "
                f"size must be at least {self.accumulation * self.together}."
            )

    @property
    def pass_size(self) -> int:
        """Largest number of images in one forward pass of one process (P)."""
        return share_bounds(self.batch_size, self.world_size, self.accumulation, together=self.together)[1]

    def __len__(self) -> int:
        return max(self.steps - self.first_step, 0) * self.accumulation

    def __iter__(self) -> Iterator[np.ndarray]:
        for step in range(self.first_step, self.steps):
            for micro in range(self.accumulation):
                own = self.positions(step, micro)
                yield own if len(own) else self._sorted(step)[: self.together]

    def positions(self, step: int, micro: int = 0) -> np.ndarray:
        """Return the positions of the samples that this process takes in one forward pass: (P,) int64.

        It has no positions if there are fewer images than processes.
        """
        first, end = self._part(self.rank, micro)
        return self._sorted(step)[first:end]

    def _sorted(self, step: int) -> np.ndarray:
        """Return the positions of the batch of a step, sorted by stream: (batch_size,) int64."""
        positions = self.batch(step) * self.batch_size + np.arange(self.batch_size)
        return positions[np.argsort(positions % self.streams, kind="stable")]

    def _part(self, rank: int, micro: int) -> tuple[int, int]:
        """Return the first index and the end of the part of a process in one forward pass."""
        start, stop = self._pass(micro)
        first, end = _cut((stop - start) // self.together, self.world_size, rank)
        return start + first * self.together, start + end * self.together

    def _pass(self, micro: int) -> tuple[int, int]:
        """Return the first index and the end of one forward pass of all processes."""
        start, stop = _cut(self.batch_size // self.together, self.accumulation, micro)
        return start * self.together, stop * self.together

    def share(self, micro: int = 0) -> Share:
        """Return the share of this process in the images of one forward pass of all processes."""
        (start, stop), (first, end) = self._pass(micro), self._part(self.rank, micro)
        last, _ = self._part(self.world_size - 1, micro)
        weight = (end - first) * self.world_size * self.accumulation / self.batch_size
        return Share(end - first, first - start, stop - start, weight, complete=last < stop)

    def skipped_below(self, batch: int) -> list[range]:
        """Return the ranges of skipped batches below a batch."""
        return [range(one.start, min(one.stop, batch)) for one in self.skipped if one.start < batch]

    def batch(self, step: int) -> int:
        """Return the number of the batch that a step takes. Both are counted from 0."""
        for skipped in self.skipped:
            step += len(skipped) if step >= skipped.start else 0
        return step


def _cut(images: int, parts: int, number: int) -> tuple[int, int]:
    """Cut `images` images into parts, and return the first index and the end of one part.

    The first parts are never smaller than the last ones, so that the main process has images to show.
    """
    small, larger = divmod(images, parts)
    first = number * small + min(number, larger)
    return first, first + small + (number < larger)


def share_bounds(batch_size: int, processes: int, accumulation: int, together: int = 1) -> tuple[int, int]:
    """Return the smallest and the largest number of images in a forward pass of a process, see `BatchSampler`."""
    groups = batch_size // together
    passes = groups // accumulation, -(-groups // accumulation)
    return passes[0] // processes * together, -(-passes[1] // processes) * together


def batch_ranges(text: str | None) -> tuple[range, ...]:
    """Return the batches in a text such as `1200-1210,1300`, which counts them from 1.

    The result counts from 0. Its ranges are sorted, and do not overlap.

    Raises:
        ValueError: the text is no list of numbers and ranges.
    """
    found: list[range] = []
    for part in (text or "").split(",") if text else []:
        matched = _RANGE.fullmatch(part)
        first, last = (int(matched[1]), int(matched[2] or matched[1])) if matched else (0, 0)
        if not 1 <= first <= last:
            raise ValueError(f"{part!r:.50} is no batch and no range of batches, such as 1300 or 1200-1210.")
        found.append(range(first - 1, last))
    merged: list[range] = []
    for one in sorted(found, key=lambda one: one.start):
        if merged and one.start <= merged[-1].stop:
            one = range(merged[-1].start, max(one.stop, merged.pop().stop))
        merged.append(one)
    return tuple(merged)
