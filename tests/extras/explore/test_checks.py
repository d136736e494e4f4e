import numpy as np
import pytest

pytest.importorskip("faiss")

from tessera.extras.explore import checks
from tests.extras.explore.test_copies import all_neighbours, unit


def two_classes(images=200, spread=0.3):
    rng = np.random.default_rng(0)
    labels = np.arange(images) % 2
    return unit(np.eye(4)[labels] + spread * rng.normal(size=(images, 4))), labels


def test_labels_that_neighbours_contradict_are_doubtful():
    features, labels = two_classes(spread=0.1)
    wrong = np.arange(0, 200, 25)
    given = labels.copy()
    given[wrong] = 1 - given[wrong]
    given[3] = -1  # no label
    score, doubt, agreement = checks.doubtful_labels(*all_neighbours(features, 20), given)
    assert doubt[wrong].sum() >= 4  # a wrong label is missed where the other class is not as likely as on average
    assert set(np.flatnonzero(doubt)) <= {*wrong.tolist()}
    assert not doubt[3]
    assert score[3] == -1
    assert set(np.argsort(-score)[: len(wrong)]) == {*wrong.tolist()}
    assert agreement == pytest.approx({0: 0.95, 1: 0.95}, abs=0.06)


def test_votes_are_those_of_a_loop():
    features, labels = two_classes(40)
    similarity, number = all_neighbours(features, 6)
    ((_, votes),) = checks._votes(similarity, number, labels, 2)
    for i in range(40):
        weights = np.exp(similarity[i].astype(float) / 0.07)
        assert votes[i, 1] == pytest.approx(weights[labels[number[i]] == 1].sum() / weights.sum(), rel=1e-4)


def test_images_without_labels_have_no_doubts():
    features, _ = two_classes(20)
    score, doubt, agreement = checks.doubtful_labels(*all_neighbours(features, 5), np.full(20, -1))
    assert (score == -1).all()
    assert not doubt.any()
    assert not agreement


def test_labels_of_small_classes_are_not_judged():
    features, labels = two_classes(60)
    labels = labels.copy()
    labels[:3] = 2
    score, doubt, agreement = checks.doubtful_labels(*all_neighbours(features, 20), labels)
    assert (score[:3] == -1).all()
    assert not doubt[:3].any()
    assert set(agreement) == {0, 1}


def test_the_farthest_images_are_outliers():
    features, _ = two_classes(300, spread=0.05)
    features[7] = [0, 0, 0, -1]
    distance, chosen = checks.outliers(all_neighbours(features, 20)[0])
    assert np.argmax(distance) == 7
    assert chosen[7]
    assert chosen.sum() == 3
    similarity = np.sort(features @ features[12])[::-1]
    assert distance[12] == pytest.approx(1 - similarity[10], abs=1e-6)  # the first one is the image itself


def test_blank_images_and_tiny_files():
    blank = checks.blank(np.array([0.2, 0.001, 0.2]), np.array([1.0, 1.0, 0.01]))
    assert blank.tolist() == [False, True, True]
    assert checks.tiny(np.array([0, 1000, 1100, 90, 900])).tolist() == [False, False, False, True, False]
    assert not checks.tiny(np.zeros(3, np.int64)).any()


def test_a_medoid_is_the_image_nearest_to_its_centre():
    rng = np.random.default_rng(0)
    group = np.arange(60) % 4
    features = unit(np.eye(6)[group] + 0.01 * rng.normal(size=(60, 6)))
    cluster, medoids = checks.clusters(features)  # round(sqrt(60) / 2) = 4
    assert len(medoids) == 4
    assert [*cluster[medoids]] == [0, 1, 2, 3]
    for one in range(4):
        members = np.flatnonzero(cluster == one)
        assert len({*group[members].tolist()}) == 1
        centre = features[members].mean(0)
        assert features[medoids[one]] @ centre == pytest.approx((features[members] @ centre).max(), abs=1e-3)
