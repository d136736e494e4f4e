"""The teacher's exponential moving average of the student."""

from collections.abc import Iterable

import torch
from torch import Tensor

from runtime.collectives import local


@torch.no_grad()
def update(teacher: Iterable[Tensor], student: Iterable[Tensor], momentum: float) -> None:
    """`teacher <- momentum * teacher + (1 - momentum) * student`, in place, for all parameters at once.

    Where an engine shards the two alike, each process moves its own part.

    Written as a step towards the student, `t + (1 - m)(s - t)`: the rounding error of float32 then scales with the
    distance between the two and not with the weights, and a teacher that equals its student stays exactly equal.

    Raises:
        TypeError: a teacher in less than float32, whose average would stand still: at momentum 0.996 a step in bfloat16
            is rounded away for most weights.
    """
    teacher, student = [local(t) for t in teacher], [local(s) for s in student]
    low = {t.dtype for t in teacher if torch.finfo(t.dtype).bits < 32}
    if low:
        raise TypeError(
            f"the teacher's weights are {', '.join(map(str, low))}; an average needs float32 to move at all"
        )
    torch._foreach_lerp_(  # pyright: ignore[reportPrivateImportUsage]
        teacher, [s.to(t.dtype) for s, t in zip(student, teacher, strict=True)], 1.0 - momentum
    )
