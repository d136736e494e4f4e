"""AdamW's parameter groups, their schedules, and three ways to clip gradients."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from encoders.base import Encoder
from pretrain.optim.schedules import cosine
from runtime.collectives import all_reduce_sum
from runtime.settings import Section


class OptimConfig(Section):
    """AdamW. What is not set follows from the method, the size of the data, the batch and the length of the run."""

    lr: float | None = Field(default=None, gt=0)
    """learning rate for 256 images a step; scaled linearly with the batch size"""
    min_lr: float | None = Field(default=None, ge=0)
    """learning rate at the end of the run (not scaled)"""
    warmup_steps: int | None = Field(default=None, ge=0)
    """steps over which the learning rate rises linearly from 0"""
    weight_decay: float | None = Field(default=None, ge=0)
    """weight decay at the start; biases, norms, other vectors and what the encoder's paper exempts have none"""
    weight_decay_end: float | None = Field(default=None, ge=0)
    """weight decay at the end (cosine in between)"""
    betas: tuple[float, float] | None = None
    """AdamW's decay rates of the two moments"""
    clip: float | None = Field(default=None, ge=0)
    """largest gradient norm; 0 leaves gradients as they are"""
    clip_by: Literal["tensor", "module", "global"] = "tensor"
    """what the norm is taken of: each parameter tensor (DINO), each part of the student (DINOv2), or all"""
    nonfinite_limit: int = Field(default=20, ge=1)
    """skipped steps in a row (loss or gradient not finite) after which the run stops"""


def parameter_groups(method: nn.Module, frozen: Mapping[str, int]) -> list[dict[str, Any]]:
    """Trainable parameters, split by weight decay (no biases, no vectors, nothing that is `undecayed` in its encoder)
    and by how long they stay frozen.

    `frozen` maps a prefix of parameter names to the steps during which those parameters keep learning rate 0. A group
    with learning rate 0 freezes under every engine; deleting gradients, as DINO does, is not seen by ZeRO.
    """
    encoders = [module for module in method.modules() if isinstance(module, Encoder)]
    undecayed = {
        parameter
        for encoder in encoders
        for name, parameter in encoder.named_parameters()
        if any(part in name for part in encoder.undecayed)
    }
    groups: dict[tuple[bool, int], list[nn.Parameter]] = {}
    for name, parameter in method.named_parameters():
        if not parameter.requires_grad:
            continue
        decays = parameter.ndim > 1 and not name.endswith(".bias") and parameter not in undecayed
        steps = max((n for prefix, n in frozen.items() if name.startswith(prefix)), default=0)
        groups.setdefault((decays, steps), []).append(parameter)
    return [
        {"params": parameters, "decays": decays, "frozen_steps": steps}
        for (decays, steps), parameters in sorted(groups.items(), key=lambda item: item[0], reverse=True)
    ]


def apply_schedules(optimizer: torch.optim.Optimizer, config: Any, step: int, steps: int, batch_size: int) -> None:
    """Set each group's learning rate and weight decay for `step` of `steps`; `config` is a resolved `OptimConfig`."""
    lr = cosine(step, steps, config.lr * batch_size / 256, config.min_lr, config.warmup_steps)
    weight_decay = cosine(step, steps, config.weight_decay, config.weight_decay_end)
    for group in optimizer.param_groups:
        group["lr"] = 0.0 if step < group["frozen_steps"] else lr
        group["weight_decay"] = weight_decay if group["decays"] else 0.0


@torch.no_grad()
def clip_gradients(grads: Sequence[Sequence[Tensor]], limit: float, by: str, *, sharded: bool = False) -> Tensor:
    """Scale gradients so that no norm is above `limit` (0: none), and return the global norm before () float32.

    Nothing here waits for the device.

    Args:
        grads: tensor after tensor of each of the modules whose norms count apart under "module".
        by: what the norm is taken of: "tensor", "module" or "global".
        sharded: each process has a part of every tensor, perhaps an empty one.
    """
    flat = [g for part in grads for g in part]
    if not flat:
        raise ValueError("no parameter has a gradient: call this after backward")
    norms = torch.stack(torch._foreach_norm(flat))  # pyright: ignore[reportPrivateImportUsage]  # (tensors,)
    if sharded:
        norms = all_reduce_sum(norms.square()).sqrt()
    total = norms.norm()
    if limit == 0:
        return total
    if by == "tensor":
        each = norms
    elif by == "module":
        each = torch.cat([n.norm().expand(len(n)) for n in norms.split([len(part) for part in grads]) if len(n)])
    else:
        each = total.expand(len(flat))
    scales = (limit / (each + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(flat, list(scales.unbind()))  # pyright: ignore[reportPrivateImportUsage]
    return total
