"""The interface of all engines, and the AdamW functions that the engines share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, ClassVar, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from tessera.data.batch import Batch
from tessera.pretrain.engines.local_state import LocalTensor
from tessera.pretrain.engines.meta_copy import M, MetaCopy
from tessera.pretrain.methods.method import Method
from tessera.pretrain.optim.adamw import OptimConfig, adamw
from tessera.runtime.collectives import local, loss_weight

MOMENTS = ("exp_avg", "exp_avg_sq")
AdamWState = MutableMapping[Tensor, dict[str, Any]]


class Shards(NamedTuple):
    """Numbers of shards over processes; 1 where every process holds all."""

    weights: int = 1
    gradients: int = 1
    moments: int = 1


UNSHARDED = Shards()


class Engine(ABC):
    """A method and its optimizer, distributed over processes.

    Weights, gradients and moments are float32 under every engine; autocast lowers the precision of the forward pass.
    All methods are collective.
    """

    name: str
    """Name of the engine in logs and checkpoints."""
    sharded: bool
    """True if `local_gradients` returns shards. The squared norms of the shards must be summed over processes."""
    sends_weights: ClassVar[bool] = False
    """True if the engine sends the main process's weights and buffers to the other processes. The methods of the other
    processes may then be on the meta device."""
    copies: int = 1
    """Number of processes that hold the same shard, if `sharded` is True."""
    meta_copy: MetaCopy | None = None
    """Copy of the unsharded method on the meta device; None if every process holds full parameters."""
    accelerator: Accelerator
    method: Method
    optimizer: torch.optim.Optimizer
    """AdamW itself, not the wrapper of accelerate or DeepSpeed."""

    @abstractmethod
    def __init__(self, accelerator: Accelerator, method: Method, optim: OptimConfig) -> None:
        """Distribute `method`, build its optimizer, and allocate the optimizer's state."""

    @staticmethod
    def shards(accelerator: Accelerator) -> Shards:
        """Return the numbers of shards under the launcher's settings."""
        del accelerator
        return UNSHARDED

    @abstractmethod
    def forward_backward(self, batch: Batch, step: int, *, last: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the forward and backward pass of a batch, accumulate its gradients, and return its loss and metrics, as
        `weighted` does.

        Args:
            last: True for the last batch of an optimizer step. Gradients are then reduced over processes.
        """

    def local_gradients(self, parts: list[nn.Module]) -> list[list[Tensor]]:
        """Return views of this process's shards of the gradients, as one list for each module of `parts`."""
        return [[local(p.grad) for p in part.parameters() if p.grad is not None] for part in parts]

    def step(self, updated: Tensor) -> None:
        """Update the weights and clear the gradients, without waiting for the device.

        Args:
            updated: Scalar on the device: 1, or 0 to leave weights and moments as they are.
        """
        self._decide(updated)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _decide(self, updated: Tensor) -> None:
        """Tell AdamW whether its next step changes anything. Its fused kernels read an attribute for this."""
        # Moments that are kept on the CPU need the value there, for which this process has to wait.
        on_device = next(iter(self.adamw_state)).device
        self.optimizer.found_inf = (1 - updated).to(on_device)  # pyright: ignore[reportAttributeAccessIssue]

    def full_parameters(self, module: nn.Module) -> Iterator[Tensor]:
        """Yield each parameter of `module` in full. An engine that shards parameters gathers them one by one."""
        yield from module.parameters()

    def gather_full_parameters(self, module: M) -> M:
        """Return `module`, which is the method or one of its modules, with full parameters. The result is a copy if the
        engine shards parameters."""
        if self.meta_copy is None:
            return module
        return self.meta_copy.fill(module, self.full_parameters(module), self.accelerator.device)

    def gather_on_main(self, module: M) -> M | None:
        """On the main process, return `module` with full parameters; on the others, return None. If the engine shards
        parameters, the result is a copy in host memory."""
        main = self.accelerator.is_main_process
        if self.meta_copy is None:
            return module if main else None
        if main:
            return self.meta_copy.fill(module, self.full_parameters(module), torch.device("cpu"))
        for _ in self.full_parameters(module):  # all processes must take part in gathering the parameters
            pass
        return None

    @abstractmethod
    def local_state(self) -> dict[str, LocalTensor]:
        """Return views of this process's shards of the weights, buffers and moments, by name."""

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer updates so far."""
        # the first parameter suffices, because the count is equal for all parameters
        return next((int(state["step"]) for state in self.adamw_state.values()), 0)

    def after_load(self, optimizer_steps: int) -> None:
        """Finish loading a checkpoint whose tensors have been read into `local_state()`.

        Args:
            optimizer_steps: number of updates that the optimizer had made when the checkpoint was written.
        """
        for parameter, state in self.adamw_state.items():
            state["step"] = _updates(parameter, optimizer_steps)

    @property
    def adamw_state(self) -> AdamWState:
        """AdamW's state of each parameter: the moments and the number of updates."""
        return self.optimizer.state


def weighted(loss: Tensor, metrics: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the metrics of a forward pass, multiplied by the weight of this process (`loss_weight`).

    The loss of a process without images is 0, and so are its gradients.
    """
    weight = loss_weight()
    if weight == 1:
        return loss, metrics
    return loss * weight, {
        name: value * weight if weight else torch.zeros_like(value) for name, value in metrics.items()
    }


def build_optimizer(method: Method, optim: OptimConfig) -> torch.optim.AdamW:
    """Return AdamW over the trainable parameters of `method`. Schedules set the learning rate before each step."""
    return adamw(method, optim, method.frozen())


def _updates(parameter: Tensor, count: int) -> Tensor:
    """Return `count` in the form in which fused AdamW stores it: a float32 scalar on the device of `parameter`."""
    return torch.tensor(float(count), device=parameter.device)


def allocate_moments(state: AdamWState, parameters: Iterable[Tensor]) -> None:
    """Allocate AdamW's state eagerly, as zeros, so that a checkpoint can be loaded into it before the first step."""
    for parameter in parameters:
        zeros = {name: torch.zeros_like(parameter, requires_grad=False) for name in MOMENTS}
        state[parameter] = {"step": _updates(parameter, 0)} | zeros


def trainable(method: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name."""
    return {name: parameter for name, parameter in method.named_parameters() if parameter.requires_grad}


def local_state(
    method: nn.Module, state: AdamWState, to_local: Callable[[Tensor], LocalTensor]
) -> dict[str, LocalTensor]:
    """Return the local state (`Engine.local_state`) of an engine that shards moments in the same way as weights.

    Args:
        state: AdamW's state of each parameter.
        to_local: function that returns this process's shard of a weight, buffer or moment.
    """
    tensors = {f"method.{name}": tensor for name, tensor in method.state_dict(keep_vars=True).items()}
    for name, parameter in trainable(method).items():
        tensors |= {f"{moment}.{name}": state[parameter][moment] for moment in MOMENTS}
    return {name: to_local(tensor) for name, tensor in tensors.items()}
