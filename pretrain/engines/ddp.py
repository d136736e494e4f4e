"""One process, or many that each hold everything (DistributedDataParallel)."""

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from data.batch import Batch
from pretrain.engines.adamw_state import fill_moments, optimizer_steps, pieces, set_optimizer_steps
from pretrain.engines.local_state import Piece, whole
from pretrain.methods.base import Method
from pretrain.optim.adamw import parameter_groups


class DDP:
    """accelerate's own: DDP among several processes, a gradient scaler under fp16."""

    name = "ddp"
    sharded = False
    """whether `gradients` are parts of tensors, whose squares have to be summed over processes"""

    def __init__(self, accelerator: Accelerator, method: Method, betas: tuple[float, float]) -> None:
        self.accelerator, self.method = accelerator, method.to(accelerator.device)
        optimizer = torch.optim.AdamW(parameter_groups(method, method.frozen()), lr=0.0, betas=betas)
        self.wrapped, self.optimizer = accelerator.prepare(method, optimizer)
        fill_moments(self.optimizer.state, (p for p in method.parameters() if p.requires_grad))

    def losses(self, batch: Batch, step: int, *, last: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of a batch; adds its gradient to this step's, which the `last` batch makes whole."""
        del last  # accelerate counts itself
        with self.accelerator.accumulate(self.wrapped):
            loss, metrics = self.wrapped(batch, step)
            self.accelerator.backward(loss)
        return loss.detach(), metrics

    def gradients(self, parts: list[nn.Module]) -> list[list[Tensor]]:
        """What this process has of the gradient: for each part, tensor after tensor, as views."""
        self.accelerator.unscale_gradients()
        return [[p.grad for p in part.parameters() if p.grad is not None] for part in parts]

    def step(self) -> None:
        """Move the weights, and forget the gradient."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def skip(self) -> None:
        """Forget the gradient."""
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.update()  # lowers the scale
        self.optimizer.zero_grad()

    def whole(self, module: nn.Module, *, everywhere: bool = True) -> nn.Module | None:
        """`module`, a part of the method or all of it, with all its weights."""
        return module if everywhere or self.accelerator.is_main_process else None

    def pieces(self) -> dict[str, Piece]:
        """What this process holds of the run's tensors, as views."""
        return pieces(self.method, self.optimizer.state, whole)

    @property
    def optimizer_steps(self) -> int:
        """Steps that the optimizer made."""
        return optimizer_steps(self.optimizer.state)

    def loaded(self, steps: int) -> None:
        """The pieces have been filled from a checkpoint, after `steps` of the optimizer."""
        set_optimizer_steps(self.optimizer.state, steps)
