"""The verdict of `adapt`: its formulas, its error rates on simulated outcomes, and its sentences."""

import math

import numpy as np
import pytest
from scipy.stats import ttest_rel

from tessera.extras.adapt.verdict import Gain, Outcomes, gains, verdict

CASES = 200
SCORES = ("20-NN", "linear probe")


def simulated(
    rng: np.random.Generator,
    methods: int,
    seeds: int,
    images: int,
    *,
    spread: float = 0.05,
    changed: float = 0.7,
    lead: float = 0.0,
) -> tuple[Outcomes, dict[str, Outcomes]]:
    """Return outcomes of a given encoder and of encoders that continue it, whose accuracies are near 65 %.

    The logit of an image is that of its difficulty, of what the given encoder sees in it, and of what a training
    changes. 0.05 in logits is one percentage point.

    Args:
        rng: source of random numbers.
        methods: number of methods.
        seeds: number of seeds of each method.
        images: number of images.
        spread: standard deviation of the shift of all images of a training.
        changed: standard deviation of the change of a single image, half of which all trainings of a method share.
        lead: gain of the first method.
    """
    difficulty, tables = rng.normal(0.9, 2.0, images), dict[str, dict[str, np.ndarray]]()
    shifts = rng.normal(0, spread, (methods, seeds))
    given = {}
    for score in SCORES:
        # The given encoder has a change of its own, so that images near the decision move both ways.
        own = difficulty + rng.normal(0, 0.5, images)
        given[score] = (own + rng.normal(0, changed, images) > 0).astype(float)[None]
        for method in range(methods):
            shared = own + rng.normal(0, changed / math.sqrt(2), images) + (lead if method == 0 else 0)
            logits = shared + shifts[method][:, None] + rng.normal(0, changed / math.sqrt(2), (seeds, images))
            tables.setdefault(f"m{method}", {})[score] = (logits > 0).astype(float)
    return given, dict(tables)


@pytest.mark.parametrize(
    ("methods", "seeds", "images", "spread", "changed"),
    [
        (1, 3, 1000, 0.05, 0.7),  # seeds differ by one point
        (3, 2, 1000, 0.05, 0.7),
        (1, 3, 2000, 0.2, 0.5),  # the randomness of training is larger than that of the images
        (2, 2, 2000, 0.2, 0.5),
        (1, 3, 500, 0.0, 0.01),  # hardly an image changes
    ],
)
def test_at_most_five_percent_of_adaptations_without_effect_are_used(
    methods: int, seeds: int, images: int, spread: float, changed: float
) -> None:
    rng = np.random.default_rng(0)
    used = 0
    for _ in range(CASES):
        given, continued = simulated(rng, methods, seeds, images, spread=spread, changed=changed)
        used += verdict(gains(given, continued, methods)).use is not None
    assert used <= 0.05 * CASES


@pytest.mark.parametrize("methods", [1, 4])
def test_a_gain_of_five_points_is_used(methods: int) -> None:
    rng, used = np.random.default_rng(1), list[str | None]()
    for _ in range(20):
        given, continued = simulated(rng, methods, 3, 1941, spread=0.03, lead=0.35)
        used.append(verdict(gains(given, continued, methods)).use)
    assert used.count("m0") >= 18


def test_without_randomness_of_training_the_error_is_that_of_a_paired_t_test() -> None:
    rng = np.random.default_rng(2)
    given, continued = simulated(rng, 1, 1, 500)
    same = {"m0": {score: np.repeat(rows, 3, 0) for score, rows in continued["m0"].items()}}
    expected = [ttest_rel(same["m0"][score][0], given[score][0]) for score in SCORES]
    found = gains(given, same, 1)
    assert [one.score for one in found] == list(SCORES)
    for one, other in zip(found, expected, strict=True):
        assert 2 * one.gain / one.error == pytest.approx(other.statistic)
        assert one.before == given[one.score].mean()
    smaller, larger = sorted(other.pvalue for other in expected)
    corrected = sorted(one.p for one in found)
    assert corrected == pytest.approx([min(2 * smaller, 1), max(min(2 * smaller, 1), larger)])


def test_a_method_that_was_stopped_counts_as_tried() -> None:
    given, continued = simulated(np.random.default_rng(3), 1, 3, 500, lead=0.3)
    alone, one_of_two = (min(one.p for one in gains(given, continued, tried)) for tried in (1, 2))
    assert one_of_two == pytest.approx(2 * alone)


def gain(points: float, score: str = "20-NN", *, p: float | None = None, method: str = "dino") -> Gain:
    """Return a gain in points with an error of 2.0 points."""
    chance = (0.001 if abs(points) > 2 else 0.3) if p is None else p
    return Gain(method, score, 0.5, points / 100, 0.02, chance)


@pytest.mark.parametrize(
    ("knn", "probe", "lost", "use", "reason"),
    [
        (5.0, 4.0, None, True, "dino: it gains 5.0 ± 2.0 points of 20-NN and 4.0 ± 2.0 points of linear probe."),
        (5.0, 4.0, 3.0, True, "Use the new encoder"),
        (5.0, 4.0, -9.0, True, "Use the new encoder"),
        (5.0, 4.0, 4.5, False, "but loses 4.5 ± 2.0 points of linear probe on old."),
        (1.5, 4.0, None, True, "A gain of 1.5 ± 2.0 points of 20-NN can be chance."),
        (5.0, -1.0, None, True, "A loss of 1.0 ± 2.0 points of linear probe can be chance."),
        (5.0, -3.0, 0.0, False, "it gains 5.0 ± 2.0 points of 20-NN, but loses 3.0 ± 2.0 points of linear probe."),
        (1.0, -3.0, 0.0, False, "dino: it loses 3.0 ± 2.0 points of linear probe."),
        (1.0, 1.5, None, False, "a gain of 1.5 ± 2.0 points of linear probe can be chance."),
    ],
)
def test_the_advice_follows_the_figures(knn: float, probe: float, lost: float | None, use: bool, reason: str) -> None:
    own = [gain(knn), gain(probe, "linear probe")]
    other = [] if lost is None else [gain(0.0), gain(-lost, "linear probe")]
    found = verdict(own, other, "old")
    assert found.use == ("dino" if use else None)
    assert reason in found.text
    assert found.text.startswith("Use the new encoder of " if use else "Keep the given encoder: ")


def test_of_several_methods_that_gain_the_one_with_the_larger_last_score_is_advised() -> None:
    more, less, none = (
        [gain(a, method=name), gain(b, "linear probe", method=name)]
        for name, a, b in (("a", 3.0, 6.0), ("b", 9.0, 5.0), ("c", 0.0, 0.0))
    )
    assert verdict([*none, *less, *more]).use == "a"
    assert verdict([*none, *less]).use == "b"
    assert "c: a gain of 0.0" in verdict(none).text


def test_one_seed_decides_nothing() -> None:
    given, continued = simulated(np.random.default_rng(4), 1, 1, 300, lead=3.0)
    found = gains(given, continued, 1)
    assert all(math.isnan(one.p) and one.entries()["p"] is None for one in found)
    advice = verdict(found)
    assert advice.use is None
    assert "Give --seeds 3" in advice.text
