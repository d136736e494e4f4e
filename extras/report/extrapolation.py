"""Extrapolate the scores of an unfinished run to its last step.

The curve of a score is a - b * (1 + step / first step)^-c. The curve of a longer schedule is another one, because its
learning rates differ. Therefore, nothing is forecast beyond the last step of a run.
"""

from collections.abc import Mapping

import numpy as np

NOISE = 0.006
"""Standard error of an accuracy near 60 % that was measured on some 6,000 images."""
EXPONENTS = np.geomspace(0.25, 2, 30)
"""Values of c over which the forecast is averaged."""
EARLIEST = 0.4
"""Share of the steps before which nothing is forecast: there, the mean error was 2.8 points, and later 1.0."""
WIDEST = 0.1
"""Half width of the widest interval that is shown."""


def final_score(curve: Mapping[int, float], steps: int) -> tuple[float, float] | None:
    """Return the expected score at the last step, and the half width of its interval of two standard errors.

    For each exponent, a and b are the solution of least squares. The exponents are weighted by their likelihood.

    None is returned for a run that is done, before `EARLIEST` of the steps, for fewer than three scores, and if the
    interval is wider than `WIDEST`.

    Args:
        curve: scores (0 to 1) by step.
        steps: number of steps of the complete run.
    """
    x, y = np.array(sorted(curve)), np.array([curve[step] for step in sorted(curve)])
    if len(x) < 3 or not EARLIEST * steps <= x[-1] < steps:
        return None
    last = 1 + steps / x[1]
    found = []
    for exponent in EXPONENTS:
        basis = np.stack([np.ones(len(x)), (1 + x / x[1]) ** -exponent], 1)  # (scores, 2)
        end = np.array([1, last**-exponent])
        inverse = np.linalg.inv(basis.T @ basis)
        solution = inverse @ basis.T @ y
        found.append((end @ solution, ((y - basis @ solution) ** 2).sum(), 1 + end @ inverse @ end))
    ends, squares, factors = np.array(found).T
    weights = np.exp((squares.min() - squares) / (2 * NOISE**2))
    weights /= weights.sum()
    mean = weights @ ends
    variance = max(NOISE**2, squares.min() / max(len(x) - 3, 1))  # of a score
    width = 2 * np.sqrt(weights @ (variance * factors + (ends - mean) ** 2))
    return (float(mean), float(width)) if width <= WIDEST and 0 <= mean <= 1 else None
