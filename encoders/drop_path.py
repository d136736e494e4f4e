"""Drop path (stochastic depth, 1603.09382): in training, residual branches are dropped at random for whole images.

DINOv2 (2304.07193) computes each branch for a fixed number of randomly drawn images per process. Here,
`encoders.randomness` draws one factor for each image, so that the result does not depend on the number of processes.
Therefore, the number of images that keep a branch varies from branch to branch.

Letters in shapes: B images; N tokens of an image; T tokens of all packed images; k images that keep a branch, with K
tokens; D width of a token.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tessera.encoders.errors import EncoderError
from tessera.encoders.segments import Segments, copy_to_device

Scales = Iterator[Tensor | None]
"""Iterator over blocks that yields the drop path factors of a block: (2, B), one row for attention and one row for the
MLP. If the iterator yields None, the block draws the factors itself."""


class DropPath(nn.Module):
    """Stochastic depth (1603.09382): in training, residual branches are dropped at random, one decision per image.

    The input is (B, ..., D), or packed images (T, D) with `segments`. A dropped branch is multiplied by the factor 0.
    Other branches are multiplied by 1 / (1 - rate), so that the expectation does not change. `scale` (B,) holds the
    factor of each image if the encoder has already drawn the factors (see `encoders.randomness`). If `scale` is None,
    the factors are drawn from torch's generator.
    """

    def __init__(self, rate: float):
        super().__init__()
        if not 0 <= rate < 1:
            raise EncoderError(f"drop_path is a probability. It must be at least 0 and less than 1, not {rate}.")
        self.rate = rate

    def forward(self, x: Tensor, segments: Segments | None = None, scale: Tensor | None = None) -> Tensor:
        factors = self._factors(x, segments, scale)
        return x if factors is None else x * factors

    def add(self, x: Tensor, branch: Tensor, segments: Segments | None = None, scale: Tensor | None = None) -> Tensor:
        """Apply drop path to `branch`, and return the sum of `x` and the result. `branch` has the shape of `x`."""
        factors = self._factors(branch, segments, scale)
        if factors is None:
            return x + branch
        if x.dtype == branch.dtype:
            return torch.addcmul(x, branch, factors)  # in one pass over memory
        return x + branch * factors

    def _factors(self, x: Tensor, segments: Segments | None, scale: Tensor | None) -> Tensor | None:
        """Return the factors of the images, which broadcast to `x`. Return None if drop path is inactive."""
        if not self.training or self.rate == 0:
            return None
        shape = (-1, *[1] * (x.ndim - 1))
        if scale is None:
            images = len(x) if segments is None else len(segments.lengths)
            scale = x.new_empty(images).bernoulli_(1 - self.rate) / (1 - self.rate)
        factors = scale.to(x.dtype).view(shape)
        return factors if segments is None else factors.index_select(0, segments.image_ids)

    def extra_repr(self) -> str:
        return f"rate={self.rate:.3f}"


def branch_scales(scales: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Split the drop path factors (2, B) of a block into the factors of its attention and the factors of its MLP."""
    return (None, None) if scales is None else (scales[0], scales[1])


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

        If all factors are 0, return the first image, so that every parameter gets a gradient. This gradient is 0.
        """
        kept = factors.nonzero()[:, 0]
        kept = kept if len(kept) else torch.zeros(1, dtype=torch.int64)
        values = copy_to_device(factors[kept], device)
        if segments is None:
            return cls(copy_to_device(kept, device), values.view(-1, 1, 1), None)
        lengths = segments.lengths[kept]
        own = Segments(lengths, device).prepared()
        starts = (segments.lengths.cumsum(0) - segments.lengths)[kept]  # first token of each image in the batch
        shifts = copy_to_device(starts - (lengths.cumsum(0) - lengths), device).index_select(0, own.image_ids)
        rows = shifts + torch.arange(len(shifts), device=device)
        return cls(rows, values.index_select(0, own.image_ids)[:, None], own)

    def rotations(self, rope: Tensor | None) -> Tensor | None:
        """Return the rotations (2, K, d / 2) of the tokens of this subset.

        If images are not packed, all images share the rotations `rope`, which are returned unchanged.
        """
        return rope if rope is None or self.segments is None else rope.index_select(1, self.rows)

    def add(self, x: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `x` (B, N, D) or (T, D) plus the branch of the images of this subset."""
        out = branch(x.index_select(0, self.rows))
        out = out * self.factors.to(out.dtype)
        dtype = torch.promote_types(x.dtype, out.dtype)  # the dtype of the sum `x + out`
        return x.to(dtype).index_add(0, self.rows, out.to(dtype))


BranchScales = Iterator[Tensor | tuple[Subset, Subset] | None]
"""Iterator over blocks. For each block, it yields factors or None, as `Scales` does, or two subsets: the images that
keep attention, and the images that keep the MLP."""


def kept_images(scales: Scales, segments: Segments | None, device: torch.device) -> BranchScales:
    """For each block, yield the images that keep attention and those that keep the MLP. `scales` are on the CPU."""
    for factors in scales:  # (2, B)
        if factors is None or bool((factors == 1).all()):
            yield None
        else:
            yield Subset.of(factors[0], segments, device), Subset.of(factors[1], segments, device)
