"""The verdict of an evaluation: one line that states whether the run learns."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Outcome = Literal["warming up", "learning", "levelled off", "flat", "falling", "collapsing"]
RECENT = 3
"""A run has levelled off after this number of evaluations in a row without a clear gain."""
TRENDS: tuple[Outcome, ...] = ("falling", "flat", "levelled off", "learning")
"""Trends of an accuracy, from the worst to the best."""
MOST_CHANCE = 10
"""Points of accuracy. If more can be chance, the verdict says that too few images are scored."""
ADVISED = ("flat", "falling", "collapsing")
"""Outcomes for which the verdict also names settings to try."""


MAIN = ("knn_top1", "val_top1", "view_retrieval")
"""Metrics that can be the main score of a run. An evaluation has one of them."""


class Score(NamedTuple):
    """Accuracy of k-NN, of the linear probe or of a classifier, or the view retrieval, at one evaluation."""

    step: int
    """Number of steps before the evaluation."""
    accuracy: float
    """Accuracy from 0 to 1."""

    @property
    def when(self) -> str:
        """Step of the evaluation as text: `before training` or `step N`."""
        return "before training" if self.step == 0 else f"step {self.step}"


@dataclass
class Scores:
    """Accuracies of all evaluations of a run so far, and the k-NN accuracy with raw pixels as features.

    The main accuracy is that of k-NN, that of the classifier if the method is supervised, or the view retrieval if the
    run has no labels.
    """

    memory: dict[str, Any] = field(default_factory=dict)
    """State in JSON types. It is updated in place, so that a checkpoint can store it."""

    @property
    def history(self) -> list[Score]:
        """Main accuracies, oldest first. The first entry is the accuracy before training."""
        return [Score(*score) for score in self.memory.get("history", [])]

    @property
    def linear(self) -> list[Score]:
        """Accuracies of the linear probe, oldest first."""
        return [Score(*score) for score in self.memory.get("linear", [])]

    @property
    def best(self) -> Score:
        """Evaluation with the highest main accuracy."""
        return max(self.history, key=lambda score: score.accuracy)

    @property
    def pixels(self) -> float | None:
        """k-NN accuracy with raw pixels as features, or None if it was not measured."""
        return self.memory.get("pixels")

    @property
    def newest(self) -> dict[str, float]:
        """Step of the newest evaluation, and its accuracies by metric. Empty before the first evaluation."""
        return self.memory.get("newest", {})

    def add(self, step: int, record: Mapping[str, float]) -> None:
        """Add the accuracies of an evaluation. `record` must have one metric of `MAIN`, and may have `linear_top1` and
        `knn_pixels`. If a resumed run has another main metric than before, its history begins again."""
        main = next(name for name in MAIN if name in record)
        if self.memory.setdefault("main", main) != main:
            self.memory.clear()
            self.memory["main"] = main
        shown = {name: x for name, x in record.items() if name in (*MAIN, "linear_top1")}
        self.memory["newest"] = {"step": step} | shown
        self.memory.setdefault("history", []).append([step, record[main]])
        if "linear_top1" in record:
            self.memory.setdefault("linear", []).append([step, record["linear_top1"]])
        if "knn_pixels" in record:
            self.memory["pixels"] = record["knn_pixels"]


def noise(accuracy: float, queries: int) -> float:
    """Return twice the standard error of the difference between two accuracies.

    Both accuracies are near `accuracy` and were measured on `queries` images each.
    """
    p = min(max(accuracy, 1 / (queries + 1)), 1 - 1 / (queries + 1))
    return 2 * math.sqrt(2 * p * (1 - p) / queries)


def outcome(
    history: Sequence[Score], queries: int, early_steps: int, signs: Mapping[str, str], linear: Sequence[Score] = ()
) -> Outcome:
    """Return the outcome of the newest evaluation.

    - warming up: the run is in its first `early_steps`.
    - collapsing: the method, or the rank of the features, shows a sign of collapse.
    - falling, flat, levelled off or learning: the `trend` of the main accuracy, or that of the linear probe if it is
      better.

    Args:
        history: main accuracies so far. The first entry is the accuracy before training.
        queries: number of images that are scored.
        early_steps: number of steps at the start of the run in which accuracies and signs of collapse do not count.
        signs: signs of collapse in the metrics of this step.
        linear: accuracies of the linear probe so far. They do not count if the newest evaluation has none.
    """
    now = history[-1].step
    if now <= early_steps:
        return "warming up"
    if signs:
        return "collapsing"
    found = [trend(scores, queries) for scores in (history, linear) if scores and scores[-1].step == now]
    return max(found, key=TRENDS.index)


def trend(history: Sequence[Score], queries: int) -> Outcome:
    """Return the trend of accuracies that were measured on `queries` images. The first one is that before training.

    An accuracy counts as higher or lower than another one only if the difference exceeds the measurement noise
    (`noise`).

    - falling: the newest accuracy is lower than an earlier one.
    - flat: it is not higher than the first one.
    - levelled off: it is higher than the first one, but there was no gain over the last `RECENT` evaluations.
    - learning: it is higher than the first one.
    """
    now = history[-1].accuracy
    margin = noise(now, queries)
    if now < max(score.accuracy for score in history) - margin:
        return "falling"
    if now <= history[0].accuracy + margin:
        return "flat"
    recent = [score.accuracy for score in history[-1 - RECENT :]]
    if len(history) > 1 + RECENT and max(recent) <= recent[0] + margin / 2:
        return "levelled off"
    return "learning"


def baselines(scores: Scores) -> str:
    """Format the baselines of a score: the accuracy before training, and that of the raw pixels if it was measured."""
    first = scores.history[0]
    text = f"{first.when} {100 * first.accuracy:.1f} %"
    return text if scores.pixels is None else f"{text}, raw pixels {100 * scores.pixels:.1f} %"


def linear(scores: Scores) -> str:
    """Format the newest and the first accuracy of the linear probe. The text starts with a comma.

    The text is empty if the newest evaluation had no linear probe.
    """
    found = scores.linear
    if not found or found[-1].step != scores.history[-1].step:
        return ""
    first, now = found[0], found[-1]
    text = f", linear probe {100 * now.accuracy:.1f} %"
    return text if first.step == now.step else f"{text} ({first.when} {100 * first.accuracy:.1f} %)"


def line(scores: Scores, name: str, queries: int, found: Outcome, advice: Sequence[str]) -> str:
    """Format the verdict as one line: the accuracy with its baselines, the outcome, and settings to try.

    Args:
        scores: accuracies so far.
        name: name of the main accuracy, such as `20-NN`.
        queries: number of images that are scored.
        found: result of `outcome`.
        advice: observations about the run, each with settings to try.
    """
    history = scores.history
    first, now = history[0], history[-1]
    text = f"step {now.step}: {name} {100 * now.accuracy:.1f} % ({baselines(scores)}){linear(scores)}: {found}"
    if scores.linear and found in TRENDS and found != trend(history, queries):
        text += " by the linear probe"
    if found == "flat":
        gain, chance = 100 * (now.accuracy - first.accuracy), 100 * noise(now.accuracy, queries)
        if chance > MOST_CHANCE:
            text += f", too few scored images ({queries})"
        text += f", {gain:+.1f} points since step {first.step}, of which {chance:.1f} can be chance"
    elif len(history) > 1:
        before = history[-2]
        text += f", {100 * (now.accuracy - before.accuracy):+.1f} points since step {before.step}"
    if found == "falling":
        best = scores.best
        text += f", best {100 * best.accuracy:.1f} % at step {best.step}"
    if found in ADVISED:
        text += ". " + " ".join(advice)
    return text


def accuracy_line(scores: Scores, record: dict[str, Any]) -> str:
    """Format the accuracies of one evaluation and the best accuracy so far as one line."""
    best, step = scores.best, scores.history[-1].step
    text = f"step {step}: top-1 {100 * record['val_top1']:.1f} %, top-5 {100 * record['val_top5']:.1f} %"
    return f"{text} (best top-1 {100 * best.accuracy:.1f} % at step {best.step})"
