"""The verdict of an evaluation: its outcomes, its words, and its memory."""

import json
import math

import pytest

from tessera.pretrain.monitoring.verdict import Score, Scores, baselines, line, noise, outcome

QUERIES = 1800  # two standard errors of a difference near 50 % are 3.3 points


def history(*accuracies: float) -> list[Score]:
    return [Score(100 * i, accuracy) for i, accuracy in enumerate(accuracies)]


def test_noise_is_two_standard_errors_of_a_difference() -> None:
    assert noise(0.5, QUERIES) == pytest.approx(2 * math.sqrt(0.25 / QUERIES + 0.25 / QUERIES))
    assert noise(1.0, QUERIES) > 0


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ((0.50, 0.52), "flat"),
        ((0.50, 0.48), "flat"),
        ((0.50, 0.45), "falling"),
        ((0.50, 0.54), "learning"),
        ((0.50, 0.60, 0.56), "falling"),
        ((0.50, 0.60, 0.59), "learning"),
        ((0.50, 0.60, 0.605, 0.60), "learning"),
        ((0.50, 0.60, 0.605, 0.60, 0.61), "levelled off"),
        ((0.50, 0.60, 0.605, 0.60, 0.63), "learning"),
    ],
)
def test_outcome_follows_from_differences_larger_than_noise(accuracies: tuple[float, ...], expected: str) -> None:
    assert outcome(history(*accuracies), QUERIES, 50, {}) == expected


def test_warm_up_and_signs_of_collapse_come_first() -> None:
    assert outcome(history(0.5, 0.3), QUERIES, 100, {}) == "warming up"
    assert outcome(history(0.5, 0.51), QUERIES, 50, {}, history(0.5, 0.6)) == "learning", "by the linear probe"
    assert outcome(history(0.5, 0.51), QUERIES, 50, {}, history(0.5, 0.51)) == "flat"
    assert outcome(history(0.5, 0.6), QUERIES, 50, {"rank": "the rank fell"}) == "collapsing"
    assert outcome(history(0.5, 0.6), QUERIES, 100, {"rank": "the rank fell"}) == "warming up"


@pytest.mark.parametrize(
    ("accuracies", "probe", "expected"),
    [
        ((0.50, 0.45), (0.50, 0.60), "learning"),
        ((0.50, 0.60), (0.50, 0.45), "learning"),
        ((0.50, 0.45), (0.60, 0.55), "falling"),
        ((0.50, 0.60, 0.605, 0.60, 0.61), (0.50, 0.60, 0.62, 0.64, 0.66), "learning"),
        ((0.50, 0.60, 0.605, 0.60, 0.61), (0.50, 0.60, 0.605, 0.60, 0.61), "levelled off"),
    ],
)
def test_outcome_is_the_better_trend_of_k_nn_and_probe(
    accuracies: tuple[float, ...], probe: tuple[float, ...], expected: str
) -> None:
    assert outcome(history(*accuracies), QUERIES, 50, {}, history(*probe)) == expected
    older = history(*probe, 0.9)[:-1]
    assert outcome(history(*accuracies, 0.10), QUERIES, 50, {}, older) == "falling", "the newest step has no probe"


def test_line_shows_the_baselines_the_change_and_the_advice() -> None:
    scores = Scores()
    scores.add(0, {"knn_top1": 0.504, "knn_pixels": 0.564})
    assert baselines(scores) == "before training 50.4 %, raw pixels 56.4 %"
    scores.add(100, {"knn_top1": 0.58})
    scores.add(200, {"knn_top1": 0.512})
    assert line(scores, "20-NN", 360, "learning", ["Try this."]) == (
        "step 200: 20-NN 51.2 % (before training 50.4 %, raw pixels 56.4 %): learning, -6.8 points since step 100"
    )
    assert line(scores, "20-NN", 360, "flat", []).endswith(
        "flat, +0.8 points since step 0, of which 7.5 can be chance. "
    )
    assert line(scores, "20-NN", 60, "flat", ["Try this."]).endswith(
        "flat, too few scored images (60), +0.8 points since step 0, of which 18.3 can be chance. Try this."
    )
    assert line(scores, "20-NN", 360, "falling", ["Seen that.", "Try this."]).endswith(
        "falling, -6.8 points since step 100, best 58.0 % at step 100. Seen that. Try this."
    )


def test_another_main_score_begins_a_new_history() -> None:
    scores = Scores()
    scores.add(0, {"view_retrieval": 0.05})
    scores.add(100, {"view_retrieval": 0.2, "loss": 1.0})
    assert scores.newest == {"step": 100, "view_retrieval": 0.2}
    resumed = Scores(json.loads(json.dumps(scores.memory)))
    resumed.add(200, {"knn_top1": 0.6, "linear_top1": 0.7})
    assert resumed.history == [Score(200, 0.6)]
    assert baselines(resumed) == "step 200 60.0 %"
