"""Running statistics of a method: buffers that a training forward pass changes, such as those of batch norm.

They are the buffers of modules whose attribute `track_running_stats` is true, as in torch's batch norm. All other
buffers are constants, or are changed by the method itself.
"""

import torch
from torch import Tensor, nn

from tessera.runtime.collectives import all_reduce_sum, world_size


def running_statistics(module: nn.Module, *, training: bool = False) -> list[Tensor]:
    """Return the running statistics of a module and its submodules. If `training` is true, leave out those of modules
    in eval mode, such as teachers."""
    # `_buffers` is checked first: this function runs at every step, and `getattr` is slow if the attribute is missing
    parts = [part for part in module.modules() if part._buffers and getattr(part, "track_running_stats", False)]
    return [buffer for part in parts if part.training or not training for buffer in part.buffers(recurse=False)]


class StepStatistics:
    """The running statistics that a training step changes, and their values at the start of the step."""

    def __init__(self, method: nn.Module) -> None:
        self.buffers = running_statistics(method, training=True)
        self.before = [buffer.clone() for buffer in self.buffers]

    @torch.no_grad()
    def settle(self, updated: Tensor, weight: float = 1.0) -> None:
        """Average the statistics over processes, or undo their changes if `updated` is 0. Collective.

        Args:
            updated: scalar on the device of the statistics, which tells whether the step updated the weights.
            weight: number of images of this process in the step, divided by its mean over processes.
        """
        self._average(weight)
        for buffer, before in zip(self.buffers, self.before, strict=True):
            buffer.copy_(torch.where(updated == 1, buffer, before))

    def _average(self, weight: float) -> None:
        """Average the statistics over processes, because each process had different images. Collective.

        The statistics of `pretrain.methods.batch_norm` are already equal. Those of other layers become the mean of the
        processes' variances, not one variance over the images of all processes.
        """
        buffers = [buffer for buffer in self.buffers if buffer.is_floating_point()]
        if not buffers or world_size() == 1:
            return
        own = torch.cat([buffer.flatten() for buffer in buffers])
        if weight != 1:
            own = own * weight if weight else torch.zeros_like(own)
        means = all_reduce_sum(own) / world_size()
        for buffer, mean in zip(buffers, means.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(mean.view_as(buffer))
