import time
import tracemalloc
from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.data.sampler import (
    GrowingSampler,
    MixtureSampler,
    ShuffledSampler,
    bounded_buffers,
    phases,
    quotas,
    sample_rng,
)


def everything(counts):
    """All (shard, sample), sorted."""
    return [(shard, sample) for shard, count in enumerate(counts) for sample in range(count)]


@settings(max_examples=25, deadline=None)
@given(
    counts=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    streams=st.integers(1, 70),
    block=st.none() | st.integers(1, 20),
    buffer=st.integers(1, 40),
    seed=st.integers(0, 2**64 - 1),
    data=st.data(),
)
def test_epochs_are_whole_and_any_access_gives_the_same(counts, streams, block, buffer, seed, data):
    images = sum(counts)
    settings = {"streams": streams, "block": block, "buffer": buffer}
    order = ShuffledSampler(counts, seed, **settings)
    whole = np.stack(order(np.arange(3 * images)))  # (3, P)
    for epoch in range(3):
        assert (whole[0, epoch * images : (epoch + 1) * images] == epoch).all()
        shards, samples = whole[1:, epoch * images : (epoch + 1) * images]
        assert sorted(zip(shards, samples, strict=True)) == everything(counts)
    places = np.array(data.draw(st.lists(st.integers(0, 3 * images - 1), max_size=20)), dtype=np.int64)
    np.testing.assert_array_equal(np.stack(ShuffledSampler(counts, seed, **settings)(places)), whole[:, places])


def test_order_is_what_it_was():
    """Runs are resumed with other versions of numpy and of this file: the order must not move."""
    _, shards, samples = ShuffledSampler([6, 3], seed=2, streams=2, block=2, buffer=3)(np.arange(9, 18))
    assert shards.tolist() == [1, 0, 1, 0, 1, 0, 0, 0, 0]
    assert samples.tolist() == [0, 3, 1, 2, 2, 0, 5, 1, 4]
    sources, _, _ = MixtureSampler([ShuffledSampler([9], 0)] * 3, [(0, [1, 2, 3])], 0)(np.arange(12))
    assert sources.tolist() == [1, 0, 2, 1, 2, 1, 2, 0, 2, 2, 1, 2]
    assert sample_rng(5, 10**12).bit_generator.random_raw(2).tolist() == [4578702850448300773, 14842475959918514088]


def test_seeds_sources_epochs_and_positions_draw_differently():
    positions = np.arange(300)
    orders = [
        ShuffledSampler([300], seed, source=source)(positions + 300 * epoch)[2].tolist()
        for seed in (0, 1)
        for source in (0, 1)
        for epoch in (0, 1)
    ]
    assert len({tuple(order) for order in orders}) == 8
    assert len({sample_rng(seed, position).random() for seed in (0, 1) for position in (0, 1)}) == 4
    high = [ShuffledSampler([300], seed)(positions)[2].tolist() for seed in (2**64 - 2, 2**64 - 1)]
    assert high[0] != high[1]  # no detour through floats


def test_blocks_suit_the_number_of_samples():
    sizes = {
        sum(counts): ShuffledSampler(counts, 0).block
        for counts in ([60_000], [50_000] * 4, [1_280] * 1_000, [1] * 100_000)
    }
    assert sizes == {60_000: 1, 200_000: 4, 1_280_000: 16, 100_000: 1}


