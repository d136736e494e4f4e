"""Drop path that computes a residual branch only for the images that keep it, as DINOv2 (2304.07193) does.

DINOv2 draws a fixed number of the images of a process for each branch. Here, the factors of drop path are those of
`encoders.randomness`, one for each image, so that the result does not depend on the number of processes. Therefore, the
number of computed images varies from branch to branch.

Letters in shapes: B images; N tokens of an image; T tokens of all packed images; k images that keep a branch, with K
tokens; D width of a token.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.encoders.base import Encoder
from tessera.encoders.layers import Scales
from tessera.encoders.segments import Segments, copy_to_device


@dataclass(frozen=True)
class Subset:
    """Images of a batch that keep a residual branch."""

    rows: Tensor
    """Indices of the images in (B, N, D), or of their tokens in (T, D): (k,) or (K,) int64 on the device."""
    factors: Tensor
    """Factors of the branch: (k, 1, 1) or (K, 1) on the device."""
    segments: Segments | None
    """Boundaries of the images among the K tokens. None if the images are not packed."""

    @classmethod
    def of(cls, factors: Tensor, segments: Segments | None, device: torch.device) -> "Subset":
        """Return the images whose factor is not 0. `factors` (B,) is on the CPU.

        If all factors are 0, return the first image, so that every parameter gets a gradient, which is then 0.
        """
        kept = factors.nonzero()[:, 0]
        kept = kept if len(kept) else torch.zeros(1, dtype=torch.int64)
        values = copy_to_device(factors[kept], device)
        if segments is None:
            return cls(copy_to_device(kept, device), values.view(-1, 1, 1), None)
        lengths = segments.lengths[kept]
        own = Segments(lengths, device)
        starts = (segments.lengths.cumsum(0) - segments.lengths)[kept]  # first token of each image in the batch
        shifts = copy_to_device(starts - (lengths.cumsum(0) - lengths), device).index_select(0, own.image_ids)
        rows = shifts + torch.arange(len(shifts), device=device)
        return cls(rows, values.index_select(0, own.image_ids)[:, None], own)

    def rotations(self, rope: Tensor | None) -> Tensor | None:
        """Return the rotations (2, K, d / 2) of the tokens of packed images. Other rotations hold for any image."""
        return rope if rope is None or self.segments is None else rope.index_select(1, self.rows)

    def add(self, x: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `x` (B, N, D) or (T, D) plus the branch of the images of this subset."""
        out = branch(x.index_select(0, self.rows))
        out = out * self.factors.to(out.dtype)
        dtype = torch.promote_types(x.dtype, out.dtype)  # as in a sum of both
        return x.to(dtype).index_add(0, self.rows, out.to(dtype))


BranchScales = Iterator[Tensor | tuple[Subset, Subset] | None]
"""Iterator that yields the drop path factors of one block after the other, or the subsets of its attention and MLP. If
the iterator yields None, the block drops nothing or draws the factors itself."""


def draw_branch_scales(encoder: Encoder, x: Tensor, segments: Segments | None, *, skip: bool) -> BranchScales:
    """Draw the drop path factors of a forward pass on tokens `x` (B, N, D), or (T, D) with `segments`.

    If `skip` is true, the iterator yields the images that keep each branch.
    """
    images = len(x) if segments is None else len(segments.lengths)
    if not skip:
        return encoder.draw_drop_path(images, x.device)
    # on the CPU, because the numbers of images are needed there
    return _subsets(encoder.draw_drop_path(images, torch.device("cpu")), segments, x.device)


def _subsets(scales: Scales, segments: Segments | None, device: torch.device) -> BranchScales:
    for factors in scales:  # (2, B)
        if factors is None or bool((factors == 1).all()):
            yield None
        else:
            yield Subset.of(factors[0], segments, device), Subset.of(factors[1], segments, device)
