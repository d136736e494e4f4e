"""Decide which differences between methods are not chance.

An arm has one or several trainings (seeds) and outcomes of the same images. The variance of the difference of two arms
is a sum of two terms:

    seeds:   max(s^2 / k_a + s^2 / k_b, s_a^2 / k_a + s_b^2 / k_b)
    images:  var_i(d_i) / n

s_a^2 is the variance of the accuracy over the k_a seeds of an arm, and s^2 that of all trained arms, pooled with sum(k
- 1) degrees of freedom, because a few seeds estimate that of one arm poorly. d_i is the difference of the mean outcomes
of image i; its variance also holds some of the randomness of training, so the sum is rather too large than too small.
The difference is compared with Cochran's critical value: the mean of Student's t of both terms, weighted by the terms.
Holm's procedure corrects the p values of all pairs, so that the probability of one or more wrong differences is at most
`LEVEL`. Simulated 300 times: if one of four methods differs ten times more between its seeds than the others, it is 6 %
with three seeds and 10 % with two.

Shape letters: k seeds, n images.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import stdtrit

LEVEL = 0.05
"""Largest probability that equal arms are called different."""


class Arm(NamedTuple):
    """Outcomes of a method, or of an encoder that is not trained here."""

    outcomes: np.ndarray
    """1 for an image that is classified correctly, else 0: (k, n) float64."""
    random: bool = True
    """False if nothing is random, as for raw pixels and published weights, so that one row is enough."""
    trained: bool = True
    """False for an encoder before training, whose variance over the seeds says nothing of that of trainings."""

    @property
    def mean(self) -> float:
        return float(self.outcomes.mean())

    @property
    def seeds(self) -> int:
        return len(self.outcomes)

    @property
    def of_seeds(self) -> float:
        """Variance of the mean over the seeds; NaN if it is random and there is one seed."""
        if not self.random:
            return 0.0
        return float(self.outcomes.mean(1).var(ddof=1)) / self.seeds if self.seeds > 1 else math.nan

    @property
    def of_images(self) -> float:
        """Variance of the mean over the images."""
        return _of_images(self.outcomes.mean(0))


class Comparison(NamedTuple):
    """The difference of two arms."""

    first: str
    second: str
    difference: float
    """Mean of the first arm minus that of the second one."""
    error: float
    """Twice the standard error of the difference."""
    p: float
    """Probability of such a difference between equal arms, corrected for the number of comparisons. NaN if an arm has
    one seed, so that the randomness of training is unknown."""

    @property
    def different(self) -> bool:
        """True if the difference is not chance."""
        return self.p < LEVEL


def _of_images(values: np.ndarray) -> float:
    """Return the variance of the mean of (n,) values."""
    return float(values.var(ddof=1)) / len(values)


def compare_arms(arms: Mapping[str, Arm], stopped: int = 0) -> list[Comparison]:
    """Return the comparisons of all pairs, in the order of the arms. All arms have the same images.

    Args:
        arms: outcomes of each arm.
        stopped: number of arms that were stopped because others had higher scores. Their comparisons count as made.
    """
    found = differences(arms, list(itertools.combinations(arms, 2)))
    made = math.comb(len(arms) + stopped, 2)
    corrected = holm([one.p for one in found] + [math.nan] * (made - len(found)))
    return [one._replace(p=p) for one, p in zip(found, corrected, strict=False)]


def differences(arms: Mapping[str, Arm], pairs: Sequence[tuple[str, str]]) -> list[Comparison]:
    """Return the comparisons of pairs of arms, with p values that are not corrected."""
    trained = [arm for arm in arms.values() if arm.random and arm.trained and arm.seeds > 1]
    freedom = sum(arm.seeds - 1 for arm in trained)
    squares = sum(arm.outcomes.mean(1).var(ddof=1) * (arm.seeds - 1) for arm in trained)
    pooled = squares / freedom if freedom else math.nan
    return [_compare(*pair, arms, pooled, freedom) for pair in pairs]


def _compare(first: str, second: str, arms: Mapping[str, Arm], pooled: float, freedom: int) -> Comparison:
    """Compare two arms. `pooled` is the variance of one training, with `freedom` degrees of freedom."""
    a, b = arms[first], arms[second]
    difference, images = a.mean - b.mean, _of_images(a.outcomes.mean(0) - b.outcomes.mean(0))
    own = a.of_seeds + b.of_seeds
    if math.isnan(own):
        return Comparison(first, second, difference, 2 * math.sqrt(images), math.nan)
    seeds = max(own, sum(pooled / arm.seeds for arm in (a, b) if arm.random))
    parts = {freedom: seeds, a.outcomes.shape[1] - 1: images}
    error = math.sqrt(seeds + images)
    if error == 0:
        return Comparison(first, second, difference, 0.0, 1.0 if difference == 0 else 0.0)
    return Comparison(first, second, difference, 2 * error, _cochran(abs(difference) / error, parts))


def _cochran(ratio: float, parts: Mapping[int, float]) -> float:
    """Return the p value of a difference that is `ratio` standard errors large.

    Args:
        ratio: difference divided by the root of the sum of the variances.
        parts: variances by their degrees of freedom.
    """
    whole = sum(parts.values())

    def excess(p: float) -> float:
        return sum(-part / whole * stdtrit(freedom, p / 2) for freedom, part in parts.items() if part) - ratio

    smallest = 1e-12
    return smallest if excess(smallest) < 0 else float(brentq(excess, smallest, 1.0, xtol=1e-14))


def holm(values: Sequence[float]) -> list[float]:
    """Return p values corrected by Holm's procedure. NaN counts as a comparison, and stays NaN."""
    corrected, largest = [math.nan] * len(values), 0.0
    order = sorted((i for i, p in enumerate(values) if not math.isnan(p)), key=lambda i: values[i])
    for place, i in enumerate(order):
        largest = max(largest, min((len(values) - place) * values[i], 1.0))
        corrected[i] = largest
    return corrected


def best(arms: Mapping[str, Arm], comparisons: Sequence[Comparison]) -> tuple[str, list[str]]:
    """Return the arm with the highest mean, and the arms that were not found to be different from it."""
    top = max(arms, key=lambda name: arms[name].mean)
    pairs = [one for one in comparisons if top in (one.first, one.second) and not one.different]
    return top, [one.second if one.first == top else one.first for one in pairs]
