"""AdamW: settings, parameter groups, schedules and gradient clipping."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from tessera.encoders.base import Encoder
from tessera.pretrain.optim.schedules import cosine
from tessera.pretrain.optim.small_tensors import scale_each
from tessera.runtime.collectives import all_reduce_sum
from tessera.runtime.settings import Derived, Section, derived

Beta = Annotated[float, Field(ge=0, lt=1)]
LrScaling = Literal["linear", "sqrt", "none"]


class OptimConfig(Section, frozen=True):
    """Settings of AdamW. Missing values are set by the method, and some of them depend on the length of the run."""

    lr: Derived[float] = derived(gt=0)
    """learning rate at the reference batch size, which is 256 for lr_scaling linear and 1024 for sqrt"""
    lr_scaling: LrScaling = "linear"
    """rule that scales lr by the batch size. linear: lr * batch_size / 256; sqrt: lr * sqrt(batch_size / 1024), as in
    DINOv2; none: lr for every batch size"""
    min_lr: Derived[float] = derived(ge=0)
    """learning rate at the end of the run; not scaled by the batch size"""
    warmup_steps: Derived[int] = derived(ge=0)
    """number of steps over which the learning rate rises linearly from 0 to its peak"""
    reach_lr_in_warmup: bool = True
    """true: reach lr in the last step of the warm-up, as DINO does; false: in the first step after the warm-up, as MAE
    does"""
    layer_decay: float = Field(default=1.0, gt=0, le=1)
    """factor by which the learning rate decreases from each layer to the layer below it: the factor of a layer is
    layer_decay ** (depth + 1 - layer)"""
    patch_embed_lr_factor: float = Field(default=1.0, gt=0)
    """factor on the learning rate of the patch embedding, in addition to layer_decay"""
    encoder_lr_factor: Derived[float] = derived(gt=0)
    """factor on the learning rate of the encoder; default: 0.1 if `init_from` loads an encoder without heads, so that
    only the new heads learn at the full rate, else 1"""
    weight_decay: Derived[float] = derived(ge=0)
    """weight decay at the start of the run; biases, norms, other vectors and the parameters that the encoder's paper
    exempts have no weight decay"""
    weight_decay_end: Derived[float] = derived(ge=0)
    """weight decay at the end of the run; in between, the weight decay follows a cosine"""
    betas: Derived[tuple[Beta, Beta]] = derived()
    """decay rates of AdamW's two moments (beta1, beta2)"""
    eps: float = Field(default=1e-8, gt=0)
    """epsilon of AdamW, which is added to the denominator of the update"""
    clip: Derived[float] = derived(ge=0)
    """largest allowed gradient norm, to which larger gradients are clipped; 0 disables clipping"""
    clip_by: Literal["tensor", "module", "global"] = "tensor"
    """parameters that share one gradient norm: tensor (each parameter tensor, as in DINO), module (each module of
    the student, as in DINOv2) or global (all parameters)"""
    nonfinite_limit: int = Field(default=20, ge=1)
    """number of consecutive steps with a loss or gradient that is not finite, after which the run stops"""

    def filled(self, defaults: Mapping[str, Any]) -> Self:
        return super().filled({"encoder_lr_factor": 1.0, **defaults})

    def scaled_lr(self, batch_size: int) -> float:
        """Return the peak learning rate for `batch_size` images per step."""
        if self.lr_scaling == "linear":
            return self.lr * batch_size / 256
        if self.lr_scaling == "sqrt":
            return self.lr * math.sqrt(batch_size / 1024)
        return self.lr

    def scaling_rule(self, batch_size: int) -> str:
        """Describe for the log how `scaled_lr` is computed from `lr`. Return an empty string if both are equal."""
        if self.scaled_lr(batch_size) == self.lr:
            return ""
        factor = f"{batch_size} / 256" if self.lr_scaling == "linear" else f"sqrt({batch_size} / 1024)"
        return f" (optim.lr {self.lr:.3g} * {factor}; see optim.lr_scaling)"


def adamw(method: nn.Module, config: OptimConfig, frozen: Mapping[str, int]) -> torch.optim.AdamW:
    """Return AdamW over the trainable parameters of a method, grouped by `parameter_groups`.

    With `fused`, one kernel updates many parameters. For a small encoder on a CPU, such an update takes a fraction of
    the time of an update without `fused`.
    """
    groups = parameter_groups(method, frozen, learning_rate_factors(method, config))
    return torch.optim.AdamW(groups, lr=0.0, betas=config.betas, eps=config.eps, fused=True)


