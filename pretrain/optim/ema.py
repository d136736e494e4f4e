"""Exponential moving average (EMA): the update of a teacher's weights from the student's weights."""

from collections.abc import Iterable

import torch
from torch import Tensor

from tessera.runtime.collectives import local


@torch.no_grad()
def update(teacher: Iterable[Tensor], student: Iterable[Tensor], momentum: float) -> None:
    """Update all weights of the teacher in place: `teacher <- momentum * teacher + (1 - momentum) * student`.

    If the engine shards teacher and student in the same way, each process updates its own shard.

    The update is computed as `t + (1 - m)(s - t)`. Its float32 rounding error then scales with the distance between
    teacher and student, not with the size of the weights. A teacher that equals its student stays exactly equal to it.

    Raises:
        TypeError: the teacher has lower precision than float32. In bfloat16 with momentum 0.996, most updates would be
            rounded to zero.
    """
    teacher, student = [local(t) for t in teacher], [local(s) for s in student]
    low = {t.dtype for t in teacher if torch.finfo(t.dtype).bits < 32}
    if low:
        raise TypeError(
            f"The teacher's weights are {', '.join(map(str, low))}. Keep them in float32, or most updates round to 0."
        )
    torch._foreach_lerp_(  # pyright: ignore[reportPrivateImportUsage]
        teacher, [s.to(t.dtype) for s, t in zip(student, teacher, strict=True)], 1.0 - momentum
    )
