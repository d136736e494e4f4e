"""Weights, images and masks made by hand, for tests of encoders and of weight formats."""

import math
from collections.abc import Sequence
from typing import Any

import timm
import torch
from torch import Tensor, nn

from tessera import encoders
from tessera.encoders.base import Features
from tessera.encoders.images import Mask

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 5e-5}
MICRO = [name for name in encoders.VARIANTS if name.endswith("_micro")]
"""Smallest variant of each family."""

SMALL: dict[str, dict[str, Any]] = {
    "vit_small": {"dim": 48, "depth": 2, "heads": 3, "patch_size": 8, "image_size": 32},
    "rope_vit_small": {
        "dim": 48, "depth": 3, "heads": 3, "patch_size": 8, "image_size": 32, "layer_scale": 0.5, "mask_token": False
    },
    "sam_vit_b": {
        "dim": 48, "depth": 3, "heads": 3, "out_dim": 20, "patch_size": 4, "image_size": 24, "window_size": 4,
        "global_blocks": (1,),
    },
    "swin_tiny": {"dim": 24, "depths": (2, 2, 3), "heads": (1, 2, 4), "window_size": 4, "image_size": 64},
    "twins_svt_small": {"dims": (32, 64), "depths": (2, 2), "heads": (1, 2), "reductions": (2, 1), "window_size": 4},
    "twins_svt_vit_pytorch": {
        "dims": (12, 20, 24, 36), "depths": (1, 2, 1, 2), "window_size": (4, 4, 2, 7), "reductions": (4, 2, 2, 1),
        "patch_size": 2,
    },
    "navit_small": {
        "dim": 48, "depth": 2, "heads": 3, "patch_size": 4, "image_size": (16, 24), "head_dim": 20, "mlp_ratio": 2.5
    },
}  # fmt: skip
"""Settings of a small encoder of each family and layout."""


@torch.no_grad()
def scramble(model: Any, seed: int = 0) -> Any:
    """Draw weights far from any initial value, so that every part of the model shows in its output."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        matrix = weight.ndim in (2, 4) and not any(part in name for part in ("pos", "table", "token"))
        spread = 1 / math.sqrt(weight[:1].numel() or 1) if matrix else 0.3
        weight.normal_(0, spread, generator=generator)
        gain = "norm" in name and name.endswith("weight")
        if gain or name.endswith((".g", "norm.gamma")):
            weight += 1
    return model.eval()


def small(variant: str, **settings: Any) -> Any:
    """A small encoder with weights of its own, in evaluation mode."""
    return scramble(encoders.build(variant, **SMALL[variant] | settings), seed=1)


def timm_vit(**options: Any) -> Any:
    """A ViT of timm for images of 32 pixels."""
    size: dict[str, Any] = {
        "img_size": 32,
        "patch_size": 8,
        "embed_dim": 48,
        "depth": 2,
        "num_heads": 3,
        "num_classes": 0,
    }
    return scramble(timm.models.VisionTransformer(**size | options))


def images_of(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mask_of(grids: Tensor, hidden: int | Sequence[int], seed: int = 2) -> Mask:
    """Hide so many tokens of each image with these `grids` (B, 2), at random places."""
    generator = torch.Generator().manual_seed(seed)
    counts = [hidden] * len(grids) if isinstance(hidden, int) else hidden
    order = [torch.rand(int(tokens), generator=generator).argsort().argsort() for tokens in grids.prod(1)]
    return Mask.from_hidden(torch.cat([o < count for o, count in zip(order, counts, strict=True)]), grids)


def first_input(encoder: encoders.Encoder, *inputs: Any, **options: Any) -> Tensor:
    """Return what the first block gets."""
    seen = []
    block = next(module for module in encoder.blocks.modules() if not isinstance(module, nn.ModuleList))
    handle = block.register_forward_pre_hook(lambda block, args: seen.append(args[0]))
    encoder(*inputs, **options)
    handle.remove()
    return seen[0]


def same(left: Features, right: Features) -> bool:
    return torch.equal(left.pooled, right.pooled) and torch.equal(left.tokens, right.tokens)


def error(found: Tensor, exact: Tensor) -> float:
    """Return the root mean square of the difference, relative to that of the exact values."""
    return float(((found - exact).norm() / exact.norm()).detach())


def outputs(encoder: Any, images: Any, *, autocast: bool = False) -> tuple[Features, Tensor]:
    """Return the features of images, and the gradient of all parameters in one vector."""
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        features: Features = encoder(images)
    (features.pooled.float().sin().sum() + features.tokens.float().cos().sum()).backward()
    return features, torch.cat([p.grad.flatten() for p in encoder.parameters() if p.grad is not None])
