"""Sums over processes that also work with one process and no process group."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def world_size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


class _AllReduceSum(torch.autograd.Function):
    """Every process's loss depends on the sum, so the gradient of an addend is the sum of all processes' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        grad = grad_outputs[0].contiguous().clone()
        dist.all_reduce(grad)
        return grad


def all_reduce_sum(x: Tensor) -> Tensor:
    """Sum of `x` over processes, differentiable; `x` itself with one process."""
    return x if world_size() == 1 else _AllReduceSum.apply(x)  # pyright: ignore[reportReturnType]


@torch.no_grad()
def all_reduce_max(x: Tensor) -> Tensor:
    """Largest `x` over processes."""
    if world_size() == 1:
        return x
    x = x.clone()
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return x


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a parameter or gradient: all of it, rows of it (FSDP2), or a flat range (ZeRO-3)."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return getattr(tensor, "ds_tensor", tensor)
