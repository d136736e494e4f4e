"""The interface of all encoders."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from encoders.images import Images, Mask, PackedImages


@dataclass(frozen=True)
class Preprocessing:
    """How pixel values from 0 to 1 become the input of an encoder: `(pixels - mean) / std`, channel by channel."""

    mean: tuple[float, ...]
    """One value per channel."""
    std: tuple[float, ...]
    """One positive value per channel."""

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not self.mean:
            raise ValueError(f"mean has {len(self.mean)} values and std has {len(self.std)}: give one per channel")
        if not all(0 < value < float("inf") for value in self.std):
            raise ValueError(f"std must be positive, not {list(self.std)}")

    @property
    def channels(self) -> int:
        """Number of channels."""
        return len(self.mean)


IMAGENET = Preprocessing(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
"""Channel means and standard deviations of ImageNet, in RGB order."""


class Features(NamedTuple):
    """What an encoder returns for B images. Class, register and distillation tokens never appear in `tokens`.

    A tuple, so that whoever wraps modules (ZeRO-3, FSDP) finds the tensors in it.
    """

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
    channels: int
    """channels of an image"""
    blocks: nn.ModuleList
    """the repeated parts, compiled one by one"""
    settings: dict[str, Any]
    """variant and constructor arguments, of an encoder made by `encoders.build`: what builds it again"""
    preprocessing: Preprocessing = IMAGENET
    """normalisation of the images that the encoder was trained with"""
    can_drop: bool = False
    """whether hidden tokens can be left out of the computation (`drop=True`)"""
    takes_packed: bool = False
    """whether images of many sizes can be packed in one batch"""
    undecayed: tuple[str, ...] = ()
    """parts of the names of parameters that weight decay leaves alone, by the encoder's paper, beside all vectors"""

    def forward(self, images: Images, mask: Mask | None = None, *, drop: bool = False) -> Features:
        """Encode `images` (B, C, H, W), normalised floats, or packed ones.

        With `mask`, hidden tokens carry no information of their pixels: they are replaced by a learned token, or with
        `drop` left out of the computation altogether.
        """
        raise NotImplementedError

    def intermediate(self, images: Images, blocks: int = 1) -> list[Features]:
        """Features after each of the last `blocks` blocks, final norm applied, the last block last."""
        raise NotImplementedError(f"{type(self).__name__} has no intermediate features")

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tokens of an image of `height` x `width` pixels."""
        return height // self.stride, width // self.stride

    def grids(self, images: Images) -> Tensor:
        """Grid (rows, columns) of each image: (B, 2) int64 on the CPU."""
        if isinstance(images, PackedImages):
            return images.grids
        return torch.tensor([self.grid(*images.shape[-2:])]).expand(len(images), 2)

    def check(self, images: Images, mask: Mask | None = None, *, drop: bool = False) -> None:
        """What every encoder asks of what it is given.

        Raises:
            ValueError: packed images, a mask or dropping where the encoder cannot take it, a wrong number of channels,
                images without a single token, or a mask of another grid.
        """
        name = type(self).__name__
        pixels = images.patches if isinstance(images, PackedImages) else images
        if not pixels.is_floating_point():
            raise ValueError(f"images must be normalised floats, not {pixels.dtype}")
        if isinstance(images, PackedImages):
            if not self.takes_packed:
                raise ValueError(f"{name} takes images of one size, (B, {self.channels}, H, W), not packed ones")
        elif images.ndim != 4 or images.shape[1] != self.channels:
            raise ValueError(
                f"{name} takes images of shape (B, {self.channels}, H, W), not {tuple(images.shape)}; "
                "for another number of channels build it with channels=N"
            )
        elif min(self.grid(*images.shape[-2:])) < 1:
            raise ValueError(
                f"images of {images.shape[-2]} x {images.shape[-1]} pixels are smaller than one patch of "
                f"{self.stride} x {self.stride}"
            )
        if drop and mask is None:
            raise ValueError("drop=True leaves out what a mask hides, and there is no mask")
        if drop and not self.can_drop:
            raise ValueError(
                f"{name} cannot drop hidden tokens, its grid must be full: hide them in place (drop=False)"
            )
        if mask is not None:
            mask.check(self.grids(images))
            if not drop and getattr(self, "mask_token", None) is None:
                hint = ", or drop=True" if self.can_drop else ""
                raise ValueError(f"hiding in place needs a mask token: build the encoder with mask_token=True{hint}")
