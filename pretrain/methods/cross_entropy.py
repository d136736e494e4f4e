"""Cross-entropy of the logits of DINO (2104.14294) and iBOT (2111.07832), in chunks of rows.

Float32 logits of many rows and 65,536 prototypes occupy gigabytes, and each operation reads and writes all of them.
This module therefore converts only one chunk of rows at a time to float32. The forward pass also computes the gradient,
and overwrites the logits with the gradient, rounded to the precision of the logits. The backward pass multiplies the
gradient by one factor per row.

If all rows fit in one chunk, torch's autograd computes the gradient from the formulas in `pretrain.methods.losses`.

Shape letters: B images per process; G global crops and S crops of an image; M hidden tokens; N rows, and n rows of a
chunk; K prototypes.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.pretrain.methods.losses import Centering, dino_loss, ibot_loss, teacher_distribution
from tessera.runtime.collectives import all_reduce_max, all_reduce_sum

CHUNK_BYTES = 2**28
"""Largest size of a chunk of logits in float32, in bytes."""

Targets = Callable[[slice], Iterator[tuple[slice, Tensor]]]
"""Function that takes a chunk of rows and yields pairs: a slice of crops with equal weights, and the target of these
crops, (n, K) float32."""


def crop_loss(logits: Tensor, teacher: Tensor, temperature: float, local_weight: float = 1.0) -> Tensor:
    """Return the loss of `dino_loss`. `logits` may be overwritten.

    Args:
        logits: (S, B, K) logits of the student for all crops, global crops first.
        teacher: (G, B, K) float32 probabilities of the global crops.
        temperature: softmax temperature of the student.
        local_weight: factor of the pairs with a local crop.
    """
    if _one_chunk(logits):
        return dino_loss(F.log_softmax(logits.float() / temperature, dim=-1), teacher, local_weight)
    (crops, images, _), views = logits.shape, len(teacher)
    # weight of a pair times the number of pairs of a crop: `views` for a local crop, `views` - 1 for a global crop
    weights = teacher.new_full((crops, images), views * local_weight)
    weights[:views] = views - 1
    weights /= images * (views * crops - views)

    def targets(rows: slice) -> Iterator[tuple[slice, Tensor]]:
        own = teacher[:, rows]  # (G, n, K)
        for crop in range(views) if views > 1 else ():
            others = [own[view] for view in range(views) if view != crop]
            yield slice(crop, crop + 1), others[0] if len(others) == 1 else torch.stack(others).mean(0)
        if crops > views:
            yield slice(views, crops), own.mean(0)

    return _chunked(logits, weights, temperature, targets)


def token_loss(
    student: Tensor,
    teacher: Tensor,
    weights: Tensor,
    center: Tensor,
    *,
    student_temperature: float,
    teacher_temperature: float,
    centering: Centering,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of `ibot_loss`, and two properties of each of the teacher's distributions: its entropy in nats
    (M,) and its most probable prototype (M,). Collective if the centring is sinkhorn.

    `student` may be overwritten. The number of rows may differ between processes, even if only some processes
    compute in chunks.

    Args:
        student: (M, K) logits of the student for hidden tokens.
        teacher: (M, K) logits of the teacher.
        weights: (M,) weight of each token, as returned by `token_weights`.
        center: (K,) running mean of the teacher's logits. Used if the centring is mean.
        student_temperature: softmax temperature of the student.
        teacher_temperature: softmax temperature of the teacher.
        centering: centring of the teacher's logits.
    """
    if _one_chunk(student):
        target = teacher_distribution(teacher.float(), center, teacher_temperature, centering)
        loss = ibot_loss(F.log_softmax(student.float() / student_temperature, dim=-1), target, weights)
        return loss, -torch.special.xlogy(target, target).sum(1), target.argmax(-1)
    sinkhorn = centering == "sinkhorn"
    offset = sinkhorn_offset(teacher, teacher_temperature) if sinkhorn else center / -teacher_temperature
    scale = offset.new_full((1,), 1 / teacher_temperature)
    entropies, best = torch.zeros_like(weights), torch.zeros_like(weights, dtype=torch.int64)

    def targets(rows: slice) -> Iterator[tuple[slice, Tensor]]:
        target = F.softmax(torch.addcmul(offset, teacher[rows], scale), dim=-1)  # (n, K)
        torch.sum(torch.special.entr(target), 1, out=entropies[rows])
        torch.argmax(target, 1, out=best[rows])
        yield slice(0, 1), target

    return _chunked(student[None], weights[None], student_temperature, targets), entropies, best


