"""AdamW: settings, parameter groups, schedules, and three ways to clip gradients."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from encoders.base import Encoder
from pretrain.optim.schedules import cosine
from runtime.collectives import all_reduce_sum
from runtime.settings import Section

LrScaling = Literal["linear", "sqrt", "none"]


class OptimConfig(Section, frozen=True):
    """AdamW. A setting that is not given takes the default of the method; several follow from the length of the run."""

    lr: float | None = Field(default=None, gt=0)
    """learning rate at the reference batch size of lr_scaling"""
    lr_scaling: LrScaling = "linear"
    """rule for other batch sizes. linear: lr * batch_size / 256; sqrt: lr * sqrt(batch_size / 1024), as in DINOv2;
    none: lr for every batch size"""
    min_lr: float | None = Field(default=None, ge=0)
    """learning rate at the end of the run (not scaled)"""
    warmup_steps: int | None = Field(default=None, ge=0)
    """steps over which the learning rate rises linearly from 0"""
    reach_lr_in_warmup: bool = True
    """reach lr in the last step of the warm-up, as DINO does; false: in the step after it, as MAE does"""
    layer_decay: float = Field(default=1.0, gt=0, le=1)
    """factor on the learning rate per layer below the last: layer_decay ** (depth + 1 - layer)"""
    patch_embed_lr_factor: float = Field(default=1.0, gt=0)
    """factor on the learning rate of the patch embedding, times that of layer_decay"""
    weight_decay: float | None = Field(default=None, ge=0)
    """weight decay at the start; not used for biases, norms, other vectors and parameters that the encoder's paper
    exempts"""
    weight_decay_end: float | None = Field(default=None, ge=0)
    """weight decay at the end (cosine in between)"""
    betas: tuple[float, float] | None = None
    """AdamW's decay rates of the two moments"""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon, the term added to the denominator"""
    clip: float | None = Field(default=None, ge=0)
    """largest gradient norm; 0 disables clipping"""
    clip_by: Literal["tensor", "module", "global"] = "tensor"
    """unit of the norm: each parameter tensor (DINO), each part of the student (DINOv2), or all parameters"""
    nonfinite_limit: int = Field(default=20, ge=1)
    """skipped steps in a row (loss or gradient not finite) after which the run stops"""


class ResolvedOptim(OptimConfig, frozen=True):
    """Settings of AdamW with all values set."""

    lr: float = Field()
    min_lr: float = Field()
    warmup_steps: int = Field()
    weight_decay: float = Field()
    weight_decay_end: float = Field()
    betas: tuple[float, float] = Field()
    clip: float = Field()

    def scaled_lr(self, batch_size: int) -> float:
        """Return the peak learning rate for `batch_size` images per step."""
        if self.lr_scaling == "linear":
            return self.lr * batch_size / 256
        if self.lr_scaling == "sqrt":
            return self.lr * math.sqrt(batch_size / 1024)
        return self.lr


def adamw(
    method: nn.Module, config: ResolvedOptim, frozen: Mapping[str, int], factors: Mapping[str, float]
) -> torch.optim.AdamW:
    """Return the optimizer of a method's trainable parameters; see `parameter_groups`."""
    groups = parameter_groups(method, frozen, learning_rate_factors(method, config, factors))
    return torch.optim.AdamW(groups, lr=0.0, betas=config.betas, eps=config.eps)


def flat_blocks(encoder: Encoder) -> list[nn.Module]:
    """Return the blocks of an encoder in one list, even if `Encoder.blocks` holds one list per stage (Twins)."""
    stages = (block if isinstance(block, nn.ModuleList) else [block] for block in encoder.blocks)
    return [block for stage in stages for block in stage]


def layers(encoder: Encoder) -> Iterator[tuple[str, nn.Parameter, int]]:
    """Yield the name, parameter and layer of each parameter of an encoder; layers are numbered as in BEiT's
    fine-tuning.

    Layer 0 holds everything before the first block: embeddings, positions and tokens. Block i is layer i + 1.
    Everything after the last block is layer depth + 1. A part between two blocks, such as Swin's downsampling, belongs
    to the layer of the block before it.
    """
    blocks = flat_blocks(encoder)
    layer_of = {parameter: i + 1 for i, block in enumerate(blocks) for parameter in block.parameters()}
    layer = 0
    for name, parameter in encoder.named_parameters():
        inside = layer_of.get(parameter)
        if inside is None and layer == len(blocks):
            layer = len(blocks) + 1
        layer = inside or layer
        yield name, parameter, layer


