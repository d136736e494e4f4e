"""Collective operations of the default process group. They also work in one process without a process group.

All ranks must call the same collective operations in the same order. If the backend does not support the device of a
tensor, the tensor is copied to a supported device, and the result is copied back. For example, NCCL does not support
tensors on the CPU.
"""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tessera.runtime.user_error import UserError

VISIBILITY_TIMEOUT = 35.0
"""Seconds to wait for a file that another node wrote to a shared disk. NFS can show a new file up to 30 s late, because
it caches the contents of folders."""
PREPARING_TIMEOUT = timedelta(days=2)
"""Timeout of a `patient_group`. If a rank is lost, the watchdog ends the wait of the other ranks earlier."""
T = TypeVar("T")
_is_alone = False
_before_first: Callable[[], None] | None = None


class Share(NamedTuple):
    """Images of this rank in a forward pass, beside those of the other ranks."""

    images: int
    """Number of images of this rank. If it is 0, the rank takes part with images of another rank, which do not
    count."""
    first: int
    """Number of images of the ranks before this one."""
    total: int
    """Number of images of all ranks."""
    weight: float
    """`images`, divided by its mean over all ranks and over all forward passes of the step. Engines average gradients
    over ranks and passes, so the loss of this rank has this weight in the mean over the images of the step."""
    complete: bool
    """True if every rank has images."""


_share: Share | None = None


class RankError(UserError, RuntimeError):
    """An operation failed on at least one rank. All ranks raise this error with the same message."""


def world_size() -> int:
    """Return the number of ranks, or 1 within the context `alone`."""
    return dist.get_world_size() if dist.is_initialized() and not _is_alone else 1


def rank() -> int:
    """Return the rank of this process."""
    return dist.get_rank() if dist.is_initialized() else 0


@contextmanager
def alone() -> Iterator[None]:
    """Within the context, compute sums, maxima and gathered tensors over this rank only.

    `gather_on_main`, `first_rank` and `run_on_all_ranks` are still collective. The context cannot be nested.
    """
    global _is_alone
    _is_alone = True
    try:
        yield
    finally:
        _is_alone = False


@contextmanager
def before_first_collective(function: Callable[[], None]) -> Iterator[None]:
    """Call `function` before the first sum, maximum or gathered tensor that this rank computes within the context."""
    global _before_first
    _before_first = function
    try:
        yield
    finally:
        _before_first = None


def _begin() -> None:
    """Call the function of `before_first_collective` once."""
    global _before_first
    if _before_first is not None:
        function, _before_first = _before_first, None
        function()


@contextmanager
def sharing(share: Share | None) -> Iterator[None]:
    """Set how the images of a forward pass are shared among the ranks. None, the default: each rank has equally many.

    If this rank has no images, it still enters each collective within the context, and gets the result of the others,
    but adds nothing to sums, maxima and gathered rows.
    """
    global _share
    before, _share = _share, share
    try:
        yield
    finally:
        _share = before


def is_absent() -> bool:
    """Return True if this rank has no images in the forward pass, so that the ones that it computes with do not
    count."""
    return _share is not None and _share.images == 0


def all_have_images() -> bool:
    """Return True if every rank has images in the forward pass."""
    return _share is None or _share.complete


def loss_weight() -> float:
    """Return the weight of the loss of this rank, 1.0 if all ranks have equally many images."""
    return 1.0 if _share is None else _share.weight


def images_of_all_ranks(images: int) -> int:
    """Return the number of images of all ranks in the forward pass, of which this rank has `images`."""
    return images * world_size() if _share is None else _share.total


def pass_weight() -> float:
    """Return the images of this rank, divided by their mean over the ranks, in this forward pass."""
    return 1.0 if _share is None else _share.images * world_size() / _share.total


