"""Cross-entropy of the logits of DINO (2104.14294) and iBOT (2111.07832), in chunks of rows.

The logits of many rows and 65,536 prototypes occupy gigabytes, and each operation reads and writes all of them. This
module therefore takes the two factors of the logits, and computes the logits of one chunk of rows at a time, in the
precision of autocast. The forward pass also computes the gradients of both factors, so the backward pass needs no
logits.

If all rows fit in one chunk, torch's autograd computes the gradient from the formulas in `pretrain.methods.losses`.

Shape letters: B images per process; G global crops and S crops of an image; M hidden tokens; N rows, and n rows of a
chunk; d width of the last layer's input; K prototypes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.pretrain.methods.heads import FactoredLogits
from tessera.pretrain.methods.losses import Centering, dino_loss, ibot_loss, teacher_distribution
from tessera.pretrain.methods.method import full_precision
from tessera.runtime.collectives import all_reduce_max, all_reduce_sum

CHUNK_BYTES = 2**28
"""Largest size of a chunk of logits, in bytes."""

Targets = Callable[[slice], Iterator[tuple[slice, Tensor]]]
"""Function that takes a chunk of rows and yields pairs: a slice of crops, and the target of these crops, (n, K)."""


@contextmanager
def smaller_chunks(images: int, of: int) -> Iterator[None]:
    """Within the context, `images` images are split into as many chunks as `of` images outside of it."""
    global CHUNK_BYTES
    before, CHUNK_BYTES = CHUNK_BYTES, CHUNK_BYTES * images // of
    try:
        yield
    finally:
        CHUNK_BYTES = before


def crop_loss(student: FactoredLogits, teacher: Tensor, temperature: float, local_weight: float = 1.0) -> Tensor:
    """Return the loss of `dino_loss`.

    Args:
        student: (S, B, K) logits of the student for all crops, global crops first.
        teacher: (G, B, K) float32 probabilities of the global crops.
        temperature: softmax temperature of the student.
        local_weight: factor of the pairs with a local crop.
    """
    if _one_chunk(student):
        logits = student.product()
        with full_precision(logits):
            return dino_loss(F.log_softmax(logits.float() / temperature, dim=-1), teacher, local_weight)
    (crops, images), views = student.rows.shape[:-1], len(teacher)
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

    return _chunked(student, weights, temperature, targets)


def token_loss(
    student: FactoredLogits,
    teacher: FactoredLogits,
    weights: Tensor,
    center: Tensor,
    *,
    student_temperature: float,
    teacher_temperature: float,
    centering: Centering,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of `ibot_loss`, and two properties of each of the teacher's distributions: its entropy in nats
    (M,) and its most probable prototype (M,). Collective if the centring is sinkhorn.

    The number of rows may differ between processes, even if only some processes compute in chunks.

    Args:
        student: (M, K) logits of the student for hidden tokens.
        teacher: (M, K) logits of the teacher, without gradient.
        weights: (M,) weight of each token, as returned by `token_weights`.
        center: (K,) running mean of the teacher's logits. Used if the centring is mean.
        student_temperature: softmax temperature of the student.
        teacher_temperature: softmax temperature of the teacher.
        centering: centring of the teacher's logits.
    """
    if _one_chunk(student):
        logits, given = student.product(), teacher.product()
        with full_precision(logits):
            target = teacher_distribution(given.float(), center, teacher_temperature, centering)
            loss = ibot_loss(F.log_softmax(logits.float() / student_temperature, dim=-1), target, weights)
            return loss, -torch.special.xlogy(target, target).sum(1), target.argmax(-1)
    dtype = _product_dtype(teacher.rows)
    with full_precision(teacher.rows):
        scaled = FactoredLogits(teacher.rows / teacher_temperature, teacher.weight)
        sinkhorn = centering == "sinkhorn"
        offset = sinkhorn_offset(scaled, dtype) if sinkhorn else center / -teacher_temperature
        rows, weight = _with_offset(scaled, offset, dtype)
    entropies, best = torch.zeros_like(weights), torch.zeros_like(weights, dtype=torch.int64)

    def targets(chunk: slice) -> Iterator[tuple[slice, Tensor]]:
        target = F.softmax(F.linear(rows[chunk], weight), dim=-1)  # (n, K)
        torch.sum(torch.special.entr(target), 1, dtype=weights.dtype, out=entropies[chunk])
        torch.argmax(target, 1, out=best[chunk])
        yield slice(0, 1), target

    one_crop = FactoredLogits(student.rows[None], student.weight)
    return _chunked(one_crop, weights[None], student_temperature, targets), entropies, best


