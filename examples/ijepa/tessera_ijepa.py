"""I-JEPA (2301.08243): from the visible context of an image, predict the features of target blocks.

A teacher, the moving average of the encoder, encodes the whole image. The encoder sees only a large context block,
without the tokens of the target blocks. A predictor gets the features of the context and the positions of one target
block at a time, and predicts the teacher's features of this block.

Shapes: B images; N tokens of an image; T = B * N; K target blocks of an image; V context tokens and M target tokens of
all images and blocks; D width of the encoder, E width of the predictor.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from tessera import encoders
from tessera.data.batch import Batch, SampleParameters
from tessera.data.crops import Areas, RandomCrop, RandomCropConfig, Ratios, Share
from tessera.encoders.base import Encoder
from tessera.encoders.blocks import Block
from tessera.encoders.images import Mask
from tessera.encoders.layers import sincos_table
from tessera.encoders.segments import Segments, copy_to_device
from tessera.encoders.unused import freeze_unused
from tessera.encoders.vit import ViT
from tessera.pretrain.methods.method import Method, RunSize
from tessera.pretrain.monitoring.collapse import column_variance
from tessera.pretrain.optim import ema
from tessera.pretrain.optim.adamw import OptimConfig
from tessera.pretrain.optim.schedules import linear
from tessera.runtime.settings import Derived, derived


class IJEPAConfig(RandomCropConfig):
    """Settings of I-JEPA. Each field is a flag `--ijepa.NAME`, and its docstring is the help of the flag."""

    scale: Areas = (0.3, 1.0)
    """smallest and largest area of a box before the resize, as a share of the image's area"""
    flip: Share = 0.0
    """probability that a crop is mirrored left to right"""
    context_scale: Areas = (0.85, 1.0)
    """smallest and largest area of the context block, as a share of the crop's area"""
    targets: int = Field(default=4, ge=1)
    """number of target blocks of an image (K)"""
    target_scale: Areas = (0.15, 0.2)
    """smallest and largest area of a target block, as a share of the crop's area"""
    target_ratio: Ratios = (0.75, 1.5)
    """smallest and largest ratio of height to width of a target block"""
    predictor_dim: Derived[int] = derived(ge=4, multiple_of=4)
    """width of the predictor (E); default: 384, or 192 for fewer than 100,000 images"""
    predictor_depth: Derived[int] = derived(ge=1)
    """number of blocks of the predictor; default: 6, or 2 for fewer than 100,000 images"""
    momentum: Derived[float] = derived(ge=0, le=1)
    """momentum of the teacher's moving average at the start of the run; it rises to 1 along a line; default: 0.996, or
    less for a run of fewer than 1500 steps"""


def draw_block(side: int, scale: Areas, ratio: Ratios, rng: np.random.Generator) -> np.ndarray:
    """Return a mask (side, side) bool that is True in a random rectangle."""
    area = rng.uniform(*scale) * side**2
    shape = math.exp(rng.uniform(*np.log(ratio)))  # height / width
    height, width = (min(max(round(math.sqrt(area * s)), 1), side) for s in (shape, 1 / shape))
    top, left = rng.integers(side - height + 1), rng.integers(side - width + 1)
    block = np.zeros((side, side), dtype=bool)
    block[top : top + height, left : left + width] = True
    return block


class BlockCrop:
    """Draws one crop of an image, a mask that hides all but the context, and a mask of each target block."""

    packing = None

    def __init__(self, config: IJEPAConfig, stride: int) -> None:
        self.config, self.crop, self.side = config, RandomCrop(config), config.size // stride
        self.views = self.crop.views

    def draw(self, size: tuple[int, int], rng: np.random.Generator) -> SampleParameters:
        """Draw the crop of an image of `size` (H, W), with K + 1 masks (1, h, w)."""
        (view,), c = self.crop.draw(size, rng), self.config
        for _ in range(100):  # until a token of the context remains
            blocks = [draw_block(self.side, c.target_scale, c.target_ratio, rng) for _ in range(c.targets)]
            context = draw_block(self.side, c.context_scale, (1.0, 1.0), rng) & ~np.any(blocks, axis=0)
            if context.any():
                return [replace(view, masks=tuple(mask[None] for mask in (~context, *blocks)))]
        raise ValueError("The target blocks cover the whole context. Set a smaller ijepa.target_scale.")


