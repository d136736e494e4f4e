"""Weights, gradients and moments in shards of rows, gathered block by block (FSDP2, torch's `fully_shard`)."""

import os
from typing import cast

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from data.batch import Batch
from pretrain.engines.adamw_state import fill_moments, optimizer_steps, pieces, set_optimizer_steps
from pretrain.engines.local_state import Piece, whole
from pretrain.engines.meta_copy import Skeleton
from pretrain.methods.base import Method
from pretrain.optim.adamw import parameter_groups
from runtime.collectives import local
from runtime.settings import SettingsError


class FSDP2:
    """`fully_shard` of each block and of the rest. Weights are gathered and gradients summed in float32; autocast makes
    the arithmetic what it is under DDP.

    accelerate's own `prepare` is left out: it shards by names of classes of transformers, and only where CUDA is.
    """

    name = "fsdp2"
    sharded = True

    def __init__(self, accelerator: Accelerator, method: Method, betas: tuple[float, float]) -> None:
        self.accelerator, self.method = accelerator, method
        self.skeleton = Skeleton(method)
        plugin = FullyShardedDataParallelPlugin()  # reads what the launcher set
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        policy = CPUOffloadPolicy() if _offloads(plugin) else OffloadPolicy()
        for unit in method.units():
            fully_shard(
                unit, mesh=mesh, reshard_after_forward=bool(plugin.reshard_after_forward), offload_policy=policy
            )
        fully_shard(method, mesh=mesh, offload_policy=policy)  # moves to the device, unit by unit
        self.optimizer = torch.optim.AdamW(parameter_groups(method, method.frozen()), lr=0.0, betas=betas)
        fill_moments(self.optimizer.state, (p for p in method.parameters() if p.requires_grad))

    def losses(self, batch: Batch, step: int, *, last: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of a batch; adds its gradient to this step's, which the `last` batch makes whole."""
        cast(FSDPModule, self.method).set_requires_gradient_sync(last)
        with self.accelerator.autocast():
            loss, metrics = self.method(batch, step)
        (loss / self.accelerator.gradient_accumulation_steps).backward()
        return loss.detach(), metrics

    def gradients(self, parts: list[nn.Module]) -> list[list[Tensor]]:
        """This process's rows of the gradient: for each part, tensor after tensor, as views."""
        return [[local(p.grad) for p in part.parameters() if p.grad is not None] for part in parts]

    def step(self) -> None:
        """Move the weights, and forget the gradient."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def skip(self) -> None:
        """Forget the gradient."""
        self.optimizer.zero_grad()

    def whole(self, module: nn.Module, *, everywhere: bool = True) -> nn.Module | None:
        """A plain copy of `module`, a part of the method or all of it, with all its weights."""
        gathered = (p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters())
        keep = everywhere or self.accelerator.is_main_process
        return self.skeleton.fill(module, gathered, self.accelerator.device, keep=keep)

    def pieces(self) -> dict[str, Piece]:
        """What this process holds of the run's tensors, as views."""
        return pieces(self.method, self.optimizer.state, _rows)

    @property
    def optimizer_steps(self) -> int:
        """Steps that the optimizer made."""
        return optimizer_steps(self.optimizer.state)

    def loaded(self, steps: int) -> None:
        """The pieces have been filled from a checkpoint, after `steps` of the optimizer."""
        set_optimizer_steps(self.optimizer.state, steps)


def _rows(tensor: Tensor) -> Piece:
    """The first dimension is dealt in equal shares, the last ones smaller or empty."""
    if not isinstance(tensor, DTensor):
        return whole(tensor)
    each = -(-len(tensor) // tensor.device_mesh.size())
    first = min(tensor.device_mesh.get_local_rank() * each, len(tensor))
    return Piece(local(tensor).detach().view(-1), first * tensor[0:1].numel(), tensor.numel())


def check(accelerator: Accelerator, precision: str) -> None:
    """Look at what the launcher asks of FSDP.

    Raises:
        SettingsError: something that this cannot do.
    """
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise SettingsError("FSDP 1 is not supported: set fsdp_version: 2 (configs/accelerate/fsdp2.yaml)")
    if precision == "fp16":
        raise SettingsError("precision fp16 has no gradient scaler under FSDP2: use bf16")
    if accelerator.num_processes == 1:
        raise SettingsError("FSDP2 shards over processes: launch two or more, or leave FSDP out")
    plugin = FullyShardedDataParallelPlugin()
    if _offloads(plugin) and accelerator.device.type == "cpu":
        raise SettingsError("fsdp_offload_params moves weights from a device to the CPU, and here is no device")
    if plugin.activation_checkpointing:
        raise SettingsError("remove fsdp_activation_checkpointing and set --encoder.checkpoint_activations true")


def _offloads(plugin: FullyShardedDataParallelPlugin) -> bool:
    return isinstance(plugin.cpu_offload, CPUOffloadPolicy)