@torch.no_grad()
def sinkhorn_offset(logits: FactoredLogits, dtype: torch.dtype, iterations: int = 3) -> Tensor:
    """Return one offset per prototype, such that `sinkhorn` equals softmax(logits + offset). Collective.

    `sinkhorn` multiplies rows and prototypes by factors, and finally scales each row to a sum of 1. Softmax also scales
    each row to a sum of 1, so only the factors of the prototypes are needed. The sums over the rows of all processes
    are computed in the same order as in `sinkhorn`. Each iteration computes the logits again, because the product
    takes less time than reading stored logits and subtracting their maximum.

    Args:
        logits: (N, K) logits, divided by the temperature; N may differ between processes, and may be 0.
        dtype: precision of the products.

    Returns:
        (K,), at least float32.
    """
    width, count = len(logits.weight), len(logits.rows)
    rows, weight = logits.rows.to(dtype), logits.weight.to(dtype)
    largest = [F.linear(rows[chunk], weight).max() for chunk in _chunks(count, width, dtype)]
    own_peak = torch.stack(largest).max() if largest else rows.new_full((), -torch.inf)
    # subtract the maximum, so that exp does not overflow
    peak = all_reduce_max(own_peak.to(torch.promote_types(dtype, torch.float32)))
    total = all_reduce_sum(peak.new_full((), count))
    factors = peak.new_ones(width)
    rows, weight = _with_offset(logits, -peak.expand(width), dtype)
    for iteration in range(iterations):
        sums = torch.zeros_like(factors)
        for chunk in _chunks(count, width, dtype):
            assignment = F.linear(rows[chunk], weight)  # (n, K)
            # exp of a difference of 17 is 0 in float16
            assignment = (assignment.float() if dtype == torch.float16 else assignment).exp_()
            if iteration == 0:
                sums += assignment.sum(0, dtype=sums.dtype)
            else:
                scales = (assignment @ factors.to(assignment.dtype)).to(sums.dtype)  # (n,)
                scales = (scales.clamp_(min=1e-30) * total).reciprocal_()
                sums += scales.to(assignment.dtype) @ assignment
        # Without an upper bound, the factor of a prototype could become infinite if no row is near this prototype.
        factors = (factors / all_reduce_sum(sums * factors).clamp(min=1e-30) / width).clamp_(max=1e30)
    offset = factors.log()
    return offset - offset.mean()  # small offsets lose less when the sums are rounded


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum over crops s and rows i of weights[s, i] times the cross-entropy between target and student.

    With logits z, probabilities p and the target t, the cross-entropy is entropy(p) + sum of (p - t) * z over the
    prototypes, and p - t is its gradient. The sum is the dot product of the row with the row's gradient, so no pass
    over the logits is needed for it.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, weights: Tensor, temperature: float, targets: Targets
    ) -> Tensor:
        (crops, count, _), dtype = rows.shape, _product_dtype(rows)
        with full_precision(rows):
            x, w = (rows / temperature).to(dtype), weight.to(dtype)
            most = weights.max().clamp(min=torch.finfo(weights.dtype).tiny)
            shares = (weights / most).to(dtype)  # at most 1, so that they are not rounded to 0 in float16
            losses = torch.zeros_like(weights)
            row_gradients = torch.empty_like(x)
            weight_gradient = torch.zeros_like(weight, dtype=losses.dtype) if ctx.needs_input_grad[1] else None
            for chunk in _chunks(count, crops * len(w), dtype):
                part = x[:, chunk]  # (S, n, d)
                values = F.softmax(F.linear(part, w), dim=-1)  # (S, n, K)
                losses[:, chunk] = torch.sum(torch.special.entr(values), -1, dtype=losses.dtype)
                for group, target in targets(chunk):
                    values[group].sub_(target)
                row_gradients[:, chunk] = values @ w
                losses[:, chunk] += torch.linalg.vecdot(part.to(losses.dtype), row_gradients[:, chunk].to(losses.dtype))
                if weight_gradient is not None:
                    weight_gradient += values.flatten(0, 1).mT @ (part * shares[:, chunk, None]).flatten(0, 1)
            ctx.save_for_backward(row_gradients, weights / temperature, weight_gradient, most)
            ctx.dtypes = rows.dtype, weight.dtype
            return (losses * weights).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        row_gradients, factors, weight_gradient, most = ctx.saved_tensors
        of_rows = (row_gradients * (factors * gradients[0]).unsqueeze(-1)).to(ctx.dtypes[0])
        if weight_gradient is not None:
            weight_gradient = (weight_gradient * (most * gradients[0])).to(ctx.dtypes[1])
        return of_rows, weight_gradient, None, None, None


def _chunked(logits: FactoredLogits, weights: Tensor, temperature: float, targets: Targets) -> Tensor:
    return _ChunkedCrossEntropy.apply(*logits, weights, temperature, targets)  # pyright: ignore[reportReturnType]


def _with_offset(logits: FactoredLogits, offset: Tensor, dtype: torch.dtype) -> FactoredLogits:
    """Return logits plus an offset for each prototype (K,), in the precision `dtype`.

    The offset is a part of the product, so that only the sums are rounded. It is split in two columns of the weight,
    of which the second holds the rounding error of the first. Six columns of zeros keep the width a multiple of 8, as
    GPUs need it for fast products.
    """
    width = logits.weight.shape[1]
    rows, weight = (F.pad(one.to(dtype), (0, 8)) for one in logits)
    rows[:, width : width + 2] = 1
    weight[:, width] = offset
    weight[:, width + 1] = offset - weight[:, width]
    return FactoredLogits(rows, weight)


def _product_dtype(x: Tensor) -> torch.dtype:
    """Return the precision of matrix products with `x`: that of autocast, or that of `x`."""
    device = x.device.type
    enabled = not x.is_meta and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if enabled else x.dtype


def _one_chunk(logits: FactoredLogits) -> bool:
    """Return True if the logits fit in one chunk in float32."""
    return 4 * logits.rows.shape[:-1].numel() * len(logits.weight) <= CHUNK_BYTES


def _chunks(rows: int, width: int, dtype: torch.dtype) -> Iterator[slice]:
    """Split `rows` rows of `width` values into chunks of at most `CHUNK_BYTES`, and yield them as slices."""
    step = max(CHUNK_BYTES // (dtype.itemsize * width), 1)
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))
