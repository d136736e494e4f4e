"""Schedules: values that change over a run, as pure functions of the step."""

import math


def cosine(
    step: int, steps: int, start: float, end: float, warmup_steps: int = 0, *, reach_in_warmup: bool = True
) -> float:
    """Return a value that rises linearly from 0 to `start` in a warm-up, and then follows half a cosine from `start` to
    `end`.

    The first value of the warm-up is 0. The value reaches `end` at step `steps` and stays at `end` afterwards.

    Args:
        reach_in_warmup: True to reach `start` in the last step of the warm-up, so that this step and the next
            step have the value `start`, as in DINO (2104.14294). False to reach `start` in the step after the warm-up,
            as in MAE (2111.06377).
    """
    if step < warmup_steps:
        return start * step / (max(warmup_steps - 1, 1) if reach_in_warmup else warmup_steps)
    done = min((step - warmup_steps) / max(steps - warmup_steps, 1), 1.0)
    return end + 0.5 * (start - end) * (1 + math.cos(math.pi * done))


def linear(step: int, steps: int, start: float, end: float, *, reach_in_warmup: bool = True) -> float:
    """Return a value that changes linearly from `start` at step 0 to `end`, and then stays there.

    The value reaches `end` at step `steps - 1`, as in DINO (2104.14294), or at step `steps` if `reach_in_warmup` is
    false, as in DINOv3 (2508.10104). If `steps` is 1, the value at step 0 is `start`, as in
    `np.linspace(start, end, 1)`.
    """
    if steps <= 0:
        return end
    return start + (end - start) * min(step / max(steps - reach_in_warmup, 1), 1.0)
