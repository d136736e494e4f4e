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

import bisect
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

Weight = float | Mapping[int, float]
"""Weight of a source of a mixture: a number, or a mapping from a step to the weight from this step on."""
STREAMS = 64
"""Number of virtual streams (V)."""
BUFFER = 1024
"""Default number of samples in the shuffle buffer of a virtual stream."""
PATTERN = 1024
"""Number of entries in the repeating pattern that assigns a source to each sample of a mixture. Shares are multiples of
1 / PATTERN."""
LARGEST_ROUNDING = 0.01
"""Largest error of a share that is rounded to a multiple of 1 / PATTERN, relative to the share."""
REPEATS = 64
"""Number of samples that are compared with those of a batch, to find one that the batch does not contain."""
SHORTEST_ROUND, LONGEST_ROUND = 64, 2**20
"""Smallest and largest number of positions in a round with exact shares."""
KEPT_ROUNDS = 2
"""Number of rounds whose tables are kept in memory. Those of the longest rounds take 17 MB each."""

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
        block = _suitable_block(counts) if block is None else block
        self.images = int(counts.sum())
        self.streams, self.block, self.buffer = streams, block, buffer
        self._counts, self._seed, self._source = counts, seed, source
        self._first_blocks = np.concatenate([[0], np.cumsum(-(-counts // block))])  # (shards + 1,)
        self._epochs: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()
        self._buffers: OrderedDict[tuple[int, int, int], np.ndarray] = OrderedDict()

    def __call__(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the epoch, the shard and the index in the shard of the sample at each position: (P,) int64 each."""
        positions = np.asarray(positions, dtype=np.int64)
        epochs, streams = self.epochs(positions), positions % self.streams
        shards, samples = np.empty_like(positions), np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = np.flatnonzero(epochs == epoch)
            offsets = self._offsets(int(epoch), streams[here], positions[here])
            shards[here], samples[here] = self._find(int(epoch), offsets)
        return epochs, shards, samples

    def epochs(self, positions: np.ndarray) -> np.ndarray:
        """Return the epoch of each position: (P,) -> (P,)."""
        return positions // self.images

    def start(self, epoch: int) -> int:
        """Return the first position of an epoch."""
        return epoch * self.images

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


class GrowingSampler:
    """Order of the samples of one list of shards to which shards are added during the run.

    Shards are added between two epochs. An epoch therefore contains every sample of its shards once, and the order of
    earlier epochs does not change.

    Args:
        stages: first epoch of each stage, and the sampler of its shards. The first stage begins at epoch 0.
    """

    def __init__(self, stages: Sequence[tuple[int, ShuffledSampler]]) -> None:
        self._samplers, self._first_epochs = [sampler for _, sampler in stages], [epoch for epoch, _ in stages]
        self.streams, self.block, self.buffer = (
            getattr(self._samplers[-1], name) for name in ("streams", "block", "buffer")
        )
        self.images = min(sampler.images for sampler in self._samplers)
        starts, shifts = [0], [0]
        for (epoch, sampler), (following, grown) in itertools.pairwise(stages):
            starts.append(starts[-1] + (following - epoch) * sampler.images)
            # The positions of a stage are shifted so that the epochs of all stages have consecutive numbers.
            shifts.append(starts[-1] - following * grown.images)
        self._starts, self._shifts = np.array(starts), np.array(shifts)

    def __call__(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the epoch, the shard and the index in the shard of the sample at each position: (P,) int64 each."""
        positions = np.asarray(positions, dtype=np.int64)
        stages = np.searchsorted(self._starts, positions, side="right") - 1
        found = np.empty((3, len(positions)), dtype=np.int64)
        for stage in np.unique(stages):
            here = stages == stage
            found[:, here] = self._samplers[stage](positions[here] - self._shifts[stage])
        epochs, shards, samples = found
        return epochs, shards, samples

    def epochs(self, positions: np.ndarray) -> np.ndarray:
        """Return the epoch of each position: (P,) -> (P,)."""
        stages = np.searchsorted(self._starts, positions, side="right") - 1
        images = np.array([sampler.images for sampler in self._samplers])
        return (positions - self._shifts[stages]) // images[stages]

    def start(self, epoch: int) -> int:
        """Return the first position of an epoch."""
        stage = bisect.bisect_right(self._first_epochs, epoch) - 1
        return epoch * self._samplers[stage].images + int(self._shifts[stage])

    def next_epoch(self, position: int) -> int:
        """Return the first epoch that begins at a position or after it."""
        epoch = int(self.epochs(np.array([position]))[0])
        return epoch if self.start(epoch) == position else epoch + 1


AnySampler = ShuffledSampler | GrowingSampler


class MixtureSampler:
    """Sampler that mixes the samples of several sources in shares that may change during the run.

    In a phase, the shares are constant. A phase is divided into rounds, and the sources of a round are shuffled. The
    last round of a phase may be cut, so that later phases do not change the order of earlier ones. Each source counts
    only the positions that it gets, and therefore has its own epochs. A single source gets all positions.

    The rounds of the first phase have 1,024 positions and equal patterns, if this changes no share by more than 1 %. In
    the other rounds, shares are exact: at the end of a round, the number of positions that a source had in the phase
    differs from the sum of its shares by at most 1. These rounds have at least 64 positions.

    No batch contains an image twice, if each source has at least three times as many images as a batch takes from it,
    rounded up to a multiple of the number of streams. If a batch contains the end of an epoch of a source, and an image
    both before and after the end, the second of these positions exchanges its sample with a position in a later batch
    of the new epoch, of the same stream if possible.

    Args:
        samplers: one sampler per source.
        phases: first position of each phase, and the weight of each source in the phase, as `phases` returns them. A
            weight may be 0, but not in all phases.
        seed: 0 to 2**64 - 1.
        batch_size: number of positions of a batch. A phase begins at the start of a batch.

    Raises:
        ValueError: the numbers of sources and weights differ, a weight is negative, not finite or too small, or a
            source or a phase has no weight above 0.
    """

    def __init__(
        self,
        samplers: Sequence[AnySampler],
        phases: Sequence[tuple[int, Sequence[float]]],
        seed: int,
        batch_size: int = 1,
    ) -> None:
        if {len(row) for _, row in phases} != {len(samplers)}:
            raise ValueError(f"There are {len(samplers)} sources. Give one weight per source.")
        weights = np.array([row for _, row in phases], dtype=np.float64)  # (phases, S)
        if not (np.isfinite(weights).all() and (weights >= 0).all() and weights.any(1).all() and weights.any(0).all()):
            raise ValueError(
                "A weight is negative or not finite, a source always has the weight 0, or all sources have the weight "
                "0 at a step. Correct the weights of the mixture."
            )
        self.samplers, self.batch_size, self._seed = list(samplers), batch_size, seed
        self.shares = weights / weights.sum(1, keepdims=True)  # (phases, S)
        self._ends = np.cumsum(weights, axis=1)
        self._ends /= self._ends[:, -1:]  # (phases, S): sum of the shares of a source and of all sources before it
        self._starts = np.array([start for start, _ in phases], dtype=np.int64)  # (phases,)
        smallest = np.where(self.shares > 0, self.shares, np.inf).min(1)
        # A round is so long that each source gets four of its positions. Otherwise, the rounded numbers of positions
        # in `_counts` could decrease.
        self._rounds = np.maximum(np.ceil(4 / smallest), SHORTEST_ROUND).astype(np.int64)  # (phases,)
        # A batch belongs to one phase. The rounds at its two ends have positions outside of the batch.
        most = np.ceil(self.shares * (batch_size + 2 * self._rounds[:, None])).astype(np.int64) + 2  # (phases, S)
        self._quotas = quotas(self.shares[0])
        if self._quotas is not None:
            self.shares[0], self._rounds[0] = self._quotas / PATTERN, PATTERN
            most[0] = self._quotas * -(-batch_size // PATTERN)
        if (self._rounds > LONGEST_ROUND).any():
            raise ValueError(
                f"A weight of the mixture is so small that its source gets fewer than four of {LONGEST_ROUND} samples. "
                "Set this weight to 0 or to a larger number."
            )
        # (phases, S): numbers of positions of a source after which a position of the same stream is in another batch.
        streams = np.array([sampler.streams for sampler in samplers])
        self._jumps = -(-np.minimum(most, batch_size) // streams) * streams
        self._tables: OrderedDict[tuple[int, int], _Round] = OrderedDict()
        self._exchanges: OrderedDict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = OrderedDict()
        self._before = np.zeros((len(phases), len(samplers)), dtype=np.int64)
        for phase in range(1, len(phases)):
            last = self._round(int(self._starts[phase]) - 1)
            self._before[phase] = last.before + np.bincount(last.pattern, minlength=len(samplers))

    def replacements(self, position: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield, without end, the source, the shard and the index of samples that may replace a corrupt one: (1,) each.

        The samples come from later batches, and from the same virtual stream as `position`. Samples that the batch of
        `position` contains are left out; but if none of `REPEATS` samples in a row is different, the next one is
        yielded.
        """
        first = position - position % self.batch_size
        batch = np.stack(self(np.arange(first, first + self.batch_size)))  # (3, B)
        repeats = 0
        for later in itertools.count(1):
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
        sources, own = self._own(positions)
        jumps = self._jumps[self._phases(positions), sources]
        shards, samples = np.empty_like(positions), np.empty_like(positions)
        for source in np.unique(sources):
            here = sources == source
            moved = self._exchanged(int(source), own[here] + later * jumps[here])
            _, shards[here], samples[here] = self.samplers[source](moved)
        return sources, shards, samples

    def _exchanged(self, source: int, own: np.ndarray) -> np.ndarray:
        """Return positions of a source after the exchanges at the ends of epochs: (P,) -> (P,)."""
        epochs = self.samplers[source].epochs(own)
        for epoch in np.unique(epochs[epochs > 0]).tolist():
            name = (source, epoch)
            if name not in self._exchanges:
                self._exchanges[name] = self._exchanges_of(source, epoch)
                if len(self._exchanges) > 4 * len(self.samplers):
                    self._exchanges.popitem(last=False)
            given, taken = self._exchanges[name]
            found = np.searchsorted(given, own).clip(max=len(given) - 1)
            own = np.where(given[found] == own, taken[found], own) if len(given) else own
        return own

    def _exchanges_of(self, source: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions that are exchanged in an epoch of a source, sorted, and their partners.

        The results count the positions of the source.
        """
        sampler, none = self.samplers[source], np.empty(0, dtype=np.int64)
        if self.batch_size == 1:
            return none, none
        start = sampler.start(epoch)
        first = self._position_of(source, start) // self.batch_size * self.batch_size
        jump = int(self._jumps[self._phases(np.array([first]))[0], source])
        stop = sampler.start(epoch + 1) - jump  # the last batch takes no part, so that the next epoch is not affected
        if stop <= start:
            return none, none
        begin, end = (int(self.counts(p)[source]) for p in (first, first + self.batch_size))
        old = _codes(sampler, np.arange(begin, start))
        later = np.arange(start, end)
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

    def _position_of(self, source: int, own: int) -> int:
        """Return the position of the run at which a source has had exactly `own` earlier positions."""
        low, high = 0, 1
        while self.counts(high)[source] <= own:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.counts(middle)[source] > own else (middle, high)
        return low

    def counts(self, position: int) -> np.ndarray:
        """Return how many of the positions below `position` each source gets: (S,) int64."""
        found = self._round(position)
        return found.before + np.bincount(found.pattern[: position - found.start], minlength=len(self.samplers))

    def _own(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each position, and how many earlier positions this source gets: (P,) int64 each."""
        sources, own = np.empty_like(positions), np.empty_like(positions)
        left = np.arange(len(positions))
        while len(left):
            found = self._round(int(positions[left[0]]))
            entries = positions[left] - found.start
            inside = (entries >= 0) & (entries < len(found.pattern))
            here, entries, left = left[inside], entries[inside], left[~inside]
            sources[here] = found.pattern[entries]
            own[here] = found.before[sources[here]] + found.turns[entries]
        return sources, own

    def _phases(self, positions: np.ndarray) -> np.ndarray:
        """Return the phase of each position: (P,) -> (P,)."""
        return np.searchsorted(self._starts, positions, side="right") - 1

    def _round(self, position: int) -> "_Round":
        """Return the round that contains a position."""
        phase = int(self._phases(np.array([position]))[0])
        number = (position - int(self._starts[phase])) // int(self._rounds[phase])
        if (phase, number) not in self._tables:
            self._tables[phase, number] = self._table(phase, number)
            if len(self._tables) > KEPT_ROUNDS:
                self._tables.popitem(last=False)
        self._tables.move_to_end((phase, number))
        return self._tables[phase, number]

    def _table(self, phase: int, number: int) -> "_Round":
        """Return a round of a phase."""
        before = self._counts(phase, number)
        pattern = np.repeat(np.arange(len(before)), self._counts(phase, number + 1) - before)
        is_equal = phase == 0 and self._quotas is not None  # all rounds of the phase are equal
        counter = () if is_equal else (phase + 1, number)
        pattern = pattern[_permutation(len(pattern), _philox(self._seed, _MIXTURE, 0, *counter))]
        start = int(self._starts[phase]) + number * len(pattern)
        if phase + 1 < len(self._starts):
            pattern = pattern[: int(self._starts[phase + 1]) - start]
        return _Round(start, before, pattern, _earlier(pattern))

    def _counts(self, phase: int, number: int) -> np.ndarray:
        """Return the number of positions of each source before a round of a phase: (S,) int64."""
        if phase == 0 and self._quotas is not None:
            return number * self._quotas
        sums = np.floor(number * int(self._rounds[phase]) * self._ends[phase] + 0.5).astype(np.int64)
        return self._before[phase] + np.diff(sums, prepend=0)


class _Round(NamedTuple):
    """A round of a mixture."""

    start: int
    """First position of the round."""
    before: np.ndarray
    """(S,) int64: number of earlier positions of each source."""
    pattern: np.ndarray
    """(L,) int64: source of each position of the round."""
    turns: np.ndarray
    """(L,) int64: number of earlier positions of the same source in the round."""


def _earlier(pattern: np.ndarray) -> np.ndarray:
    """Return, for each entry of a pattern of sources (L,), the number of earlier entries of the same source: (L,)."""
    order = np.argsort(pattern, kind="stable")
    counts = np.bincount(pattern)
    turns = np.empty(len(pattern), dtype=np.int64)
    turns[order] = np.arange(len(pattern)) - np.repeat(np.cumsum(counts) - counts, counts)
    return turns


def _codes(sampler: AnySampler, positions: np.ndarray) -> np.ndarray:
    """Return one number per position, (P,) int64, which identifies its sample."""
    _, shards, samples = sampler(positions)
    return (shards << 32) + samples


def phases(weights: Sequence[Weight]) -> list[tuple[int, list[float]]]:
    """Return the phases of a mixture, as (first step, weight of each source). Constant weights form a single phase.

    Raises:
        ValueError: the weights of a source do not begin at step 0, or a step is negative.
    """
    tables = [dict(weight) if isinstance(weight, Mapping) else {0: weight} for weight in weights]
    if any(0 not in table or min(table) < 0 for table in tables):
        raise ValueError("The weights of a source must begin at step 0, as in {0: 1.0, 10000: 0.2}.")
    steps = sorted({step for table in tables for step in table})
    return [(step, [table[max(one for one in table if one <= step)] for table in tables]) for step in steps]


def quotas(shares: np.ndarray) -> np.ndarray | None:
    """Return the number of pattern entries of each source: (S,) -> (S,) int64, with the sum 1,024.

    The shares are rounded by the method of largest remainders. Return None if this changes a share by more than 1 %.
    """
    exact = shares * PATTERN
    parts = np.maximum(np.floor(exact).astype(np.int64), 1)
    while parts.sum() < PATTERN:
        parts[np.argmax(exact - parts)] += 1
    while parts.sum() > PATTERN and parts.max() > 1:
        parts[np.argmin(np.where(parts > 1, exact - parts, np.inf))] -= 1
    is_close = np.abs(parts - exact) <= LARGEST_ROUNDING * exact
    return parts if is_close.all() and parts.sum() == PATTERN else None
