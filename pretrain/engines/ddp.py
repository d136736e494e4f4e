"""Engine for one process, or for several processes that each hold the full method (DistributedDataParallel)."""

from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tessera.data.batch import Batch
from tessera.pretrain.engines.engine import Engine, allocate_moments, build_optimizer, local_state, trainable, weighted
from tessera.pretrain.engines.local_state import LocalTensor, unsharded
from tessera.pretrain.methods.method import Method
from tessera.pretrain.optim.adamw import OptimConfig


class DDP(Engine):
    """Engine that uses `Accelerator.prepare`: DDP with several processes, and a gradient scaler under fp16."""

    name = "ddp"
    sharded = False

    def __init__(self, accelerator: Accelerator, method: Method, optim: OptimConfig) -> None:
        self.accelerator, self.method = accelerator, method.to(accelerator.device)
        self.optimizer = build_optimizer(method, optim)
        self.wrapped, _ = accelerator.prepare(method, self.optimizer)
        if isinstance(self.wrapped, DistributedDataParallel):
            # Buffers need no broadcast before each forward pass, because they are equal at the start of each step: the
            # training loop averages running statistics. The attribute is set here, because the argument of this name
            # is deprecated, and accelerate does not yet support the argument that replaces it.
            self.wrapped.broadcast_buffers = False
        allocate_moments(self.adamw_state, trainable(method).values())

    def forward_backward(self, batch: Batch, step: int, *, last: bool) -> tuple[Tensor, dict[str, Tensor]]:
        del last  # not needed, because accelerate itself counts the batches of a step
        with self.accelerator.accumulate(self.wrapped):
            loss, metrics = weighted(*self.wrapped(batch, step))
            self.accelerator.backward(loss)
        return loss.detach(), metrics

    def local_gradients(self, parts: list[nn.Module]) -> list[list[Tensor]]:
        self.accelerator.unscale_gradients()
        return super().local_gradients(parts)

    def step(self, updated: Tensor) -> None:
        super().step(updated)
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.update()  # lowers the loss scale after an overflow

    def local_state(self) -> dict[str, LocalTensor]:
        return local_state(self.method, self.adamw_state, unsharded)
