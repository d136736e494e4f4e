"""FSDP2 (torch's `fully_shard`): weights, gradients and moments are sharded by rows, and weights are gathered block by
block. With HSDP, groups of processes, such as nodes, hold copies of all shards."""

import math
import os
from collections.abc import Iterator
from itertools import pairwise
from typing import cast

import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tessera.data.batch import Batch
from tessera.pretrain.engines.engine import (
    Engine,
    Shards,
    allocate_moments,
    build_optimizer,
    local_state,
    trainable,
    weighted,
)
from tessera.pretrain.engines.local_state import LocalTensor, unsharded
from tessera.pretrain.engines.meta_copy import MetaCopy, meta_parameters
from tessera.pretrain.methods.method import Method
from tessera.pretrain.optim.adamw import OptimConfig
from tessera.pretrain.optim.running_statistics import running_statistics
from tessera.runtime.collectives import broadcast, local
from tessera.runtime.settings import SettingsError


class FSDP2(Engine):
    """Engine that applies `fully_shard` to each block and then to the whole method.

    In bf16, the blocks' weights are gathered in bf16, which halves the communication volume and the memory of gathered
    weights. Other engines round only the weights of matrix products to bf16; here, the weights of norms, layer scales
    and relative positions are rounded, too. All other weights are gathered in float32, because heads and embeddings
    compute a part of their outputs in float32. Gradients are reduced in float32. Autocast sets the precision of the
    forward pass, as under DDP. accelerate's own `prepare` is not used, because it needs CUDA and finds blocks by their
    class names.
    """

    name = "fsdp2"
    sharded = True
    sends_weights = True

    def __init__(self, accelerator: Accelerator, method: Method, optim: OptimConfig) -> None:
        self.accelerator, self.method = accelerator, method
        _send_buffers(method, accelerator.device)
        self.meta_copy = MetaCopy(method)
        weights = _take_parameters(method)
        plugin = FullyShardedDataParallelPlugin()  # reads the launcher's settings from environment variables
        mesh = _mesh(accelerator)
        self.copies = mesh.size(0) if mesh.ndim == 2 else 1
        if self.copies > 1:
            self.name = "hsdp"
        policy = CPUOffloadPolicy() if _offloads(plugin) else OffloadPolicy()
        bf16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        precision = bf16 if accelerator.mixed_precision == "bf16" else MixedPrecisionPolicy()
        for sequence in method.units():
            trained = any(p.requires_grad for unit in sequence for p in unit.parameters())
            reshard = bool(plugin.reshard_after_forward) or not trained  # no backward pass needs a teacher's weights
            for unit in sequence:
                # torch's batch norm needs weights in the precision of its running statistics
                own = MixedPrecisionPolicy() if running_statistics(unit) else precision
                fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, offload_policy=policy, mp_policy=own)
            for unit, following in pairwise(sequence):
                cast(FSDPModule, unit).set_modules_to_forward_prefetch([cast(FSDPModule, following)])
        fully_shard(method, mesh=mesh, offload_policy=policy)
        _send_parameters(method, weights, accelerator.device, offload=_offloads(plugin))
        self.optimizer = build_optimizer(method, optim)
        allocate_moments(self.adamw_state, trainable(method).values())

    @staticmethod
    def shards(accelerator: Accelerator) -> Shards:
        count = accelerator.num_processes // (groups().dp_replicate_size or 1)
        return Shards(count, count, count)

    def forward_backward(self, batch: Batch, step: int, *, last: bool) -> tuple[Tensor, dict[str, Tensor]]:
        cast(FSDPModule, self.method).set_requires_gradient_sync(last)
        with self.accelerator.autocast():
            loss, metrics = weighted(*self.method(batch, step))
        (loss / self.accelerator.gradient_accumulation_steps).backward()
        return loss.detach(), metrics

    def full_parameters(self, module: nn.Module) -> Iterator[Tensor]:
        for parameter in module.parameters():
            yield parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

    def local_state(self) -> dict[str, LocalTensor]:
        return local_state(self.method, self.adamw_state, _local_rows)


def _mesh(accelerator: Accelerator) -> DeviceMesh:
    """Return the mesh of all processes: (shards,), or under HSDP (copies, shards)."""
    copies, processes = groups().dp_replicate_size or 1, accelerator.num_processes
    if copies == 1:
        return init_device_mesh(accelerator.device.type, (processes,), mesh_dim_names=("shard",))
    shape = (copies, processes // copies)
    mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=("copy", "shard"))
    if accelerator.init_handler is not None:  # new groups have the default time-out, not that of the run
        for group in mesh.get_all_groups():
            _set_pg_timeout(accelerator.init_handler.timeout, group)
    return mesh


def _send_buffers(method: nn.Module, device: torch.device) -> None:
    """Send the main process's buffers to all processes, and move them to the device."""
    for module in method.modules():
        for name, buffer in module.named_buffers(recurse=False):
            own = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
            setattr(module, name, broadcast(own))


