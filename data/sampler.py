"""Samplers: pure functions from a position in the run to a sample of the shards.

Positions count the samples of a run from 0. With N samples in the shards, epoch e consists of the positions e * N to
(e + 1) * N - 1, and contains every sample once. No sampler has state: the order depends only on the seed, the settings
of the order and the sizes of the shards. Every process, every worker and every resumed run therefore computes the same
order.

The order consists of V virtual streams (the canonical nodes of MosaicML streaming). Position p belongs to stream p mod
V. In each epoch the shards are cut into blocks of neighbouring samples, all blocks are shuffled, and each stream gets
one contiguous part of the shuffled blocks. The part has as many samples as the stream has positions in the epoch. Each
stream splits its part into consecutive shuffle buffers, and shuffles the samples within each buffer. A stream therefore
reads from about (buffer size) / (block size) blocks at a time, and neighbouring blocks of a shard are far apart in the
order.

The order is computed from raw words of the Philox generator, which are the same in all versions of NumPy. The random
parameters of samples come from the `Generator` of `sample_rng`, whose draws may differ between versions of NumPy.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from torch.utils.data import Sampler

STREAMS = 64
"""Number of virtual streams (V)."""
BUFFER = 1024
"""Default number of samples in the shuffle buffer of a virtual stream."""
PATTERN = 1024
"""Number of entries in the repeating pattern that assigns a source to each sample of a mixture. Weights are rounded to
multiples of 1 / PATTERN."""
REPEATS = 64
"""Number of samples that are compared with those of a batch, to find one that the batch does not contain."""

BLOCK = 16
"""Number of neighbouring samples per block for large data sets. Reading longer blocks would not be faster."""
ENOUGH_BLOCKS = 2**16
"""Number of blocks that is enough for a good shuffle. Smaller data sets use blocks of one sample."""
MOST_BLOCKS = 2**22
"""Maximum number of blocks of an epoch. The tables of an epoch with this many blocks take about 50 MB."""

_BLOCKS, _BUFFER, _MIXTURE, _SAMPLE, _STEP, _USER = range(6)


def _philox(seed: int, purpose: int, source: int, *counter: int) -> np.random.Philox:
    """Return the Philox generator for a seed, a purpose (such as `_BLOCKS`), a source and a counter.

    Seed, purpose and source form the key of the generator. `counter` sets the upper words of the generator's counter.
    """
    key = np.array([seed, purpose + 16 * source], dtype=np.uint64)
    # The lowest word of the counter starts at 0, because the generator counts its draws in this word.
    words = np.array([0, *counter, *[0] * (3 - len(counter))], dtype=np.uint64)
    return np.random.Philox(key=key, counter=words)


def _permutation(size: int, bits: np.random.Philox) -> np.ndarray:
    return np.argsort(bits.random_raw(size), kind="stable")


def sample_rng(seed: int, position: int) -> np.random.Generator:
    """Return the generator for the random parameters of the sample at a position in the run."""
    return np.random.Generator(_philox(seed, _SAMPLE, 0, position))


def user_seeds(seed: int, position: int, purpose: int) -> list[int]:
    """Return four seeds for code of the user (`data.user_code`), for the sample at a position in the run."""
    return [int(word) >> 1 for word in _philox(seed, _USER, purpose, position).random_raw(4)]


def step_noise(seed: int, step: int) -> float:
    """Return a random number in [0, 1) that depends only on the seed and the step, not on the process."""
    return (int(_philox(seed, _STEP, 0, step).random_raw()) >> 11) / 2**53


def bounded_buffers(sizes: Sequence[float], buffer: int, gigabytes: float | None, streams: int = STREAMS) -> list[int]:
    """Return the number of samples in the shuffle buffer of a stream, for each source of a mixture.

    A buffer holds indices of samples, not images. While a buffer is in use, the same parts of the shards are read again
    and again. The cache of a node should therefore hold all samples of the current buffers. `gigabytes` limits the
    total size of these samples. The sources share this limit equally.

    Args:
        sizes: mean size of an encoded sample in bytes, for each source; 0 if unknown, which sets no limit.
        buffer: maximum number of samples in a buffer.
        gigabytes: limit on the total size of the samples, in GB; None for no limit.
        streams: number of virtual streams (V). Each stream has one buffer per source.
    """
    if gigabytes is None:
        return [buffer] * len(sizes)
    share = gigabytes * 1e9 / len(sizes) / streams
    return [max(min(buffer, int(share / size)), 1) if size else buffer for size in sizes]


class ShuffledSampler:
    """Endless shuffled order of the samples of one list of shards.

    Args:
        counts: number of samples in each shard.
        seed: 0 to 2**64 - 1.
        streams: number of virtual streams (V). The order depends on `streams`, `block` and `buffer`, but not on the
            number of processes, the number of workers or the batch size.
        block: number of neighbouring samples of a shard that stay together. None chooses 1 for data sets up to 65,536
            samples, 16 from a million samples on, and more for billions of samples.
        buffer: number of samples in the shuffle buffer of a stream.
        source: index of this list of shards in a mixture of sources. Each source is shuffled differently.

    Raises:
        ValueError: there is no shard, a shard is empty, or an argument is out of range.
    """

    def __init__(
        self,
        counts: Sequence[int] | np.ndarray,
        seed: int,
        *,
        streams: int = STREAMS,
        block: int | None = None,
        buffer: int = BUFFER,
        source: int = 0,
    ) -> None:
        counts = np.asarray(counts, dtype=np.int64)
        if not len(counts) or counts.min() < 1:
            raise ValueError("A sampler needs at least one shard, and at least one sample in each shard.")
        if not 0 <= seed < 2**64:
            raise ValueError(f"The seed is {seed}. It must be from 0 to 2**64 - 1.")
        block = _suitable_block(counts) if block is None else block
        if min(streams, block, buffer) < 1:
            raise ValueError(
                f"streams is {streams}, block is {block} and buffer is {buffer}. Each of them must be at least 1."
            )
        self.images = int(counts.sum())
        self.streams, self.block, self.buffer = streams, block, buffer
        self._counts, self._seed, self._source = counts, seed, source
        self._first_blocks = np.concatenate([[0], np.cumsum(-(-counts // block))])  # (shards + 1,)
        self._epochs: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()
        self._buffers: OrderedDict[tuple[int, int, int], np.ndarray] = OrderedDict()

    def __call__(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the epoch, the shard and the index in the shard of the sample at each position: (P,) int64 each."""
        positions = np.asarray(positions, dtype=np.int64)
        epochs, streams = positions // self.images, positions % self.streams
        shards, samples = np.empty_like(positions), np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = np.flatnonzero(epochs == epoch)
            offsets = self._offsets(int(epoch), streams[here], positions[here])
            shards[here], samples[here] = self._find(int(epoch), offsets)
        return epochs, shards, samples

    def _before(self, position: int, streams: np.ndarray) -> np.ndarray:
        """Return the number of positions below `position` in each of `streams`."""
        return (position - streams + self.streams - 1) // self.streams

    def _offsets(self, epoch: int, streams: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Map positions (P,) of an epoch to offsets (P,). An offset counts samples in the epoch's shuffled blocks."""
        every = np.arange(self.streams)
        before = self._before(epoch * self.images, every)  # (V,)
        sizes = self._before((epoch + 1) * self.images, every) - before  # (V,)
        starts = np.cumsum(sizes) - sizes  # (V,)
        # (P,): number of earlier positions of the same stream in the epoch.
        turns = positions // self.streams - before[streams]
        numbers, offsets = np.divmod(turns, self.buffer)
        groups, inverse = np.unique(numbers * self.streams + streams, return_inverse=True)
        for group, members in enumerate(np.split(np.argsort(inverse, kind="stable"), _ends(inverse, len(groups)))):
            number, stream = divmod(int(groups[group]), self.streams)
            size = min(self.buffer, int(sizes[stream]) - number * self.buffer)
            offsets[members] = self._shuffled(epoch, stream, number, size)[offsets[members]]
        return starts[streams] + numbers * self.buffer + offsets

    def _shuffled(self, epoch: int, stream: int, number: int, size: int) -> np.ndarray:
        """Return the permutation (size,) of one shuffle buffer."""
        name = (epoch, stream, number)
        if name not in self._buffers:
            bits = _philox(self._seed, _BUFFER, self._source, *name)
            self._buffers[name] = _permutation(size, bits)
            if len(self._buffers) > 4 * self.streams:
                self._buffers.popitem(last=False)
        self._buffers.move_to_end(name)
        return self._buffers[name]

    def _find(self, epoch: int, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the shard and the index in the shard of each sample: (P,) int64 each.

        `offsets` (P,) are offsets in the epoch's shuffled blocks.
        """
        if epoch not in self._epochs:
            self._epochs[epoch] = self._tables(epoch)
            if len(self._epochs) > 2:
                self._epochs.popitem(last=False)
        self._epochs.move_to_end(epoch)
        blocks, ends = self._epochs[epoch]
        turn = np.searchsorted(ends, offsets, side="right")
        block = blocks[turn]
        shards = np.searchsorted(self._first_blocks, block, side="right") - 1
        start = (block - self._first_blocks[shards]) * self.block
        length = np.minimum(self.block, self._counts[shards] - start)
        return shards, start + offsets - (ends[turn] - length)

    def _tables(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the shuffled blocks of an epoch, and the offset at which each block ends."""
        count = int(self._first_blocks[-1])
        blocks = _permutation(count, _philox(self._seed, _BLOCKS, self._source, epoch)).astype(np.int32)
        lengths = np.full(count, self.block, dtype=np.int32)  # int32 saves memory for billions of samples
        lengths[self._first_blocks[1:] - 1] = (self._counts - 1) % self.block + 1
        return blocks, np.cumsum(lengths[blocks], dtype=np.int64)


def _suitable_block(counts: np.ndarray) -> int:
    block = 1
    while (-(-counts // block)).sum() > (ENOUGH_BLOCKS if block < BLOCK else MOST_BLOCKS) and block < counts.max():
        block *= 2
    return block


def _ends(inverse: np.ndarray, groups: int) -> np.ndarray:
    """Return the indices that split the sorted values of `inverse` into one part per group."""
    return np.cumsum(np.bincount(inverse, minlength=groups))[:-1]


class MixtureSampler:
    """Sampler that mixes the samples of several sources in fixed shares.

    A shuffled pattern of 1,024 entries names the source of each position. The pattern repeats over the run. Each source
    counts only the positions that it gets, and therefore has its own epochs. A single source gets all positions.

    No batch contains an image twice, if each source has at least three times as many images as a batch takes from it,
    rounded up to a multiple of the number of streams. If a batch contains the end of an epoch of a source, and an image
    both before and after the end, the second of these positions exchanges its sample with a position in a later batch
    of the new epoch, of the same stream if possible.

    Args:
        samplers: one sampler per source.
        weights: relative share of each source. Shares are rounded to multiples of 1 / 1,024, and are never 0.
        seed: 0 to 2**64 - 1.
        batch_size: number of positions of a batch.

    Raises:
        ValueError: the numbers of sources and weights differ, or a weight is not positive.
    """

    def __init__(
        self, samplers: Sequence[ShuffledSampler], weights: Sequence[float], seed: int, batch_size: int = 1
    ) -> None:
        if len(samplers) != len(weights) or not 1 <= len(samplers) <= PATTERN:
            raise ValueError(
                f"There are {len(samplers)} sources and {len(weights)} weights. Give 1 to {PATTERN} sources, and one "
                "weight per source."
            )
        self.samplers = list(samplers)
        self.quotas = quotas(weights)  # (S,)
        pattern = np.repeat(np.arange(len(samplers)), self.quotas)
        self._sources = pattern[_permutation(PATTERN, _philox(seed, _MIXTURE, 0))]  # (1024,)
        self._turns = np.empty(PATTERN, dtype=np.int64)
        for source, quota in enumerate(self.quotas):
            self._turns[self._sources == source] = np.arange(quota)
        self.batch_size = batch_size
        most = np.minimum(batch_size, self.quotas * -(-batch_size // PATTERN))  # samples of a source in a batch
        # Numbers of positions of a source after which a position of the same stream is in another batch.
        self._jumps = [-(-int(n) // one.streams) * one.streams for n, one in zip(most, samplers, strict=True)]
        self._exchanges: OrderedDict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = OrderedDict()

    def replacements(self, position: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield, without end, the source, the shard and the index of samples that may replace a corrupt one: (1,) each.

        The samples come from the virtual stream of `position`, from later batches. Samples that the batch of `position`
        contains are left out; but if none of `REPEATS` samples in a row is different, the next one is yielded.
        """
        first = position - position % self.batch_size
        batch = np.stack(self(np.arange(first, first + self.batch_size)))  # (3, B)
        repeats = 0
        for later in count(1):
            found = self(np.array([position]), later)
            repeated = bool((batch == np.stack(found)).all(0).any())
            repeats = repeats + 1 if repeated and repeats < REPEATS else 0
            if not repeats:
                yield found

    def __call__(self, positions: np.ndarray, later: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the source, the shard and the index in the shard of the sample at each position: (P,) int64 each.

        Each position is first moved ahead by `later` batches within its virtual stream (`replacements`).
        """
        positions = np.asarray(positions, dtype=np.int64)
        rounds, entries = np.divmod(positions, PATTERN)
        sources = self._sources[entries]
        # `own` counts the positions of each source separately.
        own = rounds * self.quotas[sources] + self._turns[entries]
        shards, samples = np.empty_like(positions), np.empty_like(positions)
        for source in np.unique(sources):
            here = sources == source
            moved = self._exchanged(int(source), own[here] + later * self._jumps[source])
            _, shards[here], samples[here] = self.samplers[source](moved)
        return sources, shards, samples

    def _exchanged(self, source: int, own: np.ndarray) -> np.ndarray:
        """Return positions of a source after the exchanges at the ends of epochs: (P,) -> (P,)."""
        epochs = own // self.samplers[source].images
        for epoch in np.unique(epochs[epochs > 0]):
            name = (source, int(epoch))
            if name not in self._exchanges:
                self._exchanges[name] = self._exchanges_after(source, int(epoch) * self.samplers[source].images)
                if len(self._exchanges) > 4 * len(self.samplers):
                    self._exchanges.popitem(last=False)
            given, taken = self._exchanges[name]
            found = np.searchsorted(given, own).clip(max=len(given) - 1)
            own = np.where(given[found] == own, taken[found], own) if len(given) else own
        return own

    def _exchanges_after(self, source: int, start: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions that are exchanged in the epoch that begins at `start`, sorted, and their partners.

        `start` and the results count the positions of the source.
        """
        sampler, quota, jump = self.samplers[source], int(self.quotas[source]), self._jumps[source]
        position = start // quota * PATTERN + int(np.flatnonzero(self._sources == source)[start % quota])
        first = position - position % self.batch_size
        begin, end = (self._own_before(p, source) for p in (first, first + self.batch_size))
        old = _codes(sampler, np.arange(begin, start))
        later = np.arange(start, end)
        stop = start + sampler.images - jump  # the last batch takes no part, so that the next epoch is not affected
        partners: dict[int, int] = {}
        for one in later[np.isin(_codes(sampler, later), old)].tolist():
            stream = np.arange(one + jump, stop, jump)[:REPEATS]
            for others in (stream, np.arange(end, stop)):  # a few images do not suffice for each stream
                others = others[~np.isin(others, list(partners))]
                others = others[~np.isin(_codes(sampler, others), old)]
                if len(others):
                    partners |= {one: int(others[0]), int(others[0]): one}
                    break
        given = np.array(sorted(partners), dtype=np.int64)
        return given, np.array([partners[one] for one in given.tolist()], dtype=np.int64)

    def _own_before(self, position: int, source: int) -> int:
        """Return the number of positions of a source before a position of the run."""
        rounds, entry = divmod(position, PATTERN)
        return rounds * int(self.quotas[source]) + int((self._sources[:entry] == source).sum())


def _codes(sampler: ShuffledSampler, positions: np.ndarray) -> np.ndarray:
    """Return one number per position, (P,) int64, which identifies its sample."""
    _, shards, samples = sampler(positions)
    return (shards << 32) + samples


def quotas(weights: Sequence[float]) -> np.ndarray:
    """Return the number of pattern entries of each source: (S,) int64. Each is at least 1, and the sum is 1,024.

    The shares are rounded by the method of largest remainders.

    Raises:
        ValueError: a weight is not a positive number.
    """
    shares = np.asarray(weights, dtype=np.float64)
    if not (np.isfinite(shares).all() and (shares > 0).all()):
        raise ValueError(f"Weights must be positive numbers, not {list(weights)}.")
    shares = shares / shares.sum() * PATTERN
    parts = np.maximum(np.floor(shares).astype(np.int64), 1)
    while parts.sum() < PATTERN:
        parts[np.argmax(shares - parts)] += 1
    while parts.sum() > PATTERN:
        parts[np.argmin(np.where(parts > 1, shares - parts, np.inf))] -= 1
    return parts


@dataclass(frozen=True)
class BatchSampler(Sampler[np.ndarray]):
    """Yields the positions (P,) of each forward pass of one process. A step has `accumulation` forward passes.

    Step s takes the positions s * batch_size to (s + 1) * batch_size - 1, sorted by virtual stream. The sequence is
    split into equal parts, one for each forward pass of each process. All processes together therefore see the same
    samples in a step as a single process would, and each process reads from few streams. They are always the same
    streams if the batch size is a multiple of the number of streams.

    Raises:
        ValueError: the images of a step cannot be split evenly over processes and forward passes.
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

    def __post_init__(self) -> None:
        unit = self.world_size * self.accumulation
        if self.batch_size < 1 or self.batch_size % unit:
            lower = self.batch_size // unit * unit
            near = f"{lower} or {lower + unit}" if lower > 0 else f"{unit}"
            raise ValueError(
                f"A batch of {self.batch_size} images does not split evenly over {self.world_size} processes and "
                f"{self.accumulation} accumulated passes. The nearest valid batch size is {near}."
            )

    @property
    def pass_size(self) -> int:
        """Number of images in one forward pass of one process (P)."""
        return self.batch_size // (self.world_size * self.accumulation)

    def __len__(self) -> int:
        return max(self.steps - self.first_step, 0) * self.accumulation

    def __iter__(self) -> Iterator[np.ndarray]:
        for step in range(self.first_step, self.steps):
            for micro in range(self.accumulation):
                yield self.positions(step, micro)

    def positions(self, step: int, micro: int = 0) -> np.ndarray:
        """Return the positions of the samples that this process takes in one forward pass: (P,) int64."""
        positions = step * self.batch_size + np.arange(self.batch_size)
        positions = positions[np.argsort(positions % self.streams, kind="stable")]
        start = (self.rank * self.accumulation + micro) * self.pass_size
        return positions[start : start + self.pass_size]
