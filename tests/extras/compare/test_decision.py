"""Differences between methods: the formulas, and the error rates of the decision on simulated accuracies."""

import math

import numpy as np
import pytest
from scipy.stats import t, ttest_ind, ttest_rel

from tessera.extras.compare.decision import Arm, best, compare_arms, differences, holm

CASES = 200


def simulated(
    rng: np.random.Generator, methods: int, seeds: int, images: int, spread: tuple[float, float], lead: float = 0.0
) -> dict[str, Arm]:
    """Return arms whose accuracies are near 70 %, as on five classes of photographs.

    The logit of an image is that of its difficulty, of what a method is good at, and of what a training hits by chance.
    A training also has a shift of its own, whose standard deviation is between the limits of `spread`, in logits: 0.05
    is one percentage point.

    Args:
        lead: logits that the first method has above the others.
    """
    difficulty = rng.normal(0.9, 2.0, images)
    arms = {}
    for method in range(methods):
        own = difficulty + rng.normal(0, 0.7, images) + (lead if method == 0 else 0)
        shifts = rng.normal(0, rng.uniform(*spread), seeds)
        logits = own + shifts[:, None] + rng.normal(0, 0.7, (seeds, images))
        arms[f"m{method}"] = Arm((logits > 0).astype(float))
    return arms


@pytest.mark.parametrize(
    ("methods", "seeds", "images", "spread"),
    [
        (4, 3, 1941, (0.02, 0.05)),  # photographs of five classes; seeds differ by up to one point
        (4, 2, 1941, (0.02, 0.05)),
        (2, 2, 1941, (0.05, 0.05)),
        (4, 3, 5000, (0.05, 0.15)),  # the randomness of training is larger than that of the images
        (4, 2, 5000, (0.05, 0.15)),
        (2, 2, 5000, (0.1, 0.1)),
        (6, 5, 300, (0.02, 0.05)),
    ],
)
def test_equal_arms_have_a_winner_in_at_most_five_percent_of_the_cases(
    methods: int, seeds: int, images: int, spread: tuple[float, float]
) -> None:
    rng, differences, winners = np.random.default_rng(0), 0, 0
    for _ in range(CASES):
        arms = simulated(rng, methods, seeds, images, spread)
        comparisons = compare_arms(arms)
        differences += any(one.different for one in comparisons)
        winners += not best(arms, comparisons)[1]
    assert winners <= differences
    assert differences <= 0.05 * CASES


def test_a_lead_of_five_points_is_found() -> None:
    rng, found = np.random.default_rng(0), 0
    for _ in range(50):
        arms = simulated(rng, 4, 3, 1941, (0.02, 0.05), lead=0.4)
        assert 0.04 < arms["m0"].mean - np.mean([arms[f"m{i}"].mean for i in (1, 2, 3)]) < 0.09
        found += best(arms, compare_arms(arms)) == ("m0", [])
    assert found >= 45


def variances(arms: list[np.ndarray]) -> tuple[float, float]:
    """Return the variances of the difference of the first two arms over seeds and over images, in plain loops."""
    own, pooled, freedom = [], 0.0, 0
    for arm in arms:
        means = [sum(row) / len(row) for row in arm]
        middle = sum(means) / len(means)
        squares = sum((x - middle) ** 2 for x in means)
        own.append(squares / (len(means) - 1) / len(means))
        pooled, freedom = pooled + squares, freedom + len(means) - 1
    seeds = max(own[0] + own[1], pooled / freedom / len(arms[0]) + pooled / freedom / len(arms[1]))
    a, b = arms[:2]
    paired = [sum(a[:, i]) / len(a) - sum(b[:, i]) / len(b) for i in range(a.shape[1])]
    middle = sum(paired) / len(paired)
    return seeds, sum((x - middle) ** 2 for x in paired) / (len(paired) - 1) / len(paired)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_error_is_the_sum_of_the_variances_of_seeds_and_images(seed: int) -> None:
    arms = simulated(np.random.default_rng(seed), 3, 3, 100, (0.1, 0.5))
    one = compare_arms(arms)[0]
    seeds, images = variances([arm.outcomes for arm in arms.values()])
    error = math.sqrt(seeds + images)
    assert one.error == pytest.approx(2 * error)
    assert one.difference == pytest.approx(arms["m0"].outcomes.mean() - arms["m1"].outcomes.mean())
    (alone,) = compare_arms({name: arms[name] for name in ("m0", "m1")})  # without a correction
    seeds, images = variances([arms[name].outcomes for name in ("m0", "m1")])
    critical = (seeds * t.isf(alone.p / 2, 4) + images * t.isf(alone.p / 2, 99)) / (seeds + images)
    assert critical == pytest.approx(abs(alone.difference) / math.sqrt(seeds + images), rel=1e-6)