class _AllReduceSum(torch.autograd.Function):
    """Differentiable sum over ranks.

    The backward pass sums the gradients over ranks, because the loss of every rank depends on the sum.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.absent = is_absent()
        return _all_reduce(torch.zeros_like(x) if ctx.absent else x, dist.ReduceOp.SUM)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        (gradient,) = grad_outputs
        if not ctx.absent:
            return _all_reduce(gradient, dist.ReduceOp.SUM)
        nothing = torch.zeros_like(gradient)
        _all_reduce(nothing, dist.ReduceOp.SUM)
        return nothing


def all_reduce_sum(x: Tensor) -> Tensor:
    """Return the differentiable sum of `x` over ranks. With one process or on the meta device, return `x` itself."""
    return x if world_size() == 1 or x.is_meta else _AllReduceSum.apply(x)  # pyright: ignore[reportReturnType]


def average(x: Tensor) -> Tensor:
    """Return the mean over the images of all ranks, of which `x` is the mean over the images of this rank."""
    weight = pass_weight()
    return all_reduce_sum(x if weight == 1 else x * weight) / world_size()


def all_gather_rows(x: Tensor) -> Tensor:
    """Concatenate the rows of all ranks in rank order: (images of this rank, ...) -> (images of all ranks, ...).

    The result is differentiable: the backward pass sums the gradients over ranks, as in `all_reduce_sum`. The function
    does not wait for the device.
    """
    if world_size() == 1 or x.is_meta:
        return x
    own = x[:0] if is_absent() else x
    before, after = first_row(len(x)), images_of_all_ranks(len(x)) - first_row(len(x)) - len(own)
    return all_reduce_sum(torch.cat([x.new_zeros(before, *x.shape[1:]), own, x.new_zeros(after, *x.shape[1:])]))


def first_row(images: int) -> int:
    """Return the index of the first of `images` images of this rank among those of all ranks."""
    if _share is not None:
        return _share.first
    return 0 if world_size() == 1 else rank() * images


@torch.no_grad()
def all_reduce_max(x: Tensor) -> Tensor:
    """Return the elementwise maximum of `x` over ranks. With one process or on the meta device, return `x` itself."""
    if world_size() == 1 or x.is_meta:
        return x
    return _all_reduce(torch.full_like(x, -torch.inf) if is_absent() else x, dist.ReduceOp.MAX)


@torch.no_grad()
def all_gather(x: Tensor) -> list[Tensor]:
    """Return a list of the tensors `x` (n, ...) of all ranks, in rank order. n may differ between ranks."""
    if world_size() == 1:
        return [x]
    _begin()
    own = x.to(_reachable(x.device))
    counts = [torch.zeros((), dtype=torch.int64, device=own.device) for _ in range(world_size())]
    dist.all_gather(counts, torch.tensor(len(own), device=own.device))
    lengths = [int(count) for count in counts]
    padded = own.new_zeros(max(lengths), *own.shape[1:])
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return [part[:length].to(x.device) for part, length in zip(parts, lengths, strict=True)]


def gather_on_main(value: T, group: dist.ProcessGroup | None = None) -> list[T] | None:
    """Return a list of the picklable values of all ranks, in rank order, on rank 0, and None on the other ranks."""
    if not dist.is_initialized():
        return [value]
    gathered: list[T] | None = [value] * dist.get_world_size(group) if rank() == 0 else None
    dist.gather_object(value, gathered, dst=0, group=group)
    return gathered


def first_rank(condition: bool, group: dist.ProcessGroup | None = None) -> int | None:
    """Return the lowest rank on which `condition` is True, on every rank. Return None if there is no such rank."""
    if not dist.is_initialized():
        return 0 if condition else None
    ranks = dist.get_world_size(group)
    lowest = torch.tensor(rank() if condition else ranks, device=_reachable(torch.device("cpu"), group))
    dist.all_reduce(lowest, dist.ReduceOp.MIN, group=group)
    return int(lowest) if int(lowest) < ranks else None


def broadcast_object(value: T, group: dist.ProcessGroup | None = None, *, source: int = 0) -> T:
    """Return the picklable `value` of rank `source` on every rank."""
    if world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=source, group=group)
    return values[0]


@torch.no_grad()
def broadcast(x: Tensor, *, source: int = 0) -> Tensor:
    """Return the tensor `x` of rank `source` on every rank, on the device of the rank's own `x`.

    The `x` of each rank has the same shape and type. The values of other ranks are not used, and may be overwritten.
    """
    if world_size() == 1:
        return x
    sent = x.detach().to(_reachable(x.device)).contiguous()
    dist.broadcast(sent, src=source)
    return sent.to(x.device)


def run_on_all_ranks(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Call `function` on every rank, wait until all ranks have succeeded, and return the result of this rank.

    If `function` raises an exception on one rank, all ranks raise an exception. Otherwise the other ranks would wait
    for the failed rank in the next collective.

    Raises:
        RankError: `function` failed on a rank. If it raised a subclass of `RankError`, all ranks raise this subclass.
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
    first = first_rank(failure is not None, group)
    if first is not None:
        failures = [failure]
        if dist.is_initialized():
            dist.broadcast_object_list(failures, src=first, group=group)
        assert failures[0] is not None
        kind, message = failures[0]
        raise kind(message)
    return results[0]


@contextmanager
def first_of_node_first() -> Iterator[None]:
    """Run the block on the first rank of each node, and then on the other ranks.

    The first rank fills caches that the other ranks of the node use, for example the index of many shards.
    """
    if world_size() == 1:
        yield
        return
    is_first = int(os.environ.get("LOCAL_RANK", "0")) == 0
    with patient_group() as group:
        if not is_first:
            dist.barrier(group)
        yield
        if is_first:
            dist.barrier(group)


@contextmanager
def patient_group() -> Iterator[dist.ProcessGroup | None]:
    """Yield a process group of all ranks with a timeout of days, for long work on one rank. With one process,
    yield None.

    The default process group has a timeout of minutes (10 under NCCL). Entering the context is collective.
    """
    if world_size() == 1:
        yield None
        return
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=PREPARING_TIMEOUT)  # pyright: ignore[reportAssignmentType]
    yield group
    dist.destroy_process_group(group)


def wait_for_path(path: Path) -> None:
    """Wait until a file or folder that another rank made is visible on this node. This function is not collective.

    Raises:
        RankError: the path is not visible after `VISIBILITY_TIMEOUT` seconds. Without a process group, the error is
            raised at once.
    """
    end = time.monotonic() + (VISIBILITY_TIMEOUT if dist.is_initialized() else 0)
    # On NFS, `listdir` shows a new file earlier than `exists`.
    while not (path.parent.is_dir() and path.name in os.listdir(path.parent)):
        if time.monotonic() > end:
            raise RankError(
                f"{path} is missing on {socket.gethostname()}. --output must be on a disk that all nodes share."
            )
        time.sleep(0.1)


def local(tensor: Tensor) -> Tensor:
    """Return the shard of a parameter or gradient that this rank holds.

    The shard is a block of rows under FSDP2 and a flat range under ZeRO-3. Without sharding, return the full tensor.
    """
    # Recognise a DTensor by its attribute `to_local`, because the import of the class takes almost a second.
    if hasattr(tensor, "to_local"):
        return tensor.to_local()  # pyright: ignore[reportAttributeAccessIssue]
    return getattr(tensor, "ds_tensor", tensor)


def _reachable(device: torch.device, group: dist.ProcessGroup | None = None) -> torch.device:
    """Return `device` if the backend of the process group supports it, else a supported device."""
    reached = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]
    if device.type in reached:
        return device
    return torch.device(reached[0], torch.cuda.current_device()) if reached[0] == "cuda" else torch.device(reached[0])


def _all_reduce(x: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    _begin()
    reduced = x.to(_reachable(x.device), copy=True, memory_format=torch.contiguous_format)
    dist.all_reduce(reduced, op=operation)
    return reduced.to(x.device)


def _collected_failures(error: BaseException) -> dict[int, BaseException]:
    """Return the exceptions in a `CheckpointException` of torch.distributed.checkpoint, as a dictionary by rank.

    For any other exception, return an empty dictionary. `CheckpointException` is recognised by its attribute
    `failures`, because the import of the class takes almost a second.
    """
    return {failed: cause for failed, (cause, _) in getattr(error, "failures", {}).items()}


def _describe(error: BaseException) -> str:
    """Return a one-line message about an exception. For a `CheckpointException`, describe only its first failure."""
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
