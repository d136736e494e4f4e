"""Oracles are naive loops, scipy's Gumbel distribution, and copies whose margins are known."""

import numpy as np
import pytest
from scipy import stats

from tessera.extras.explore import copies

RNG = np.random.default_rng(0)


def unit(rows):
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def all_neighbours(features, k):
    """Return similarities and indices (N, K) from all pairs in float64."""
    similarity = features.astype(np.float64) @ features.T.astype(np.float64)
    np.fill_diagonal(similarity, -np.inf)
    number = np.argsort(-similarity, axis=1)[:, :k]
    return np.take_along_axis(similarity, number, 1).astype(np.float32), number


def test_margins_subtract_the_density_around_both_images():
    features = unit(RNG.normal(size=(60, 5)))
    similarity, number = all_neighbours(features, 20)
    around = copies.density(similarity)
    margin = copies.margins(similarity, number, around)
    for i in (0, 17, 59):
        for place in (0, 5):
            j = number[i, place]
            crowd = [np.mean(np.sort(similarity[n])[::-1][2:12]) for n in (i, j)]
            assert margin[i, place] == pytest.approx(similarity[i, place] - np.mean(crowd), abs=1e-6)


def test_few_images_have_a_density_of_their_own():
    similarity = np.array([[0.5, 0.4, 0.2, -np.inf], [0.5, -np.inf, -np.inf, -np.inf]], np.float32)
    np.testing.assert_allclose(copies.density(similarity), [0.2, 0.0])


def test_the_threshold_is_exceeded_by_the_expected_share_of_images_without_copies():
    rng = np.random.default_rng(1)
    clean = stats.gumbel_r.rvs(0.1, 0.05, size=200_000, random_state=rng)
    truth = stats.gumbel_r.ppf(1 - copies.FALSE_SHARE, 0.1, 0.05)
    assert copies.threshold(clean) == pytest.approx(truth, rel=0.02)
    with_copies = clean.copy()
    with_copies[:20_000] = 0.9  # each tenth image has a copy
    assert truth < copies.threshold(with_copies) < truth * 1.2  # never more false finds than promised


def test_pairs_are_found_once_with_the_largest_margin_first():
    margin = np.array([[0.5, 0.1], [0.5, 0.45], [0.45, 0.0], [0.3, -np.inf]], np.float32)
    number = np.array([[1, 2], [0, 2], [1, 0], [0, -1]])
    pairs, found, places = copies.pairs_above(margin, number, 0.2)
    assert pairs.tolist() == [[0, 1], [1, 2], [0, 3]]
    np.testing.assert_allclose(found, [0.5, 0.45, 0.3])
    np.testing.assert_allclose(margin.reshape(-1)[places], found)


def test_one_image_of_each_group_of_copies_stays():
    pairs = np.array([[1, 4], [4, 6], [2, 3]])
    assert np.flatnonzero(copies.surplus(pairs, 8)).tolist() == [3, 4, 6]
    assert not copies.surplus(np.empty((0, 2), np.int64), 3).any()


def test_planted_copies_count_as_found_by_the_margin_to_their_original():
    features = unit(RNG.normal(size=(80, 6)))
    around = copies.density(all_neighbours(features, 20)[0])
    planted = unit(features[:30] + 0.2 * RNG.normal(size=(30, 6)))
    similarity = planted @ features.T
    number = np.argsort(-similarity, axis=1)[:, :21]
    near = np.take_along_axis(similarity, number, 1)
    found = copies.recall_of_planted(near, number, np.arange(30), around, 0.3)
    for i in range(30):
        others = np.sort(np.delete(similarity[i], i))[::-1]
        margin = similarity[i, i] - (others[1:11].mean() + around[i]) / 2
        assert found[i] == (margin >= 0.3 and i in number[i])
    assert 0 < found.mean() < 1