class Predictor(nn.Module):
    """Transformer that predicts the features of target tokens from the features of the context."""

    def __init__(self, features: int, dim: int, depth: int, side: int) -> None:
        super().__init__()
        self.embed = nn.Linear(features, dim)
        self.mask_token = nn.Parameter(torch.randn(dim) * 0.02)
        block = {"mlp_ratio": 4.0, "qkv_bias": True, "norm_eps": 1e-6, "layer_scale": None, "drop_path": 0.0}
        self.blocks = nn.ModuleList(Block(dim, max(dim // 32, 1), **block) for _ in range(depth))
        self.out = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, features))
        self.positions: Tensor
        self.register_buffer("positions", sincos_table(side, side, dim), persistent=False)  # (N, E)

    def forward(self, tokens: Tensor, context: Mask, targets: Sequence[Mask]) -> Tensor:
        """Return predictions (M, D), block after block, from the features (V, D) of the context."""
        tokens_per_image, images = len(self.positions), len(context.lengths)
        target = torch.cat([mask.hidden_indices for mask in targets])  # (M,)
        x = self.embed(tokens) + self.positions[context.visible % tokens_per_image]  # (V, E)
        queries = self.mask_token + self.positions[target % tokens_per_image]  # (M, E)
        # One sequence for each block of each image, so that the predictions of blocks do not depend on each other.
        blocks = [*enumerate([context.visible] * len(targets)), *enumerate(mask.hidden_indices for mask in targets)]
        sequence = torch.cat([k * images + index // tokens_per_image for k, index in blocks])
        order = sequence.argsort(stable=True)  # (K * V + M,)
        x = torch.cat([x] * len(targets) + [queries]).index_select(0, order)
        lengths = torch.cat([context.lengths + tokens_per_image - mask.lengths for mask in targets])  # (K * B,)
        segments = Segments(lengths, x.device)
        for block in self.blocks:
            x = block(x, segments)
        return self.out(x.index_select(0, order.argsort()[-len(target) :]))


def ijepa_loss(predicted: Tensor, target: Tensor, counts: Tensor) -> Tensor:
    """Return the smooth L1 distance of predicted and target features, (M, D) float32 each, as a mean over blocks.

    `counts` (K * B,) int64, on the CPU, is the number of tokens of each block. Every block has the same weight, so the
    loss does not depend on the split of images over processes.
    """
    distances = F.smooth_l1_loss(predicted, target, reduction="none").mean(1)  # (M,)
    weights = torch.repeat_interleave(1 / (counts * len(counts)), counts)  # (M,)
    return (distances * copy_to_device(weights, distances.device)).sum()


class IJEPA(Method):
    """The I-JEPA method: an encoder, its moving average (the teacher), and a predictor."""

    Config = IJEPAConfig
    small_settings: ClassVar[dict[str, Any]] = {"size": 16, "predictor_dim": 16, "predictor_depth": 1}

    def __init__(self, encoder: Encoder, config: IJEPAConfig, steps: int) -> None:
        super().__init__()
        self.config, self.steps, self.image_size = config, steps, config.size
        side = config.size // encoder.stride
        if config.size % encoder.stride or side < 2:
            raise ValueError(f"ijepa.size must be a multiple of {encoder.stride}, and at least {2 * encoder.stride}.")
        freeze_unused(encoder, [config.size], pooled=False, tokens=True, masked=True, drop=encoder.can_drop)
        self.encoder = encoder
        self.teacher = copy.deepcopy(encoder).requires_grad_(False).eval()
        self.predictor = Predictor(encoder.dim, config.predictor_dim, config.predictor_depth, side)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.teacher.eval()
        return self

    @staticmethod
    def resolve(config: IJEPAConfig, optim: OptimConfig, size: RunSize) -> tuple[IJEPAConfig, OptimConfig]:
        momentum = round(1 - 1 / min(max(size.steps / 6, 10), 250), 6)
        own = {"predictor_dim": 384 if size.large else 192, "predictor_depth": 6 if size.large else 2}
        lr = 1.25e-4 if size.large else size.small_lr(2e-3)
        schedule = {"lr": lr, "min_lr": 1e-6, "warmup_steps": min(40 * size.epoch, size.steps // 10), "clip": 0.0}
        decay = {"weight_decay": 0.04, "weight_decay_end": 0.4, "betas": (0.9, 0.999)}
        return config.filled(own | {"momentum": momentum}), optim.filled(schedule | decay)

    @staticmethod
    def encoder_defaults(config: IJEPAConfig, variant: str, size: RunSize) -> dict[str, Any]:
        family = encoders.family(variant)
        positions = {"positions": "sincos"} if issubclass(family, ViT) else {}
        own = {"image_size": config.size, "mask_token": not family.can_drop, "pool": "mean"}
        return encoders.supported(variant, own | positions)

    def transform(self) -> BlockCrop:
        return BlockCrop(self.config, self.encoder.stride)

    def forward(self, batch: Batch, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        (view,) = batch.views
        context, *targets = view.masks
        with torch.no_grad():
            whole = self.teacher(view.images)
            target = F.layer_norm(whole.tokens.float(), whole.tokens.shape[-1:])  # (T, D)
        seen = self.encoder.visible(view.images, context)  # tokens (V, D)
        predicted = self.predictor(seen.tokens, context, targets).float()  # (M, D)
        chosen = target.index_select(0, torch.cat([mask.hidden_indices for mask in targets]))  # (M, D)
        counts = torch.cat([whole.grids.prod(1) - mask.lengths for mask in targets])  # (K * B,)
        return ijepa_loss(predicted, chosen, counts), {"target_spread": column_variance(target).sqrt().mean()}

    def after_step(self, step: int, updated: float | Tensor = 1.0) -> None:
        ema.update(self.teacher, self.encoder, linear(step, self.steps, self.config.momentum, 1.0), updated)

    def trained_encoder(self) -> Encoder:
        return self.teacher

    def trained_parts(self) -> list[nn.Module]:
        return [self.encoder, self.predictor]
