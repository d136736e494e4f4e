"""Which sample comes when: a pure function of the seed, the sizes of the shards and the number of samples seen.

Nothing here is state. Positions count the samples of a run from 0; N samples make an epoch, so epoch e is positions
e * N to (e + 1) * N - 1 and holds every sample once. Position p belongs to lane p mod V. In each epoch the shards are
cut in blocks of neighbouring samples, all blocks are shuffled, and each lane gets one stretch of the shuffled blocks,
just as long as its part of the epoch. Within its stretch a lane shuffles windows of samples. So at any time a lane
reads from few places (window / block), neighbours of a shard end up far apart, and no process has to know of another.

All draws of the order are raw words of Philox, whose stream is fixed for all versions of numpy; those of `Generator`,
which `sample_rng` gives, are not.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

LANES = 64
WINDOW = 1024
PATTERN = 1024  # positions after which a mixture repeats its choice of sources; weights are rounded to parts of it

BLOCK = 16  # neighbours enough for reading to be quick
ENOUGH_BLOCKS = 2**16  # for a good shuffle: with fewer samples than that, each is a block
MOST_BLOCKS = 2**22  # in an epoch, whose tables then take about 50 MB

_BLOCKS, _WINDOW, _MIXTURE, _SAMPLE = range(4)


def _philox(seed: int, purpose: int, source: int, *counter: int) -> np.random.Philox:
    """A stream of its own for each purpose and counter: the key and the upper words of Philox's counter name it."""
    key = np.array([seed, purpose + 16 * source], dtype=np.uint64)
    words = np.array([0, *counter, *[0] * (3 - len(counter))], dtype=np.uint64)  # the lowest word counts the draws
    return np.random.Philox(key=key, counter=words)


def _permutation(size: int, bits: np.random.Philox) -> np.ndarray:
    return np.argsort(bits.random_raw(size), kind="stable")


def sample_rng(seed: int, position: int) -> np.random.Generator:
    """The randomness of what happens to the sample at a position."""
    return np.random.Generator(_philox(seed, _SAMPLE, 0, position))


def bounded_windows(sizes: Sequence[float], window: int, gigabytes: float | None, lanes: int = LANES) -> list[int]:
    """Samples that a lane of each source shuffles at a time: `window`, or fewer where the windows of all lanes would
    span more than `gigabytes`, which the sources share equally.

    A window holds numbers; its samples stay where they are, encoded, until one is decoded. What it spans is what is
    read again and again over its time: what a node's cache or the system's own should hold.

    Args:
        sizes: encoded bytes of a sample of each source, on average over its shards.
        window: samples.
        gigabytes: None for no limit.
        lanes: with a window each.
    """
    if gigabytes is None:
        return [window] * len(sizes)
    share = gigabytes * 1e9 / len(sizes) / lanes
    return [max(min(window, int(share / size)), 1) for size in sizes]


