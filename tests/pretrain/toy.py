"""An encoder, a method with labels and a sink of another package."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.encoders.base import Encoder, Features
from tessera.encoders.images import Images, Mask
from tessera.pretrain.methods.method import Method, RunSize
from tessera.pretrain.monitoring.sinks import Record, Sink
from tessera.pretrain.optim.adamw import OptimConfig
from tessera.runtime.settings import Section


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


class ToyLabels(Method):
    """A method that trains a linear classifier of the pooled features."""

    class Config(Section):
        """Settings of the classifier."""

        classes: int | None = None
        """number of classes"""

    supervised = True

    def __init__(self, encoder: Encoder, config: Config, steps: int) -> None:
        super().__init__()
        assert config.classes
        self.encoder, self.classes, self.image_size = encoder, config.classes, 16
        self.head = nn.Linear(encoder.dim, config.classes)

    @staticmethod
    def resolve(config: Any, optim: OptimConfig, size: RunSize) -> tuple[Section, OptimConfig]:
        optimizer = {"lr": 1e-3, "min_lr": 0.0, "warmup_steps": 0, "weight_decay": 0.0, "weight_decay_end": 0.0}
        return config.filled({"classes": size.classes}), optim.filled(optimizer | {"betas": (0.9, 0.99), "clip": 0.0})

    def logits(self, images: Images) -> Tensor:
        return self.head(self.encoder(images).pooled)

    def trained_encoder(self) -> Encoder:
        return self.encoder


MICRO = {"family": ToyConv, "dim": 24}


class Losses(Sink):
    """A sink that writes OUTPUT/losses.txt, with the step and the loss in each line."""

    def __init__(self, output: Path, step: int, settings: Mapping[str, Any]) -> None:
        self.path = output / "losses.txt"
        lines = self.path.read_text().splitlines(keepends=True) if self.path.exists() else []
        self.path.write_text("".join(line for line in lines if step and int(line.split()[0]) <= step))

    def write(self, step: int, record: Record) -> None:
        with self.path.open("a") as file:
            file.write(f"{step} {record.get('loss')}\n")


POINTS = {
    "tessera.encoders": {"toy_conv_micro": f"{__name__}:MICRO"},
    "tessera.sinks": {"losses": f"{__name__}:Losses", "broken": "no_such_module:Sink"},
}
"""Entry points of a package that provides the encoder and the sink."""
