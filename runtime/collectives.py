"""Collectives of the default process group. All of them also work with one process and no process group.

Every function is collective: all ranks call it, in the same order. A tensor on a device that the backend does not
support, such as the CPU under NCCL, is copied to a supported device and back.
"""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from runtime.errors import UserError

VISIBILITY_TIMEOUT = 35.0
"""Seconds to wait until one node sees a file of another node on a shared disk. NFS caches folders for up to 30 s."""
T = TypeVar("T")


class RankError(UserError, RuntimeError):
    """An operation failed on at least one rank. The message is equal on all ranks."""


def world_size() -> int:
    """Return the number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process."""
    return dist.get_rank() if dist.is_initialized() else 0


class _AllReduceSum(torch.autograd.Function):
    """A sum over ranks whose gradient is summed over ranks too, because the loss of every rank depends on the sum."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        return _all_reduce(x, dist.ReduceOp.SUM)

    @staticmethod
    def backward(ctx: FunctionCtx, *grad_outputs: Tensor) -> Tensor:
        return _all_reduce(grad_outputs[0], dist.ReduceOp.SUM)


def all_reduce_sum(x: Tensor) -> Tensor:
    """Return the sum of `x` over ranks, differentiable; `x` itself with one process or on the meta device."""
    return x if world_size() == 1 or x.is_meta else _AllReduceSum.apply(x)  # pyright: ignore[reportReturnType]


@torch.no_grad()
def all_reduce_max(x: Tensor) -> Tensor:
    """Return the elementwise maximum of `x` over ranks; `x` itself with one process."""
    return x if world_size() == 1 or x.is_meta else _all_reduce(x, dist.ReduceOp.MAX)


@torch.no_grad()
def all_gather(x: Tensor) -> list[Tensor]:
    """Return `x` (n, ...) of each rank, in the order of ranks. The number of rows n may differ between ranks."""
    if world_size() == 1:
        return [x]
    own = x.to(_reachable(x.device))
    counts = [torch.zeros((), dtype=torch.int64, device=own.device) for _ in range(world_size())]
    dist.all_gather(counts, torch.tensor(len(own), device=own.device))
    lengths = [int(count) for count in counts]
    padded = own.new_zeros(max(lengths), *own.shape[1:])
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return [part[:length].to(x.device) for part, length in zip(parts, lengths, strict=True)]


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the picklable `value` of each rank, in the order of ranks, on every rank."""
    if not dist.is_initialized():
        return [value]
    gathered: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def broadcast_object(value: T) -> T:
    """Return the picklable `value` of rank 0 on every rank."""
    if world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def run_on_all_ranks(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Call `function` on every rank, wait until all ranks have succeeded, and return the local result.

    If one rank raises an exception, all ranks raise an exception, so that no rank waits for another in the next
    collective.

    Raises:
        RankError: `function` failed on a rank. An exception that is a subclass of `RankError` keeps its class.
    """
    results: list[T] = []
    failure: tuple[type[RankError], str] | None = None
    try:
        results.append(function())
    except BaseException as error:
        causes = _collected_failures(error).values()
        if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
            raise KeyboardInterrupt from error
        if not isinstance(error, Exception) and not causes:
            raise
        failure = (type(error) if isinstance(error, RankError) else RankError, _describe(error))
    for first in filter(None, gather_objects(failure, group)):
        kind, message = first
        raise kind(message)
    return results[0]


def wait_for_path(path: Path) -> None:
    """Wait until a file or folder that another rank made is visible on this node. Not collective.

    Raises:
        RankError: the path is not visible within `VISIBILITY_TIMEOUT`, or, with one process, at the time of the call.
    """
    end = time.monotonic() + (VISIBILITY_TIMEOUT if dist.is_initialized() else 0)
    # on NFS, `listdir` shows new files before `exists` does
    while not (path.parent.is_dir() and path.name in os.listdir(path.parent)):
        if time.monotonic() > end:
            raise RankError(
                f"{path} is missing on {socket.gethostname()}. --output must be on a disk that all nodes share."
            )
        time.sleep(0.1)


def local(tensor: Tensor) -> Tensor:
    """Return the local shard of a parameter or gradient: rows under FSDP2, a flat range under ZeRO-3, else the full
    tensor."""
    # a DTensor; the attribute identifies it, because importing the class takes most of a second
    if hasattr(tensor, "to_local"):
        return tensor.to_local()  # pyright: ignore[reportAttributeAccessIssue]
    return getattr(tensor, "ds_tensor", tensor)


def _reachable(device: torch.device) -> torch.device:
    """Return `device` if the backend of the default group supports it, else a device that the backend supports."""
    reached = [pair.partition(":")[0] for pair in dist.get_backend_config().split(",")]
    if device.type in reached:
        return device
    return torch.device(reached[0], torch.cuda.current_device()) if reached[0] == "cuda" else torch.device(reached[0])


def _all_reduce(x: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    reduced = x.to(_reachable(x.device), copy=True, memory_format=torch.contiguous_format)
    dist.all_reduce(reduced, op=operation)
    return reduced.to(x.device)


def _collected_failures(error: BaseException) -> dict[int, BaseException]:
    """Return the exceptions by rank that torch.distributed.checkpoint collects in its `CheckpointException`.

    `CheckpointException` is recognised by its attribute `failures`, because importing it takes most of a second.
    """
    return {failed: cause for failed, (cause, _) in getattr(error, "failures", {}).items()}


def _describe(error: BaseException) -> str:
    """Return a one-line message about an exception of this rank, or about the first exception that torch collected."""
    failed = rank()
    if collected := _collected_failures(error):
        failed, error = next(iter(collected.items()))
    if isinstance(error, OSError) and error.strerror:
        message = error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    else:
        message = next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), "")
        if not message or not isinstance(error, UserError | ValueError):
            message = f"{type(error).__name__}: {message}"
    return f"process {failed}: {message}" if world_size() > 1 else message
