"""What goes into an encoder: images, and a mask on the encoder's output grid.

B images, C channels, H x W pixels; h x w grid of tokens; T = sum over images of h * w tokens; V visible tokens; P = patch * patch * C.
The tokens of a batch lie flat, image after image and row by row; `grids` (B, 2) says how they split.
"""

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor


@dataclass(frozen=True)
class Mask:
    """Which tokens of a batch are hidden. Lives on the encoder's output grid and is indexed like its tokens."""

    hidden: Tensor
    """(T,) bool"""
    visible: Tensor
    """(V,) int64, ascending: the flat places of the tokens that are not hidden"""
    lengths: Tensor
    """(B,) int64: visible tokens of each image"""

    @classmethod
    def from_hidden(cls, hidden: Tensor, grids: Tensor) -> "Mask":
        """From `hidden` (T,) bool and `grids` (B, 2).

        Raises:
            ValueError: `hidden` does not have one entry for each token.
        """
        counts = grids.prod(1).to(hidden.device)
        if hidden.shape != (int(counts.sum()),):
            raise ValueError(f"a mask of shape {tuple(hidden.shape)} does not fit {int(counts.sum())} tokens")
        images = torch.repeat_interleave(torch.arange(len(counts), device=hidden.device), counts)
        lengths = torch.zeros_like(counts).index_add_(0, images, (~hidden).to(counts.dtype))
        return cls(hidden, (~hidden).nonzero().squeeze(1), lengths)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Mask":
        moved = (t.to(device, non_blocking=non_blocking) for t in (self.hidden, self.visible, self.lengths))
        return Mask(*moved)

    def pin_memory(self) -> "Mask":
        return Mask(self.hidden.pin_memory(), self.visible.pin_memory(), self.lengths.pin_memory())


def patch_grids(images: Tensor, stride: int) -> Tensor:
    """Grid (rows, columns) of each image: (B, C, H, W) -> (B, 2) int64 on the CPU."""
    height, width = images.shape[-2:]
    return torch.tensor([[height // stride, width // stride]]).expand(len(images), 2)


def patchify(images: Tensor, patch: int) -> Tensor:
    """Pixels of each patch, (row, column, channel) order as in MAE (2111.06377): (B, C, H, W) -> (T, P).

    Raises:
        ValueError: a side is not a multiple of `patch`.
    """
    if images.shape[-2] % patch or images.shape[-1] % patch:
        raise ValueError(f"images of {images.shape[-2]} x {images.shape[-1]} pixels do not divide into patches of {patch}")
    return rearrange(images, "b c (h p1) (w p2) -> (b h w) (p1 p2 c)", p1=patch, p2=patch)