def test_limits_are_the_tests_of_scipy() -> None:
    rng = np.random.default_rng(2)
    a, b = (rng.random((1, 200)) < 0.7).astype(float), (rng.random((1, 200)) < 0.7).astype(float)
    (fixed,) = compare_arms({"a": Arm(a, random=False), "b": Arm(b, random=False)})
    assert fixed.p == pytest.approx(ttest_rel(a[0], b[0]).pvalue)  # nothing is random but the images
    accuracies = rng.normal(0.7, 0.02, (2, 4))
    same = {name: Arm(np.repeat(row[:, None], 50, 1)) for name, row in zip("ab", accuracies, strict=True)}
    (trained,) = compare_arms(same)  # all images are equal, so only the seeds are random
    assert trained.p == pytest.approx(ttest_ind(*accuracies).pvalue)


def test_arms_that_were_stopped_count_as_compared() -> None:
    """Two arms of three that were tried: one of three comparisons, so Holm's factor is 3."""
    arms = simulated(np.random.default_rng(0), 2, 3, 1000, (0.02, 0.1), 0.2)
    (alone,), (of_three,) = compare_arms(arms), compare_arms(arms, stopped=1)
    assert of_three == alone._replace(p=pytest.approx(min(3 * alone.p, 1)))
    assert alone.p < 1 / 3


def test_encoders_beside_the_methods_do_not_change_their_differences() -> None:
    """The encoder before training varies less over the seeds, and its variance is not pooled with that of trainings."""
    rng = np.random.default_rng(0)
    arms, pairs = simulated(rng, 2, 2, 1000, (0.1, 0.1)), [("m0", "m1")]
    before = Arm(np.repeat(np.eye(1, 1000), 2, 0), trained=False)
    pixels = Arm(np.eye(1, 1000), random=False)
    beside = arms | {"before training": before, "raw pixels": pixels}
    assert differences(beside, pairs) == differences(arms, pairs)
    pooled = differences(arms | {"before training": before._replace(trained=True)}, pairs)
    assert pooled[0].p < differences(arms, pairs)[0].p


def test_one_seed_decides_nothing() -> None:
    arms = {"a": Arm(np.ones((1, 100))), "b": Arm(np.zeros((1, 100))), "pixels": Arm(np.eye(1, 100), random=False)}
    comparisons = compare_arms(arms)
    assert all(math.isnan(one.p) and not one.different for one in comparisons)
    assert best(arms, comparisons) == ("a", ["b", "pixels"])


@pytest.mark.parametrize(
    ("values", "corrected"),
    [
        ([0.01, 0.04, 0.03], [0.03, 0.06, 0.06]),
        ([0.5, 0.001], [0.5, 0.002]),
        ([0.9, 0.8, 0.7], [1.0, 1.0, 1.0]),
        ([math.nan, 0.02], [math.nan, 0.04]),
    ],
)
def test_holm(values: list[float], corrected: list[float]) -> None:
    assert holm(values) == pytest.approx(corrected, nan_ok=True)