def test_streams_stay_local():
    counts = [1000] * 40
    order = ShuffledSampler(counts, seed=0, streams=8, block=16, buffer=512)
    _, shards, samples = order(np.arange(8 * 512))
    stream = slice(3, None, 8)  # the first buffer of stream 3
    blocks = set(zip(shards[stream].tolist(), (samples[stream] // 16).tolist(), strict=True))
    assert 512 // 16 <= len(blocks) <= 512 // 16 + 4  # short blocks at the end of shards, and one cut at each end


def test_a_mixture_of_one_source_is_its_order():
    order = ShuffledSampler([100, 37], 4)
    positions = np.arange(400)
    mixture = MixtureSampler([order], [(0, [0.3])], 4)
    np.testing.assert_array_equal(np.stack(mixture(positions)[1:]), np.stack(order(positions)[1:]))
    np.testing.assert_array_equal(np.stack(mixture(positions, later=2)[1:]), np.stack(order(positions + 128)[1:]))


@pytest.mark.parametrize(
    ("counts", "weights", "batch_size"),
    [([[90, 110]], [1], 60), ([[700, 1], [300]], [0.7, 0.3], 96), ([[97]], [1], 32)],
)
def test_no_batch_repeats_an_image_where_an_epoch_ends(counts, weights, batch_size):
    orders = [ShuffledSampler(one, 3, streams=8, source=source) for source, one in enumerate(counts)]
    mixture = MixtureSampler(orders, [(0, weights)], 3, batch_size)
    positions = np.arange(40 * 1024 // batch_size * batch_size)
    found, plain = np.stack(mixture(positions)), np.stack(MixtureSampler(orders, [(0, weights)], 3)(positions))

    def repeated(samples: np.ndarray) -> list[int]:
        batches = samples.T.reshape(-1, batch_size, 3)
        return [step for step, batch in enumerate(batches) if len(np.unique(batch, axis=0)) < batch_size]

    assert repeated(found) == []
    steps = repeated(plain)
    assert steps
    for source, one in enumerate(counts):
        for other in (found, plain):  # every epoch still has every sample
            own = other[1:, other[0] == source].T.tolist()
            for start in range(0, len(own) - sum(one) + 1, sum(one)):
                assert sorted(map(tuple, own[start : start + sum(one)])) == everything(one)
    moved = np.flatnonzero((found != plain).any(0))
    here = np.isin(moved // batch_size, steps).sum()
    assert here < len(moved) <= 2 * here  # each exchanged sample has one partner, which may come after the last batch
    pick = np.random.default_rng(0).integers(0, len(positions), 100)
    np.testing.assert_array_equal(np.stack(mixture(pick)), found[:, pick])


def test_no_batch_repeats_an_image_if_sources_grow_and_shares_change():
    grown = [ShuffledSampler(counts, 3, streams=8) for counts in ([90, 110], [90, 110, 60])]
    orders = [GrowingSampler([(0, grown[0]), (3, grown[1])]), ShuffledSampler([300], 3, streams=8, source=1)]
    shares = [(0, [0.7, 0.3]), (1200, [0, 1]), (2400, [0.5, 0.5])]
    positions = np.arange(120 * 60)
    found, plain = (np.stack(MixtureSampler(orders, shares, 3, size)(positions)) for size in (60, 1))
    repeated = [sum(len(np.unique(one, axis=0)) < 60 for one in o.T.reshape(-1, 60, 3)) for o in (found, plain)]
    assert repeated[0] == 0 < repeated[1]
    np.testing.assert_array_equal(found[0], plain[0])
    for source, sizes in enumerate([[200] * 3 + [260] * 9, [300] * 9]):
        own = found[1:, found[0] == source].T
        for part in np.split(own, np.cumsum(sizes))[:-1]:
            assert len(np.unique(part, axis=0)) == len(part)


@pytest.mark.parametrize(("images", "every"), [(5000, 37)])
def test_replacements_are_not_in_the_batch_and_differ(images, every):
    mixture = MixtureSampler([ShuffledSampler([images], 0)], [(0, [1])], 0, batch_size=1024)
    for step in (0, 1, 4):
        positions = np.arange(step * 1024, (step + 1) * 1024)
        batch = set(mixture(positions)[2].tolist())
        found = [int(one[2][0]) for p in positions[::every] for one in islice(mixture.replacements(p), 3)]
        assert not batch.intersection(found)
        if images == 5000 and step < 2:
            assert len(set(found)) == len(found) == 84


def test_replacements_of_a_batch_of_all_images_end():
    mixture = MixtureSampler([ShuffledSampler([64], 0)], [(0, [1])], 0, batch_size=64)
    assert len(list(islice(mixture.replacements(5), 3))) == 3


@given(st.lists(st.floats(1e-3, 1), min_size=1, max_size=30))
def test_quotas_are_the_shares_rounded(weights):
    exact = 1024 * np.array(weights) / sum(weights)
    parts = quotas(exact / 1024)
    if parts is None:  # it must then be impossible to give every source a whole number of entries near its share
        assert (np.abs(np.round(exact) - exact) > 0.01 * exact).any() or np.round(exact).sum() != 1024
    else:
        assert parts.sum() == 1024
        assert (np.abs(parts - exact) <= np.minimum(1, 0.01 * exact)).all()


@settings(max_examples=10, deadline=None)
@given(
    rows=st.lists(st.lists(st.just(0.0) | st.floats(0.01, 1), min_size=3, max_size=3), min_size=1, max_size=4),
    lengths=st.lists(st.integers(1000, 5000), min_size=3, max_size=3),
)
def test_weights_of_steps_give_exact_counts_and_whole_epochs(rows, lengths):
    rows = [[row[0] + 0.02, *row[1:]] for row in rows]  # no phase without a weight
    rows[0] = [one + 0.01 for one in rows[0]]  # and no source without one
    starts = np.cumsum([0, *lengths])[: len(rows)]
    counts = [[30, 50], [90], [7]]
    samplers = [ShuffledSampler(one, 9, source=source) for source, one in enumerate(counts)]
    mixture = MixtureSampler(samplers, list(zip(starts.tolist(), rows, strict=True)), seed=9)
    positions = np.arange(starts[-1] + 3 * 1024)
    sources, shards, samples = mixture(positions)
    share = np.array([np.array(row) / sum(row) for row in rows])[np.searchsorted(starts, positions, side="right") - 1]
    for phase, (start, stop) in enumerate(pairwise([*starts.tolist(), len(positions)])):
        # the naive sum of the shares, position for position
        exact, had = np.cumsum(share[start:stop], 0), np.cumsum(sources[start:stop, None] == np.arange(3), 0)
        smallest = share[start][share[start] > 0].min()
        length = max(int(np.ceil(4 / smallest)), 64)
        if phase == 0 and quotas(share[0]) is not None:
            length, exact = 1024, exact + np.arange(1, stop + 1)[:, None] * (mixture.shares[0] - share[0])
        assert np.abs(had - exact)[length - 1 :: length].max(initial=0) <= 1 + 1e-6
        assert np.abs(had - exact).max() < 70  # within a shuffled round
    assert not (share == 0)[np.arange(len(sources)), sources].any()
    for source in range(3):
        drawn = list(zip(shards[sources == source].tolist(), samples[sources == source].tolist(), strict=True))
        for epoch in range(len(drawn) // sum(counts[source])):
            part = drawn[epoch * sum(counts[source]) : (epoch + 1) * sum(counts[source])]
            assert sorted(part) == everything(counts[source])
    pick = np.random.default_rng(0).integers(0, len(positions), 200)
    np.testing.assert_array_equal(np.stack(mixture(pick)), np.stack([sources, shards, samples])[:, pick])
    for position in pick[:20].tolist():
        np.testing.assert_array_equal(mixture.counts(position), np.bincount(sources[:position], minlength=3))


def test_phases_are_the_steps_at_which_a_weight_changes():
    assert phases([0.5, 2]) == [(0, [0.5, 2])]
    assert phases([0.5, {0: 1.0, 10: 0.25}, {0: 0, 20: 1}]) == [
        (0, [0.5, 1.0, 0]),
        (10, [0.5, 0.25, 0]),
        (20, [0.5, 0.25, 1]),
    ]
    with pytest.raises(ValueError, match="begin at step 0"):
        phases([1.0, {5: 1.0}])


@pytest.mark.parametrize("first", [[0.7, 0.3], [0.99991, 0.00009], [0.06, 1]])
def test_later_phases_leave_the_order_and_the_exchanges_of_earlier_steps(first):
    orders = [ShuffledSampler([200 + 90 * source], 3, streams=8, source=source) for source in range(2)]
    begun = np.stack(MixtureSampler(orders, [(0, first)], 3, 60)(np.arange(4980)))
    for start in (60, 1200, 4980):
        for rows in ([[0, 1]], [[1, 0], [0.2, 0.9]]):
            table = [(0, first), *((start + 600 * number, row) for number, row in enumerate(rows))]
            changed = np.stack(MixtureSampler(orders, table, 3, 60)(np.arange(start + 2400)))
            np.testing.assert_array_equal(changed[:, :start], begun[:, :start])
            for source in range(2):  # the epochs of a source continue over the change
                own = changed[1:, changed[0] == source].T
                for part in np.split(own, np.arange(200 + 90 * source, len(own), 200 + 90 * source))[:-1]:
                    assert len(np.unique(part, axis=0)) == len(part)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1, -1]], "negative"),
        ([[1, 0]], "always has the weight 0"),
        ([[1, 1], [0, 0]], "negative or not finite"),
        ([[1, float("nan")]], "not finite"),
        ([[1], [1]], "one weight per source"),
        ([[1, 1e-9]], "fewer than four"),
    ],
)
def test_weights_of_steps_that_cannot_be_used(rows, message):
    samplers = [ShuffledSampler([50], 9, source=source) for source in range(2)]
    with pytest.raises(ValueError, match=message):
        MixtureSampler(samplers, [(64 * number, row) for number, row in enumerate(rows)], seed=1)


def test_a_growing_list_keeps_the_order_of_earlier_epochs():
    counts = [11, 30, 7, 40, 5]
    stages = [(first, ShuffledSampler(counts[:size], 4, buffer=9)) for first, size in [(0, 2), (3, 4), (4, 5)]]
    growing = GrowingSampler(stages)
    positions = np.arange(3 * 41 + 88 + 2 * 93)
    epochs, shards, samples = growing(positions)
    assert epochs.tolist() == [0] * 41 + [1] * 41 + [2] * 41 + [3] * 88 + [4] * 93 + [5] * 93
    np.testing.assert_array_equal(np.stack([epochs, shards, samples])[:, :123], np.stack(stages[0][1](np.arange(123))))
    for epoch, size in enumerate([2, 2, 2, 4, 5, 5]):
        drawn = list(zip(shards[epochs == epoch].tolist(), samples[epochs == epoch].tolist(), strict=True))
        assert sorted(drawn) == everything(counts[:size])
        assert drawn != everything(counts[:size])
    for position in (0, 1, 41, 42, 122, 123, 124, 211, 212, 304):
        first = growing.next_epoch(position)
        assert first == (epochs[position] if position in (0, 41, 123, 211, 304) else epochs[position] + 1)


def test_a_billion_samples_in_a_hundred_thousand_shards():
    counts = np.full(100_000, 10_000)
    tracemalloc.start()
    start = time.perf_counter()
    order = ShuffledSampler(counts, seed=0)
    _, shards, samples = order(np.arange(10**9 - 128, 10**9 + 128))  # two epochs
    elapsed = time.perf_counter() - start
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert elapsed < 10
    assert peak < 2**29
    assert order.block == 256
    assert len(set(zip(shards[:128].tolist(), samples[:128].tolist(), strict=True))) == 128
    assert shards.max() < 100_000
    assert samples.max() < 10_000


def test_buffers_are_bounded_in_bytes():
    assert bounded_buffers([110_000], 1024, None) == [1024]
    assert bounded_buffers([110_000], 1024, 8) == [1024]  # 64 x 1,024 x 110 kB = 7.2 GB
    assert bounded_buffers([220_000], 1024, 8) == [568]  # 64 x 568 x 220 kB = 8.0 GB
    assert bounded_buffers([110_000, 1_000], 1024, 2) == [142, 1024]  # a gigabyte each
    assert bounded_buffers([10**9], 1024, 1) == [1]
    assert bounded_buffers([5000], 100, 1e-4, streams=4) == [5]
