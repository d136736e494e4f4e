"""The oracle is the matrix of all similarities in float64."""

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_limits

pytest.importorskip("faiss")

from tessera.extras.explore import neighbours
from tessera.runtime.processes import make_accelerator
from tests.extras.explore.test_copies import all_neighbours, unit


@pytest.fixture(scope="module")
def features():
    rng = np.random.default_rng(0)
    return unit(rng.normal(size=(40, 16))[rng.integers(0, 40, 700)] + 0.5 * rng.normal(size=(700, 16)))


def search(features, folder, **options):
    return neighbours.search(features, 5, folder, make_accelerator(), **options)


def test_the_exact_search_finds_all_neighbours(features, tmp_path, monkeypatch):
    monkeypatch.setattr(neighbours, "BLOCK", 256)
    similarity, number = search(features, tmp_path)
    expected, of = all_neighbours(features, 5)
    np.testing.assert_allclose(similarity, expected, atol=1e-6)
    assert (number == of).mean() > 0.999  # equal up to ties of float32
    assert neighbours.recall(features, number) == pytest.approx(1.0)


def test_pieces_find_what_one_index_finds(features, tmp_path, monkeypatch):
    """With as many probes as lists, inverted lists are exact, so any error of merging shows."""
    monkeypatch.setattr(neighbours, "BLOCK", 256)
    monkeypatch.setattr(neighbours, "PROBES", 4096)
    similarity, number = search(features, tmp_path, exact=10, piece=300)
    expected, of = all_neighbours(features, 5)
    np.testing.assert_allclose(similarity, expected, atol=1e-6)
    assert (number == of).mean() > 0.999
    assert len(list(tmp_path.glob("neighbours-*.npz"))) == 9  # 3 pieces of 3 blocks


def test_the_number_of_threads_changes_no_digit(tmp_path):
    rows = unit(np.random.default_rng(0).normal(size=(1000, 768)))
    found, threads = [], torch.get_num_threads()
    for count in (1, 3):
        folder = tmp_path / str(count)
        folder.mkdir()
        try:
            with threadpool_limits(count):
                torch.set_num_threads(count)
                found.append(search(rows, folder))
        finally:
            torch.set_num_threads(threads)
    assert all(np.array_equal(one, other) for one, other in zip(*found, strict=True))


def test_a_search_goes_on_at_the_block_where_it_stopped(features, tmp_path, monkeypatch):
    monkeypatch.setattr(neighbours, "BLOCK", 256)
    before = search(features, tmp_path)
    paths = sorted(tmp_path.glob("neighbours-*.npz"))
    kept = paths[0].stat().st_mtime_ns
    paths[1].unlink()
    after = search(features, tmp_path)
    assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))
    assert paths[0].stat().st_mtime_ns == kept


def test_recall_counts_missed_neighbours(features):
    number = all_neighbours(features, 5)[1]
    number[:, 4] = (np.arange(700) + 1) % 700
    right = np.mean([len(set(a) & set(b)) for a, b in zip(number, all_neighbours(features, 5)[1], strict=True)]) / 5
    assert neighbours.recall(features, number) == pytest.approx(right, abs=1e-3)
    assert 0.79 < right < 0.82


def test_fewer_images_than_neighbours(tmp_path):
    similarity, number = search(unit(np.random.default_rng(1).normal(size=(3, 4))), tmp_path)
    assert (number[:, 2:] == -1).all()
    assert np.isneginf(similarity[:, 2:]).all()
    assert {*map(tuple, np.sort(number[:, :2]).tolist())} == {(1, 2), (0, 2), (0, 1)}
