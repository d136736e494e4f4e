"""How well an epoch is shuffled, beside a full shuffle."""

import numpy as np
import pytest

from tessera.data.sampler import ShuffledSampler

BATCH = 1024


def turns(shards, samples, seed):
    """When each sample of an epoch comes, and when in a full shuffle: (shards, samples) each."""
    order = ShuffledSampler([samples] * shards, seed)
    _, which, place = order(np.arange(shards * samples))
    found = np.empty((shards, samples), dtype=np.int64)
    found[which, place] = np.arange(shards * samples)
    return found, np.random.default_rng(seed).permutation(shards * samples).reshape(shards, samples)


def apart(turns):
    """Distances of samples that were neighbours."""
    return np.abs(np.diff(turns, axis=1))


def sources(turns):
    """How many shards a batch is drawn from, on average."""
    batches = turns // BATCH
    met = np.zeros((len(turns), batches.max() + 1), dtype=bool)
    met[np.arange(len(turns))[:, None], batches] = True
    return met.sum(0)[:-1].mean()


def test_a_small_epoch_is_a_full_shuffle():
    found, full = turns(40, 250, seed=0)
    for share in (0.01, 0.1, 0.5, 0.9):
        assert np.quantile(apart(found), share) == pytest.approx(np.quantile(apart(full), share), rel=0.1, abs=10)


def test_a_large_epoch_draws_its_batches_from_most_shards():
    found, full = turns(1000, 1281, seed=0)
    assert sources(found) > 0.9 * sources(full)
    together = (apart(found) < BATCH).mean()
    # Streams shuffle 1,024 of their samples at a time, which lie 64 x 1,024 positions apart at most.
    assert together < 2.2 * BATCH / (64 * 1024)
    assert np.median(apart(found)) > 16 * BATCH
