"""Batch norm with statistics over the images of all processes.

Letters in shapes: N rows, which are all positions of all images of this process; D width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tessera.runtime.collectives import all_have_images, all_reduce_sum, world_size


def centered(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `x` (N, D) minus its mean, the mean (D,), the variance (D,), and the number of rows.

    The statistics include the rows of all processes. Processes may have different numbers of rows.
    """
    # If no process has a row, a mean of 0 / 0 would make the gradient of the weight NaN.
    rows = all_reduce_sum(x.new_full((), len(x))).clamp(min=1)
    # Subtract the mean before squaring, because mean(x^2) - mean(x)^2 can cancel most digits of float32.
    mean = all_reduce_sum(x.sum(0)) / rows
    difference = x - mean
    return difference, mean, all_reduce_sum(difference.square().sum(0)) / rows, rows


def over_all_processes(module: nn.Module) -> None:
    """Change, in place, each batch norm of `module` so that its batch statistics include the images of all processes.

    On GPUs, this is torch's `SyncBatchNorm`. On other devices, and if a process has no images, `centered` computes the
    same statistics. With one
    process, and in evaluation mode, nothing changes. Names of tensors do not change.

    The layers are those of torch, and those of timm with an activation. Other subclasses of torch's batch norm keep the
    statistics of each process.
    """
    for part in module.modules():
        if type(part) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            part.__class__ = BatchNorm
        elif type(part).__module__.startswith("timm.") and type(part).__name__ == "BatchNormAct2d":
            part.__class__ = BatchNormAct


class BatchNorm(_BatchNorm):
    """Batch norm over all processes: (B, D, ...) -> (B, D, ...).

    This class is no subclass of `SyncBatchNorm`, because `DistributedDataParallel` refuses such modules on the CPU.
    """

    process_group = None  # the default group
    _check_input_dim = nn.SyncBatchNorm._check_input_dim
    _check_non_zero_input_channels = nn.SyncBatchNorm._check_non_zero_input_channels

    def forward(self, input: Tensor) -> Tensor:
        if world_size() == 1 or not self.training or input.is_meta:
            return super().forward(input)
        if input.is_cuda and all_have_images():  # torch's layer would count the images of an empty share
            return nn.SyncBatchNorm.forward(self, input)  # pyright: ignore[reportArgumentType]
        return self._in_torch(input)

    def _in_torch(self, x: Tensor) -> Tensor:
        """Return the output with the statistics of all processes, and update the running statistics."""
        with torch.autocast(x.device.type, enabled=False):
            moved = x.movedim(1, -1).to(torch.promote_types(x.dtype, torch.float32))  # (B, ..., D)
            difference, mean, variance, rows = centered(moved.flatten(0, -2))
            if self.track_running_stats:
                self._move(mean, variance * rows / (rows - 1).clamp(min=1))
            out = difference * torch.rsqrt(variance + self.eps)
            if self.weight is not None:
                out = out * self.weight + self.bias
            return out.view_as(moved).movedim(-1, 1).to(x.dtype)

    @torch.no_grad()
    def _move(self, mean: Tensor, variance: Tensor) -> None:
        momentum = self._count()
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            if running is not None:
                running.lerp_(new.to(running.dtype), momentum)

    def _count(self) -> float:
        """Count the batch, and return the weight of its statistics in the running statistics."""
        if self.num_batches_tracked is None:
            return 0.0 if self.momentum is None else self.momentum
        self.num_batches_tracked.add_(1)
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum


class BatchNormAct(BatchNorm):
    """timm's `BatchNormAct2d`: batch norm, dropout and activation."""

    drop: Any
    act: Any

    def forward(self, input: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(input)))