@torch.no_grad()
def sinkhorn_offset(logits: Tensor, temperature: float, iterations: int = 3) -> Tensor:
    """Return one offset per prototype, such that `sinkhorn` equals softmax(logits / temperature + offset). Collective.

    `sinkhorn` multiplies rows and prototypes by factors, and finally scales each row to a sum of 1. Softmax also scales
    each row to a sum of 1, so only the factors of the prototypes are needed. The sums over the rows of all processes
    are computed in the same order as in `sinkhorn`.

    Args:
        logits: (N, K) of any precision; N may differ between processes.

    Returns:
        (K,) float32.
    """
    peak = all_reduce_max(logits.max().float() / temperature)  # subtract the maximum, so that exp does not overflow
    scale = peak.new_full((1,), 1 / temperature)
    rows = all_reduce_sum(peak.new_full((), len(logits)))
    factors = peak.new_ones(logits.shape[1])
    for iteration in range(iterations):
        sums = torch.zeros_like(factors)
        for chunk in _chunks(*logits.shape):
            assignment = torch.addcmul(-peak, logits[chunk], scale).exp_()  # (n, K)
            if iteration == 0:
                sums += assignment.sum(0)
            else:
                sums += ((assignment @ factors).clamp_(min=1e-30) * rows).reciprocal_() @ assignment
        # Without an upper bound, the factor of a prototype could become infinite if no row is near this prototype.
        factors = (factors / all_reduce_sum(sums * factors).clamp(min=1e-30) / logits.shape[1]).clamp_(max=1e30)
    return factors.log()


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum over crops s and rows i of weights[s, i] times the cross-entropy between target and student."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, weights: Tensor, temperature: float, targets: Targets) -> Tensor:
        crops, rows, prototypes = logits.shape
        values = logits.detach()
        divisor = values.new_full((1,), temperature, dtype=torch.promote_types(values.dtype, torch.float32))
        products = divisor.new_zeros(crops, rows)  # dot products of the targets and the student's log-probabilities
        for chunk in _chunks(rows, crops * prototypes):
            for group, target in targets(chunk):
                part = values[group, chunk]  # (crops of the group, n, K)
                logs = F.log_softmax(part / divisor, dim=-1)
                # The crops of a group have equal weights, so their log-probabilities are summed first. A batched matrix
                # product would add rounding errors of up to 1e-5.
                total = logs[0] if len(logs) == 1 else logs.sum(0)  # (n, K)
                products[group.start, chunk] = (total * target).sum(-1)
                if ctx.needs_input_grad[0]:
                    torch.sub(logs.exp_(), target, out=part)  # the gradient of the cross-entropy, up to a factor
        ctx.save_for_backward(values, weights / temperature)
        return -(products * weights).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        values, factors = ctx.saved_tensors
        return values.mul_((factors * gradients[0]).unsqueeze(-1)), None, None, None


def _chunked(logits: Tensor, weights: Tensor, temperature: float, targets: Targets) -> Tensor:
    return _ChunkedCrossEntropy.apply(logits, weights, temperature, targets)  # pyright: ignore[reportReturnType]


def _one_chunk(logits: Tensor) -> bool:
    return 4 * logits.numel() <= CHUNK_BYTES


def _chunks(rows: int, width: int) -> Iterator[slice]:
    """Split `rows` rows of `width` values into chunks of at most `CHUNK_BYTES`, and yield them as slices."""
    step = max(CHUNK_BYTES // (4 * width), 1)
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))