class Order:
    """The endless order of one list of shards.

    Args:
        counts: samples of each shard.
        seed: 0 to 2**64 - 1.
        lanes: V; like the next two it is part of the order, and does not depend on processes, workers or batch size.
        block: neighbouring samples of a shard that stay together; None for what suits the number of samples: 1 up to
            65,536 of them, 16 from a million on, more when there are billions.
        window: samples that a lane shuffles at a time.
        source: tells apart the orders of a mixture.
    """

    def __init__(
        self,
        counts: Sequence[int] | np.ndarray,
        seed: int,
        *,
        lanes: int = LANES,
        block: int | None = None,
        window: int = WINDOW,
        source: int = 0,
    ):
        counts = np.asarray(counts, dtype=np.int64)
        if not len(counts) or counts.min() < 1:
            raise ValueError("an order needs at least one shard, and at least one sample in each")
        if not 0 <= seed < 2**64:
            raise ValueError(f"a seed is 0 to 2**64 - 1, not {seed}")
        block = _suitable_block(counts) if block is None else block
        if min(lanes, block, window) < 1:
            raise ValueError(f"lanes, block and window are at least 1, not {lanes}, {block} and {window}")
        self.images = int(counts.sum())
        self.lanes, self.block, self.window = lanes, block, window
        self._counts, self._seed, self._source = counts, seed, source
        self._first_blocks = np.concatenate([[0], np.cumsum(-(-counts // block))])  # (shards + 1,)
        self._epochs: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()
        self._windows: OrderedDict[tuple[int, int, int], np.ndarray] = OrderedDict()

    def __call__(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Epoch, shard and number in the shard of each position; all are (P,) int64."""
        positions = np.asarray(positions, dtype=np.int64)
        epochs, lanes = positions // self.images, positions % self.lanes
        shards, samples = np.empty_like(positions), np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = np.flatnonzero(epochs == epoch)
            dealt = self._dealt(int(epoch), lanes[here], positions[here])
            shards[here], samples[here] = self._find(int(epoch), dealt)
        return epochs, shards, samples

    def _before(self, position: int, lanes: np.ndarray) -> np.ndarray:
        """How many of the first `position` positions belong to each of `lanes`."""
        return (position - lanes + self.lanes - 1) // self.lanes

    def _dealt(self, epoch: int, lanes: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Places (P,) in the epoch's sequence of shuffled blocks."""
        every = np.arange(self.lanes)
        before = self._before(epoch * self.images, every)  # (V,)
        sizes = self._before((epoch + 1) * self.images, every) - before  # (V,)
        starts = np.cumsum(sizes) - sizes  # (V,)
        turns = positions // self.lanes - before[lanes]  # (P,) how many of its positions the lane has had in this epoch
        numbers, places = np.divmod(turns, self.window)
        groups, inverse = np.unique(numbers * self.lanes + lanes, return_inverse=True)
        for group, members in enumerate(np.split(np.argsort(inverse, kind="stable"), _ends(inverse, len(groups)))):
            number, lane = divmod(int(groups[group]), self.lanes)
            size = min(self.window, int(sizes[lane]) - number * self.window)
            places[members] = self._shuffled(epoch, lane, number, size)[places[members]]
        return starts[lanes] + numbers * self.window + places

    def _shuffled(self, epoch: int, lane: int, number: int, size: int) -> np.ndarray:
        """The permutation (size,) of one window."""
        name = (epoch, lane, number)
        if name not in self._windows:
            bits = _philox(self._seed, _WINDOW, self._source, *name)
            self._windows[name] = _permutation(size, bits)
            if len(self._windows) > 4 * self.lanes:
                self._windows.popitem(last=False)
        self._windows.move_to_end(name)
        return self._windows[name]

    def _find(self, epoch: int, dealt: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Shard and number in the shard (P,) of places in the epoch's sequence of blocks."""
        if epoch not in self._epochs:
            self._epochs[epoch] = self._tables(epoch)
            if len(self._epochs) > 2:
                self._epochs.popitem(last=False)
        self._epochs.move_to_end(epoch)
        blocks, ends = self._epochs[epoch]
        turn = np.searchsorted(ends, dealt, side="right")
        block = blocks[turn]
        shards = np.searchsorted(self._first_blocks, block, side="right") - 1
        start = (block - self._first_blocks[shards]) * self.block
        length = np.minimum(self.block, self._counts[shards] - start)
        return shards, start + dealt - (ends[turn] - length)

    def _tables(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The shuffled blocks and where each ends in the epoch's sequence."""
        count = int(self._first_blocks[-1])
        blocks = _permutation(count, _philox(self._seed, _BLOCKS, self._source, epoch)).astype(np.int32)
        lengths = np.full(count, self.block, dtype=np.int32)  # of billions of samples, memory counts
        lengths[self._first_blocks[1:] - 1] = (self._counts - 1) % self.block + 1
        return blocks, np.cumsum(lengths[blocks], dtype=np.int64)


def _suitable_block(counts: np.ndarray) -> int:
    block = 1
    while (-(-counts // block)).sum() > (ENOUGH_BLOCKS if block < BLOCK else MOST_BLOCKS) and block < counts.max():
        block *= 2
    return block


def _ends(inverse: np.ndarray, groups: int) -> np.ndarray:
    """Where to split the sorted `inverse` so that each part is one group."""
    return np.cumsum(np.bincount(inverse, minlength=groups))[:-1]


class Mixture:
    """Draws positions from several orders in fixed shares.

    Each position belongs to one source by a shuffled pattern of 1,024 entries, and each source counts its positions by
    itself, so that an epoch is a matter of each source. With one source its positions are those of the run.

    Args:
        orders: one a source.
        weights: shares of the samples, relative to each other; rounded to parts of 1,024, at least one.
        seed: 0 to 2**64 - 1.
    """

    def __init__(self, orders: Sequence[Order], weights: Sequence[float], seed: int):
        if len(orders) != len(weights) or not 1 <= len(orders) <= PATTERN:
            raise ValueError(
                f"{len(orders)} sources and {len(weights)} weights: give 1 to {PATTERN}, and one weight each"
            )
        self.orders = list(orders)
        self.quotas = quotas(weights)  # (S,)
        pattern = np.repeat(np.arange(len(orders)), self.quotas)
        self._sources = pattern[_permutation(PATTERN, _philox(seed, _MIXTURE, 0))]  # (1024,)
        self._turns = np.empty(PATTERN, dtype=np.int64)
        for source, quota in enumerate(self.quotas):
            self._turns[self._sources == source] = np.arange(quota)

    def __call__(self, positions: np.ndarray, later: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Source, shard and number in the shard of each position; all are (P,) int64.

        With `later`, those that come so many turns later in the lanes that the positions have in their source.
        """
        positions = np.asarray(positions, dtype=np.int64)
        rounds, entries = np.divmod(positions, PATTERN)
        sources = self._sources[entries]
        places = rounds * self.quotas[sources] + self._turns[entries]
        shards, samples = np.empty_like(positions), np.empty_like(positions)
        for source in np.unique(sources):
            here, order = sources == source, self.orders[source]
            _, shards[here], samples[here] = order(places[here] + later * order.lanes)
        return sources, shards, samples


def quotas(weights: Sequence[float]) -> np.ndarray:
    """Shares of 1,024 positions by largest remainder, at least one each: (S,) int64.

    Raises:
        ValueError: a weight is not a positive number.
    """
    shares = np.asarray(weights, dtype=np.float64)
    if not (np.isfinite(shares).all() and (shares > 0).all()):
        raise ValueError(f"weights are positive numbers, not {list(weights)}")
    shares = shares / shares.sum() * PATTERN
    parts = np.maximum(np.floor(shares).astype(np.int64), 1)
    while parts.sum() < PATTERN:
        parts[np.argmax(shares - parts)] += 1
    while parts.sum() > PATTERN:
        parts[np.argmin(np.where(parts > 1, shares - parts, np.inf))] -= 1
    return parts


def step_positions(
    step: int,
    batch_size: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    micro: int = 0,
    accumulation: int = 1,
    lanes: int = LANES,
) -> np.ndarray:
    """Positions that one process takes in one of the `accumulation` forward passes of a step: (P,) int64.

    A step is positions step * batch_size to (step + 1) * batch_size - 1, lane after lane if each lane has equally many.
    The parts of ranks, and of the passes of a rank, follow each other in that sequence: put together they are what one
    process takes in one pass, and a rank reads as few lanes as it can.

    Raises:
        ValueError: the batch does not split evenly.
    """
    if batch_size % (world_size * accumulation):
        raise ValueError(f"{batch_size} samples do not split over {world_size} processes and {accumulation} passes")
    size = batch_size // (world_size * accumulation)
    places = np.arange(size) + (rank * accumulation + micro) * size
    if batch_size % lanes == 0:
        lane, turn = np.divmod(places, batch_size // lanes)
        places = turn * lanes + lane
    return step * batch_size + places
