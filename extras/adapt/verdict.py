"""Decide whether a continued encoder is to be used, from the images that it and the given encoder get right.

Gains are differences from the given encoder, with the errors of `compare.decision`: paired over the images, with the
variance over the seeds pooled over the methods. Holm's procedure corrects their p values for the number of methods
times scores, so that of adaptations without effect at most `LEVEL` end in "use".

Shape letters: k seeds, n images.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tessera.extras.compare.decision import LEVEL, Arm, differences, holm

GIVEN = "given encoder"
ONE_SEED = "one seed shows nothing of the randomness of training. Give --seeds 3. The trainings that are there stay."
Outcomes = Mapping[str, np.ndarray]
"""By the name of the score: 1 for an image that is classified correctly, else 0. (k, n) for a method, (1, n) for the
given encoder."""


class Gain(NamedTuple):
    """Difference of the accuracies (0 to 1) of a method and of the given encoder."""

    method: str
    score: str
    before: float
    """Accuracy of the given encoder."""
    gain: float
    """Mean accuracy over the seeds, minus `before`."""
    error: float
    """Twice the standard error of `gain`, over seeds and images."""
    p: float
    """Probability of such a gain or loss without an effect, corrected for the number of methods and scores. NaN with
    one seed."""

    @property
    def is_gain(self) -> bool:
        """True if it is a gain that is not chance."""
        return self.gain > 0 and self.p < LEVEL

    @property
    def is_loss(self) -> bool:
        """True if the loss exceeds its error. It is not corrected, because it protects the given encoder."""
        return self.gain < -self.error

    @property
    def text(self) -> str:
        """Size of the gain or loss in percentage points, with its error."""
        return f"{100 * abs(self.gain):.1f} ± {100 * self.error:.1f} points of {self.score}"

    def entries(self) -> dict[str, Any]:
        """Return the fields for a JSON file, which has no NaN."""
        return self._asdict() | {"p": None if math.isnan(self.p) else self.p}


class Verdict(NamedTuple):
    """Advice for one method, or for all of them."""

    use: str | None
    """Method whose encoder is to be used; None to keep the given one."""
    text: str


def gains(given: Outcomes, methods: Mapping[str, Outcomes], tried: int) -> list[Gain]:
    """Return the gains of all methods, score by score.

    Args:
        given: outcomes of the given encoder.
        methods: outcomes of the methods.
        tried: number of methods that were tried, also of those that were stopped because others had higher scores.
    """
    found, before = [], []
    for score, rows in given.items():
        arms = {GIVEN: Arm(rows, random=False)} | {name: Arm(own[score]) for name, own in methods.items()}
        found += differences(arms, [(name, GIVEN) for name in methods])
        before += [(score, arms[GIVEN].mean)] * len(methods)
    values = holm([one.p for one in found] + [math.nan] * len(given) * (tried - len(methods)))
    return [
        Gain(one.first, score, mean, one.difference, one.error, p)
        for one, (score, mean), p in zip(found, before, values, strict=False)
    ]


def verdict(own: Sequence[Gain], forgotten: Sequence[Gain] = (), other: str = "other images") -> Verdict:
    """Return the advice.

    A method is to be used if a score gains more than chance, no score loses more than its error, and no score that
    gains loses as much on other images. Of several such methods, the one that gains most in the last score is advised.

    Args:
        own: gains on the user's images, of one or of several methods.
        forgotten: gains on other images.
        other: name of the other images.
    """
    found = {method: _verdict(method, own, forgotten, other) for method in dict.fromkeys(one.method for one in own)}
    most = sorted(own, key=lambda one: -one.gain)
    last = [one.method for one in most if one.score == own[-1].score]
    used = [found[method] for method in last if found[method].use]
    # Without a method to use, the reason is that of the largest gain.
    return used[0] if used else found[most[0].method]


def _verdict(method: str, own: Sequence[Gain], forgotten: Sequence[Gain], other: str) -> Verdict:
    """Return the advice for one method."""
    gains = [one for one in own if one.method == method]
    lost = {one.score: one for one in forgotten if one.method == method}
    if math.isnan(gains[0].p):
        return Verdict(None, f"Keep the given encoder: {ONE_SEED}")
    gained, losses = [one for one in gains if one.is_gain], [one for one in gains if one.is_loss]
    text = f"it gains {' and '.join(one.text for one in gained)}"
    if losses:
        but = f"{text}, but loses" if gained else "it loses"
        return Verdict(None, f"Keep the given encoder: {method}: {but} {losses[0].text}.")
    if not gained:
        most = max(gains, key=lambda one: one.gain)
        sign = "gain" if most.gain >= 0 else "loss"
        return Verdict(None, f"Keep the given encoder: {method}: a {sign} of {most.text} can be chance.")
    for one in gained:
        if one.score in lost and -lost[one.score].gain >= one.gain:
            text += f", but loses {lost[one.score].text} on {other}"
            return Verdict(None, f"Keep the given encoder: {method}: {text}.")
    rest = [one for one in gains if not one.is_gain]
    chance = "".join(f" A {'gain' if one.gain >= 0 else 'loss'} of {one.text} can be chance." for one in rest)
    return Verdict(method, f"Use the new encoder of {method}: {text}.{chance}")
