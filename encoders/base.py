"""The interface of all encoders."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from encoders.images import Mask


@dataclass(frozen=True)
class Features:
    """What an encoder returns for B images. Class, register and distillation tokens never appear in `tokens`."""

    pooled: Tensor
    """(B, D): one vector an image"""
    tokens: Tensor
    """(T, D), flat, image after image and row by row; (V, D) when hidden tokens were dropped"""
    grids: Tensor
    """(B, 2) int64 on the CPU: rows and columns of tokens of each image"""


class Encoder(nn.Module):
    """Images in, features out. What an encoder cannot do raises when it is asked for."""

    dim: int
    """width D of `pooled` and `tokens`"""
    stride: int
    """pixels of a side of one token"""
    blocks: nn.ModuleList
    """the repeated parts, compiled one by one"""
    settings: dict[str, Any]
    """variant and constructor arguments, of an encoder made by `encoders.build`: what builds it again"""
    can_drop: bool = False
    """whether hidden tokens can be left out of the computation (`drop=True`)"""
    takes_packed: bool = False
    """whether images of many sizes can be packed in one sequence"""

    def forward(self, images: Tensor, mask: Mask | None = None, *, drop: bool = False) -> Features:
        """Encode `images` (B, C, H, W), normalised floats.

        With `mask`, hidden tokens carry no information of their pixels: they are replaced by a learned token, or with
        `drop` left out of the computation altogether.
        """
        raise NotImplementedError

    def intermediate(self, images: Tensor, blocks: int = 1) -> list[Features]:
        """Features after each of the last `blocks` blocks, final norm applied, the last block last."""
        raise NotImplementedError(f"{type(self).__name__} has no intermediate features")