def learning_rate_factors(
    method: nn.Module, config: ResolvedOptim, prefixes: Mapping[str, float]
) -> dict[nn.Parameter, float]:
    """Return the factor on the learning rate of each parameter whose factor is not 1.

    Args:
        prefixes: Factors by prefix of parameter names, `Method.lr_factors()`.
    """
    factors: dict[nn.Parameter, float] = {}
    for encoder in (module for module in method.modules() if isinstance(module, Encoder)):
        last = len(flat_blocks(encoder)) + 1
        for name, parameter, layer in layers(encoder):
            factors[parameter] = config.layer_decay ** (last - layer)
            if name.startswith("patch_embed"):
                factors[parameter] *= config.patch_embed_lr_factor
    for name, parameter in method.named_parameters():
        for prefix, factor in prefixes.items():
            if name.startswith(prefix):
                factors[parameter] = factors.get(parameter, 1.0) * factor
    return {parameter: factor for parameter, factor in factors.items() if factor != 1.0}


def parameter_groups(
    method: nn.Module, frozen: Mapping[str, int], factors: Mapping[nn.Parameter, float] | None = None
) -> list[dict[str, Any]]:
    """Return AdamW's parameter groups: trainable parameters split by weight decay, freezing and learning-rate factor.

    Biases, vectors and `Encoder.no_weight_decay` parameters have no weight decay. A frozen group has learning rate 0,
    which works under every engine. DINO's official code deletes gradients instead, which has no effect under ZeRO.

    Args:
        frozen: Steps of learning rate 0 by prefix of parameter names, `Method.frozen()`.
        factors: Factors on the learning rate that are not 1, from `learning_rate_factors`.
    """
    encoders = [module for module in method.modules() if isinstance(module, Encoder)]
    undecayed = {
        parameter
        for encoder in encoders
        for name, parameter in encoder.named_parameters()
        if any(part in name for part in encoder.no_weight_decay)
    }
    groups: dict[tuple[bool, int, float], list[nn.Parameter]] = {}
    for name, parameter in method.named_parameters():
        if not parameter.requires_grad:
            continue
        decays = parameter.ndim > 1 and not name.endswith(".bias") and parameter not in undecayed
        steps = max((n for prefix, n in frozen.items() if name.startswith(prefix)), default=0)
        factor = factors.get(parameter, 1.0) if factors else 1.0
        groups.setdefault((decays, steps, factor), []).append(parameter)
    return [
        {"params": parameters, "decays": decays, "frozen_steps": steps, "lr_factor": factor}
        for (decays, steps, factor), parameters in sorted(groups.items(), key=lambda item: item[0], reverse=True)
    ]


def apply_schedules(
    optimizer: torch.optim.Optimizer, config: ResolvedOptim, step: int, steps: int, batch_size: int
) -> None:
    """Set each group's learning rate and weight decay for `step` of `steps`."""
    peak, reach = config.scaled_lr(batch_size), config.reach_lr_in_warmup
    lr = cosine(step, steps, peak, config.min_lr, config.warmup_steps, reach_in_warmup=reach)
    weight_decay = cosine(step, steps, config.weight_decay, config.weight_decay_end)
    for group in optimizer.param_groups:
        group["lr"] = 0.0 if step < group["frozen_steps"] else lr * group["lr_factor"]
        group["weight_decay"] = weight_decay if group["decays"] else 0.0


@torch.no_grad()
def clip_gradients(grads: Sequence[Sequence[Tensor]], limit: float, by: str, *, sharded: bool = False) -> Tensor:
    """Scale gradients so that no norm is above `limit` (0: no limit). Return the global norm before scaling, float32.

    Does not wait for the device.

    Args:
        grads: Gradients of each module, one list per module.
        by: Unit of the norm: "tensor", "module" or "global".
        sharded: True if each process holds a part of every tensor, which may be empty.
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
