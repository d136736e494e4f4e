"""A method and an encoder that are registered from outside, as another package would do it."""

import copy
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from tessera import encoders
from tessera.data.batch import Batch, SampleParameters
from tessera.data.collate import ViewShape
from tessera.data.crops import RandomCrop, RandomCropConfig
from tessera.data.masking import random_mask
from tessera.encoders.base import Encoder, Features
from tessera.encoders.images import Images, Mask
from tessera.encoders.unused import freeze_unused
from tessera.pretrain.methods import METHODS
from tessera.pretrain.methods.method import Method, RunSize
from tessera.pretrain.optim import ema
from tessera.pretrain.optim.adamw import OptimConfig


class ToyConv(Encoder):
    """A small convolutional network without drop path, attention or class token.

    Args:
        dim: width.
        depth: blocks.
        patch_size: pixels of a side of one token.
        image_size: side of the images in pixels.
        channels: channels of an image.
        mask_token: make a token for hidden patches.
        batch_norm: add batch norm to each block.
    """

    def __init__(
        self,
        dim: int = 16,
        depth: int = 2,
        patch_size: int = 4,
        image_size: int = 16,
        channels: int = 3,
        mask_token: bool = False,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.dim, self.stride, self.channels = dim, patch_size, channels
        self.patch_embed = nn.Conv2d(channels, dim, patch_size, patch_size)
        self.mask_token = nn.Parameter(torch.zeros(dim)) if mask_token else None
        blocks = [nn.Conv2d(dim, dim, 3, padding=1) for _ in range(depth)]
        self.blocks = nn.ModuleList(
            nn.Sequential(block, nn.BatchNorm2d(dim)) if batch_norm else block for block in blocks
        )

    def forward(self, images: Images, mask: Mask | None = None, *, drop: bool = False) -> Features:
        self.check(images, mask, drop=drop)
        assert isinstance(images, Tensor)
        rows, columns = self.grid(*images.shape[-2:])
        x = self.patch_embed(images)  # (B, D, h, w)
        if mask is not None and self.mask_token is not None:
            hidden = mask.hidden.view(-1, 1, rows, columns)
            x = torch.where(hidden, self.mask_token[:, None, None], x)
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return Features(x.mean((2, 3)), x.permute(0, 2, 3, 1).flatten(0, 2), self.grids(images))


class TwoViews:
    """Two random crops of an image. The second one has a mask."""

    packing = None

    def __init__(self, size: int, stride: int) -> None:
        self.crop, self.side = RandomCrop(RandomCropConfig(size=size)), size // stride
        self.views = (ViewShape(1, size), ViewShape(1, size))

    def draw(self, size: tuple[int, int], rng: np.random.Generator) -> SampleParameters:
        (clean,), (masked,) = self.crop.draw(size, rng), self.crop.draw(size, rng)
        masked.masks = (random_mask((self.side, self.side), 0.5, rng)[None],)
        return [clean, masked]


class ToyConfig(RandomCropConfig):
    """A toy method."""

    hidden_dim: int = Field(default=64, ge=1)
    """width of the predictor"""


class Toy(Method):
    """A student on a masked crop predicts the pooled features of its moving average on another crop (as in BYOL)."""

    Config = ToyConfig
    small_settings: ClassVar[dict[str, Any]] = {"size": 16, "hidden_dim": 8}

    def __init__(self, encoder: Encoder, config: ToyConfig, steps: int) -> None:
        super().__init__()
        self.config, self.image_size = config, config.size
        freeze_unused(encoder, [config.size], masked=True)
        self.encoder = encoder
        self.teacher = copy.deepcopy(encoder).requires_grad_(False)
        width = config.hidden_dim
        self.predictor = nn.Sequential(nn.Linear(encoder.dim, width), nn.GELU(), nn.Linear(width, encoder.dim))

    @staticmethod
    def resolve(config: ToyConfig, optim: OptimConfig, size: RunSize) -> tuple[ToyConfig, OptimConfig]:
        defaults = {"lr": 1e-3, "min_lr": 0.0, "warmup_steps": 0, "weight_decay": 0.0, "weight_decay_end": 0.0}
        return config, optim.filled(defaults | {"betas": (0.9, 0.999), "clip": 0.0})

    @staticmethod
    def encoder_defaults(config: ToyConfig, variant: str, size: RunSize) -> dict[str, Any]:
        return encoders.supported(variant, {"image_size": config.size, "mask_token": True})

    def transform(self) -> TwoViews:
        return TwoViews(self.config.size, self.encoder.stride)

    def forward(self, batch: Batch, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        clean, masked = batch.views
        with torch.no_grad():
            target = self.teacher(clean.images).pooled.float()  # (B, D)
        predicted = self.predictor(self.encoder(masked.images, masked.masks[0]).pooled).float()
        return 1 - F.cosine_similarity(predicted, target).mean(), {}

    def after_step(self, step: int) -> None:
        ema.update(self.teacher, self.encoder, 0.9)

    def trained_encoder(self) -> Encoder:
        return self.encoder

    def trained_parts(self) -> list[nn.Module]:
        return [self.encoder, self.predictor]


ENTRIES: list[tuple[dict[str, Any], str, Any]] = [
    (METHODS, "toy", Toy),
    (encoders.VARIANTS, "toy_conv_micro", {"family": ToyConv, "dim": 24}),
]
"""Dictionary, name and value of everything that is registered."""