def _take_parameters(method: nn.Module) -> dict[str, Tensor]:
    """Replace the parameters of a method by parameters on the meta device. Return their values by name."""
    parameters, empty = dict(method.named_parameters()), meta_parameters(method)
    for module in method.modules():
        for name, own in list(module.named_parameters(recurse=False)):
            setattr(module, name, empty[id(own)])
    return {name: parameter.detach() for name, parameter in parameters.items()}


@torch.no_grad()
def _send_parameters(method: nn.Module, weights: dict[str, Tensor], device: torch.device, *, offload: bool) -> None:
    """Fill the shards of all processes with the main process's weights.

    The weights are sent one after the other, so that a device holds at most one full weight.

    Args:
        method: the sharded method, whose parameters are on the meta device.
        weights: full weights by name. Each weight is removed when it is sent. Except on the main process, the weights
            may be on the meta device.
        device: device of the process.
        offload: True if the shards are kept on the CPU.
    """
    shards: dict[str, Tensor] = {}
    for name, parameter in method.named_parameters():
        given, sharded = weights.pop(name), cast(DTensor, parameter)
        full = broadcast(torch.empty_like(given, device=device) if given.is_meta else given.to(device))
        rows = distribute_tensor(full, sharded.device_mesh, sharded.placements, src_data_rank=None)
        shards[name] = torch.empty_like(sharded, device="cpu" if offload else device)
        local(shards[name]).copy_(local(rows))
        del given, full, rows  # free the memory before the next weight is allocated
    method.load_state_dict(shards, strict=False, assign=True)  # not strict, because `shards` has no buffers


def _local_rows(tensor: Tensor) -> LocalTensor:
    """Return this process's rows of a tensor. The last processes may hold fewer rows than the others, or none."""
    if not isinstance(tensor, DTensor):
        return unsharded(tensor)
    mesh = tensor.device_mesh
    rows = -(-len(tensor) // mesh.size(-1))
    first = min(mesh.get_local_rank("shard") * rows, len(tensor))
    copies, copy = (mesh.size(0), mesh.get_local_rank("copy")) if mesh.ndim == 2 else (1, 0)
    data = local(tensor).detach().view(-1)
    row = math.prod(tensor.shape[1:])  # number of values in a row
    return LocalTensor(data, first * row, tensor.numel(), copies, copy)


def check_options(accelerator: Accelerator, precision: str) -> None:
    """Check the FSDP options of the launcher.

    Raises:
        SettingsError: an option is not supported.
    """
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise SettingsError("FSDP 1 is not supported. Set fsdp_version: 2 (configs/accelerate/fsdp2.yaml).")
    if precision == "fp16":
        raise SettingsError(
            "--precision fp16 is not supported under FSDP2, because this engine has no gradient scaler. "
            "Use --precision bf16."
        )
    if accelerator.num_processes == 1:
        raise SettingsError("FSDP2 needs two or more processes. Launch two or more, or launch without FSDP.")
    _check_groups(accelerator.num_processes)
    plugin = FullyShardedDataParallelPlugin()
    if _offloads(plugin) and accelerator.device.type == "cpu":
        raise SettingsError("fsdp_offload_params needs a GPU, and this run is on the CPU. Remove fsdp_offload_params.")
    if plugin.activation_checkpointing:
        raise SettingsError(
            "fsdp_activation_checkpointing is not supported. Remove it and set --encoder.checkpoint_activations true."
        )


def groups() -> ParallelismConfig:
    """Return the settings of process groups, which the launcher passes in environment variables.

    Raises:
        SettingsError: a size is out of range.
    """
    try:
        return ParallelismConfig()
    except ValueError as error:
        raise SettingsError(f"The launcher's parallelism_config is invalid: {error}") from None


def _check_groups(processes: int) -> None:
    """Check the launcher's settings of HSDP, if there are any.

    Raises:
        SettingsError: the groups do not fit the number of processes, or another kind of parallelism is set.
    """
    config = groups()
    if config.total_size == 1:
        return
    if config.non_data_parallel_size > 1:
        raise SettingsError(
            "Tensor, context and sequence parallelism are not supported. Remove tp_size, cp_size, sp_size."
        )
    copies, shards = config.dp_replicate_size or 1, config.dp_shard_size or 1
    if copies * shards != processes:
        raise SettingsError(
            f"dp_replicate_size {copies} x dp_shard_size {shards} are {copies * shards} processes, but {processes} "
            "were launched. Set dp_replicate_size to the number of process groups, and dp_shard_size to the number "
            "of processes in each group."
        )
    if shards == 1:
        raise SettingsError("dp_shard_size 1 shards nothing. Set it to 2 or more, or launch without FSDP.")


def _offloads(plugin: FullyShardedDataParallelPlugin) -> bool:
    return isinstance(plugin.cpu_offload, CPUOffloadPolicy)
