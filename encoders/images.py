"""What goes into an encoder: images, and a mask on the encoder's output grid.

B images, C channels, H x W pixels; h x w grid of tokens; T = sum over images of h * w tokens; V visible tokens;
P = patch * patch * C. The tokens of a batch lie flat, image after image and row by row; `grids` (B, 2) says how they
split.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
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
    """(B,) int64 on the CPU: visible tokens of each image, which decide shapes"""

    @classmethod
    def from_hidden(cls, hidden: Tensor, grids: Tensor) -> "Mask":
        """From `hidden` (T,) bool and `grids` (B, 2).

        Raises:
            ValueError: `hidden` is not bool or does not have one entry for each token.
        """
        counts = grids.cpu().prod(1)
        if hidden.dtype != torch.bool or hidden.shape != (int(counts.sum()),):
            raise ValueError(
                f"a mask must be bool with one entry for each of {int(counts.sum())} tokens, "
                f"not {hidden.dtype} of shape {tuple(hidden.shape)}"
            )
        ends = counts.cumsum(0)
        before = F.pad((~hidden).cpu().cumsum(0), (1, 0))  # (T + 1,): visible tokens in front of each place
        return cls(hidden, (~hidden).nonzero().squeeze(1), before[ends] - before[ends - counts])

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Mask":
        """On another device, except `lengths`."""
        hidden, visible = (t.to(device, non_blocking=non_blocking) for t in (self.hidden, self.visible))
        return Mask(hidden, visible, self.lengths)

    def pin_memory(self) -> "Mask":
        return Mask(self.hidden.pin_memory(), self.visible.pin_memory(), self.lengths)


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
        raise ValueError(
            f"images of {images.shape[-2]} x {images.shape[-1]} pixels do not divide into patches of {patch}"
        )
    return rearrange(images, "b c (h p1) (w p2) -> (b h w) (p1 p2 c)", p1=patch, p2=patch)
