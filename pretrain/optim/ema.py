"""Exponential moving average (EMA): the update of a teacher's weights from the student's weights."""

import torch
from torch import Tensor, nn

from tessera.pretrain.optim.running_statistics import running_statistics
from tessera.pretrain.optim.small_tensors import move_each
from tessera.runtime.collectives import local


@torch.no_grad()
def update(teacher: nn.Module, student: nn.Module, momentum: float, updated: float | Tensor = 1.0) -> None:
    """Move a teacher in place: `teacher <- momentum * teacher + (1 - momentum) * student`.

    The update applies to parameters and running statistics (`running_statistics`). Integer running statistics, which
    are counts, are copied. All other buffers are constants and do not change. If the engine shards teacher and student
    in the same way, each process updates its own shard.

    The update is computed as `t + (1 - m)(s - t)`. The float32 rounding error of this form scales with the distance
    between teacher and student, not with the size of the weights. A teacher that equals its student stays exactly equal
    to it.

    If `updated` is 0, nothing changes. It is the argument of `Method.after_step`.

    Raises:
        TypeError: the teacher has lower precision than float32. In bfloat16 with momentum 0.996, most updates would be
            rounded to zero.
    """
    theirs, own = ([*module.parameters(), *running_statistics(module)] for module in (teacher, student))
    pairs = [(local(t), local(s)) for t, s in zip(theirs, own, strict=True)]
    moving = [(t, s) for t, s in pairs if t.is_floating_point()]
    low = {t.dtype for t, _ in moving if torch.finfo(t.dtype).bits < 32}
    if low:
        raise TypeError(
            f"The teacher's weights are {', '.join(map(str, low))}. Keep them in float32, or most updates round to 0."
        )
    weight = torch.as_tensor((1.0 - momentum) * updated)
    move_each([t for t, _ in moving], [s for _, s in moving], weight)
    for t, s in pairs:
        if not t.is_floating_point():
            t.copy_(s)


@torch.no_grad()
def copy(teacher: nn.Module, student: nn.Module) -> None:
    """Copy all parameters and buffers of `student` to `teacher`, in place."""
    theirs, own = ([*module.parameters(), *module.buffers()] for module in (teacher, student))
    for t, s in zip(theirs, own, strict=True):
        local(t).copy_(local(s))
