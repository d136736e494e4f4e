"""Forecasts of the last score: curves of known form, measured curves, and curves that allow no forecast."""

import numpy as np
import pytest

from tessera.extras.report.extrapolation import final_score

STEPS = (0, 500, 1000, 2000, 3000, 4000, 5000)
MEASURED = {  # k-NN in percent, benchmarks/results/small_data.md
    "LeJEPA": (50.4, 65.9, 71.0, 77.7, 81.3, 82.9, 83.7),
    "LeJEPA, seed 1": (50.1, 65.1, 71.0, 77.2, 82.8, 84.0, 84.8),
    "LeJEPA, published crops": (50.4, 62.8, 66.0, 71.4, 74.0, 76.4, 77.3),
    "DINO": (50.4, 59.0, 61.1, 66.9, 69.9, 70.6, 70.7),
    "DINO, small data": (50.4, 63.6, 69.2, 76.1, 80.7, 83.2, 83.2),
}


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.5])
def test_the_form_of_the_curve_is_recovered(exponent: float) -> None:
    def score(step: float) -> float:
        return 0.9 - 0.6 * (1 + step / 100) ** -exponent

    rng = np.random.default_rng(0)
    misses = []
    for _ in range(50):
        curve = {step: score(step) + rng.normal(0, 0.006) for step in range(0, 700, 100)}
        found = final_score(curve, 1000)
        assert found is not None
        misses.append(abs(found[0] - score(1000)) / found[1])
    assert np.mean(np.array(misses) < 1) >= 0.9
    assert max(misses) < 2


def test_the_ends_of_measured_runs_are_in_the_interval() -> None:
    misses, inside = [], []
    for curve in MEASURED.values():
        for until in (4, 5, 6):
            found = final_score(dict(zip(STEPS[:until], np.array(curve[:until]) / 100, strict=True)), 5000)
            assert found is not None
            misses.append(abs(found[0] - curve[-1] / 100))
            inside.append(misses[-1] <= found[1])
    assert max(misses) < 0.035
    assert sum(inside) >= len(inside) - 1  # two standard errors


@pytest.mark.parametrize(
    ("curve", "steps"),
    [
        ({}, 100),
        ({0: 0.3, 50: 0.5}, 100),
        ({0: 0.3, 50: 0.5, 100: 0.6}, 100),
        ({0: 0.3, 50: 0.5, 100: 0.6}, 300),
        ({0: 0.3, 50: 0.9, 100: 0.2, 150: 0.7}, 200),
    ],
    ids=["no score", "two scores", "done", "before two fifths", "without order"],
)
def test_a_curve_that_allows_no_forecast_gives_none(curve: dict[int, float], steps: int) -> None:
    assert final_score(curve, steps) is None
