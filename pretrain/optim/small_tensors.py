"""Operations on many tensors with factors in the memory of the GPU.

For such factors, `torch._foreach_mul_` and `torch._foreach_lerp_` run one kernel for each tensor. Most tensors of a
model are biases and norms, for which the launch takes all of the time. The functions of this module therefore run a few
kernels for all small tensors together. They move more bytes, so large tensors and tensors on the CPU go the usual way.
"""

# pyright: reportPrivateImportUsage=false

from collections.abc import Sequence

import torch
from torch import Tensor

MOST_VALUES = 2**18
"""Largest number of values of a small tensor. A GPU of 4 TB/s moves five times its bytes in the time of a launch."""


def scale_each(tensors: Sequence[Tensor], scales: Tensor) -> None:
    """Multiply each tensor in place by its factor. `scales` has one factor for each tensor."""
    small = [i for i, t in enumerate(tensors) if _is_small(t) and t.is_contiguous() and t.dtype == scales.dtype]
    rest = [i for i in range(len(tensors)) if i not in set(small)]
    if small:
        own = [tensors[i].view(-1) for i in small]
        repeated = torch.cat([scales[i].expand(len(t)) for i, t in zip(small, own, strict=True)])
        torch._foreach_mul_(own, repeated.split([len(t) for t in own]))
    if rest:
        torch._foreach_mul_([tensors[i] for i in rest], [scales[i] for i in rest])


def move_each(targets: Sequence[Tensor], sources: Sequence[Tensor], weight: Tensor) -> None:
    """Add `weight * (source - target)` to each target in place. `weight` is a scalar.

    A target that equals its source does not change, and no target changes if `weight` is 0.
    """
    small: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    rest = list[tuple[Tensor, Tensor]]()
    for t, s in zip(targets, sources, strict=True):
        (small.setdefault(t.dtype, []) if _is_small(t) else rest).append((t, s.to(t.dtype)))
    for dtype, pairs in small.items():
        own = [t for t, _ in pairs]
        differences = torch._foreach_sub([s for _, s in pairs], own)
        torch._foreach_mul_(differences, weight.to(own[0].device, dtype))
        torch._foreach_add_(own, differences)
    if rest:
        # one copy for each device: an engine may keep weights on the CPU, where they need the factor, too
        weights = {key: weight.to(*key) for key in {(t.device, t.dtype) for t, _ in rest}}
        torch._foreach_lerp_([t for t, _ in rest], [s for _, s in rest], [weights[t.device, t.dtype] for t, _ in rest])


def _is_small(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu" and tensor.numel() <= MOST_VALUES