def flat_blocks(encoder: Encoder) -> list[nn.Module]:
    """Return the blocks of an encoder in one list, even if `Encoder.blocks` holds one list per stage (Twins)."""
    stages = (block if isinstance(block, nn.ModuleList) else [block] for block in encoder.blocks)
    return [block for stage in stages for block in stage]


def layers(encoder: Encoder) -> Iterator[tuple[str, nn.Parameter, int]]:
    """Yield name, parameter and layer index for each parameter of an encoder.

    The layers are numbered as in BEiT's fine-tuning. Layer 0 holds everything before the first block: embeddings,
    positions and tokens. Block i is layer i + 1. Everything after the last block is layer depth + 1. A module between
    two blocks, such as Swin's downsampling, belongs to the layer of the block before it.
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


def learning_rate_factors(method: nn.Module, config: OptimConfig) -> dict[nn.Parameter, float]:
    """Return the learning-rate factor of each encoder parameter, without factors of 1."""
    factors: dict[nn.Parameter, float] = {}
    for encoder in (module for module in method.modules() if isinstance(module, Encoder)):
        last = len(flat_blocks(encoder)) + 1
        for name, parameter, layer in layers(encoder):
            factors[parameter] = config.encoder_lr_factor * config.layer_decay ** (last - layer)
            if name.startswith("patch_embed"):
                factors[parameter] *= config.patch_embed_lr_factor
    return {parameter: factor for parameter, factor in factors.items() if factor != 1.0}


def parameter_groups(
    method: nn.Module, frozen: Mapping[str, int], factors: Mapping[nn.Parameter, float] | None = None
) -> list[dict[str, Any]]:
    """Return AdamW's parameter groups: trainable parameters split by weight decay, freezing and learning-rate factor.

    Biases, vectors and `Encoder.no_weight_decay` parameters have no weight decay. While a group is frozen, its learning
    rate is 0, which works under every engine. DINO's official code deletes the gradients of frozen parameters, but
    under ZeRO that has no effect.

    Args:
        frozen: Map from a prefix of parameter names to the number of steps with learning rate 0, from
            `Method.frozen()`.
        factors: Learning-rate factors that are not 1, from `learning_rate_factors`.
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
    optimizer: torch.optim.Optimizer, config: OptimConfig, step: int, steps: int, batch_size: int
) -> None:
    """Set the learning rate and weight decay of each parameter group for step `step` of a run of `steps` steps."""
    peak, reach = config.scaled_lr(batch_size), config.reach_lr_in_warmup
    lr = cosine(step, steps, peak, config.min_lr, config.warmup_steps, reach_in_warmup=reach)
    weight_decay = cosine(step, steps, config.weight_decay, config.weight_decay_end)
    for group in optimizer.param_groups:
        group["lr"] = 0.0 if step < group["frozen_steps"] else lr * group["lr_factor"]
        group["weight_decay"] = weight_decay if group["decays"] else 0.0


@torch.no_grad()
def clip_gradients(
    grads: Sequence[Sequence[Tensor]], limit: float, by: str, *, sharded: bool = False, copies: int = 1
) -> Tensor:
    """Scale gradients in place so that no norm is above `limit`, and return the float32 global norm before scaling.

    If `limit` is 0, gradients are not scaled. The function does not wait for the device.

    Args:
        grads: Gradients of each module, one list per module.
        by: Gradients over which one norm is computed: "tensor", "module" or "global" (all gradients).
        sharded: True if each process holds a part of every tensor, which may be empty.
        copies: Number of processes that hold the same part, if `sharded` is True.
    """
    flat = [g for part in grads for g in part]
    norms = torch.stack(torch._foreach_norm(flat))  # pyright: ignore[reportPrivateImportUsage]  # (tensors,)
    if sharded:
        norms = (all_reduce_sum(norms.square()) / copies).sqrt()
    total = norms.norm()
    if limit == 0:
        return total
    if by == "tensor":
        scale_each(flat, _scales(norms, limit))
    elif by == "module":
        sizes = [len(part) for part in grads]
        for part, own in zip(grads, norms.split(sizes), strict=True):
            if part:
                torch._foreach_mul_(list(part), _scales(own.norm(), limit))  # pyright: ignore[reportPrivateImportUsage]
    else:
        torch._foreach_mul_(flat, _scales(total, limit))  # pyright: ignore[reportPrivateImportUsage]
    return total


def _scales(norms: Tensor, limit: float) -> Tensor:
    """Return the factors that lower norms to `limit`; 1 for smaller norms."""
    return (limit / (norms + 1e-6)).clamp(max=1.0)
