"""Values that change over a run, as pure functions of the step."""

import math


def cosine(step: int, steps: int, start: float, end: float, warmup_steps: int = 0) -> float:
    """Linear from 0 to `start` over `warmup_steps` (end point included), then half a cosine towards `end`.

    As in DINO (2104.14294): the first value of a warm-up is 0, `start` comes twice, and `end` itself is never reached
    within `steps`; afterwards it holds.
    """
    if step < warmup_steps:
        return start * step / max(warmup_steps - 1, 1)
    done = min((step - warmup_steps) / max(steps - warmup_steps, 1), 1.0)
    return end + 0.5 * (start - end) * (1 + math.cos(math.pi * done))


def linear(step: int, steps: int, start: float, end: float) -> float:
    """Linear from `start` to `end` over `steps` values (end point included), then constant."""
    if steps <= 1:
        return end
    return start + (end - start) * min(step / (steps - 1), 1.0)
