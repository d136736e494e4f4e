"""Rotary positions (RoFormer, 2104.09864) for grids of patches, as in DINOv3 (2508.10104).

Letters in shapes: B images; N patches of an image; T patches of all images (only the visible patches if hidden tokens
are dropped); S prefix tokens before the patches of each image; d width of one head; L blocks with different rotations
(1 if all blocks share the rotations); G different grids of a batch; R rows of a table of rotations.
"""

import math
from collections.abc import Iterator
from itertools import repeat
from typing import Literal

import torch
from torch import Tensor, nn

from tessera.encoders.errors import EncoderError
from tessera.encoders.randomness import shared_noise
from tessera.encoders.segments import copy_to_device, insert_prefix

Coordinates = Literal["separate", "max", "min"]
Rotations = Iterator[Tensor | None]
"""Iterator over blocks that yields the sines and cosines of a block: (2, S + N, d / 2) for the tokens of an image, or
(2, T + B * S, d / 2) for the tokens of all packed images. It yields None if the encoder has no rotary positions."""


class RotaryPositions(nn.Module):
    """Sines and cosines of rotary positions, for the rows and columns of grids of patches.

    The centre of patch (i, j) of a grid of h x w patches has the coordinates (i + 0.5) / h and (j + 0.5) / w, mapped to
    the range -1 to 1. With `coordinates="max"` or `"min"`, the longer or the shorter side replaces both h and w.
    An angle is 2 pi * coordinate / period. Each head has d / 4 angles of the row, then d / 4 angles of the column.

    The d / 4 `periods` are a buffer, so that the weights of an encoder include the periods that it was trained with.

    In training, the coordinates may change at random. First, a shift is added: one number for rows and one for columns,
    each drawn uniformly from -`shift` to `shift`. Then, row coordinates and column coordinates are multiplied by one
    factor each, from 1 / `jitter` to `jitter`, and both by a common factor, from 1 / `rescale` to `rescale`. All
    factors are drawn log-uniformly. New numbers are drawn for each block and each image size. All images of the same
    size share these numbers, on all processes.

    Args:
        head_dim: width d of a head.
        blocks: number of blocks of the encoder.
        base: base of the periods, which rise from 1 to nearly `base`.
        coordinates: divisor of coordinates: own side ("separate"), longer side ("max") or shorter side ("min").
        shift: largest random shift. None means no shift.
        jitter: largest random factor for each axis. None means no such factor.
        rescale: largest random common factor. None means no such factor.

    Raises:
        EncoderError: `head_dim` is not a multiple of 4, or a range is invalid.
    """

    def __init__(
        self,
        head_dim: int,
        blocks: int,
        *,
        base: float = 100.0,
        coordinates: Coordinates = "separate",
        shift: float | None = None,
        jitter: float | None = None,
        rescale: float | None = None,
    ):
        super().__init__()
        if head_dim % 4:
            raise EncoderError(f"Rotary positions need heads whose width is a multiple of 4, not {head_dim}.")
        if shift is not None and shift < 0:
            raise EncoderError(f"rope_shift must be at least 0, not {shift}.")
        for name, factor in (("rope_jitter", jitter), ("rope_rescale", rescale)):
            if factor is not None and factor < 1:
                raise EncoderError(f"{name} is the largest factor of coordinates. It must be at least 1, not {factor}.")
        self.blocks, self.coordinates = blocks, coordinates
        self.ranges = (shift or 0.0, math.log(jitter or 1.0), math.log(rescale or 1.0))
        self.periods: Tensor
        self.register_buffer("periods", base ** (2 * torch.arange(head_dim // 4) / (head_dim // 2)))

    def rotations(self, grids: Tensor, prefix: int, lengths: Tensor, visible: Tensor | None = None) -> Rotations:
        """Return the rotations of each block for images with these `grids` (B, 2).

        Args:
            grids: number of patch rows and of patch columns of each image, on the CPU.
            prefix: number of prefix tokens S before the patches of each image. Prefix tokens are not rotated.
            lengths: number of patch tokens of each image: (B,) on the CPU.
            visible: indices (T,) of the patch tokens among all patches of the images, or None for all patches.
        """
        device = self.periods.device
        shapes, which = grids.unique(dim=0, return_inverse=True)  # (G, 2), (B,)
        tables, starts = self._tables([(h, w) for h, w in shapes.tolist()])  # (L, 2, R, d / 2)
        kinds, images = which.unique_consecutive(return_counts=True)
        sizes = shapes.prod(1).tolist()
        runs = zip(kinds.tolist(), images.tolist(), strict=True)
        rows = torch.cat([(torch.arange(sizes[kind]) + starts[kind]).repeat(count) for kind, count in runs])
        rows = copy_to_device(rows, device)
        if visible is not None:
            rows = rows.index_select(0, visible)
        rows = insert_prefix(rows[:, None], rows.new_zeros(1, prefix, 1), lengths)[:, 0]
        if len(tables) == 1:
            return repeat(tables[0].index_select(1, rows))
        return (table.index_select(1, rows) for table in tables)

    def grid_rotations(self, grid: tuple[int, int], prefix: int) -> Rotations:
        """Return the rotations of each block for images with one grid of patches, after `prefix` prefix tokens."""
        tables, _ = self._tables([grid])  # (L, 2, 1 + N, d / 2)
        tables = torch.cat([tables[:, :, :1].expand(-1, -1, prefix, -1), tables[:, :, 1:]], 2)
        return repeat(tables[0]) if len(tables) == 1 else iter(tables)

    def table(self, grid: tuple[int, int], factors: Tensor, shifts: Tensor) -> Tensor:
        """Return the sines and cosines of all patches of a grid: (L, 2, N, d / 2) float32.

        Args:
            factors: factors of the row and column coordinates in each block: (L, 2).
            shifts: shifts of the row and column coordinates in each block: (L, 2). They are added before the factors
                are applied.
        """
        h, w = grid
        rows, columns = {"separate": (h, w), "max": (max(grid),) * 2, "min": (min(grid),) * 2}[self.coordinates]
        device = self.periods.device
        places = torch.meshgrid(
            (torch.arange(h, device=device) + 0.5) / rows,
            (torch.arange(w, device=device) + 0.5) / columns,
            indexing="ij",
        )
        centres = 2 * torch.stack(places, -1).flatten(0, 1) - 1  # (N, 2)
        centres = (centres + shifts[:, None]) * factors[:, None]  # (L, N, 2)
        angles = (2 * math.pi * centres[..., None] / self.periods).flatten(
            2
        )  # (L, N, d / 2) float32, also in a half model
        return torch.stack([angles.sin(), angles.cos()], 1)

    def draw(self, grids: list[tuple[int, int]]) -> tuple[Tensor, Tensor] | None:
        """Draw factors and shifts of the coordinates for each grid and block: two tensors (G, L, 2) on the CPU.

        Return None in evaluation mode, or if `shift`, `jitter` and `rescale` allow no change.
        """
        shift, jitter, rescale = self.ranges
        if not self.training or not any(self.ranges):
            return None
        sides = torch.tensor(grids)  # (G, 2)
        words = ((sides[:, 0] * 1024 + sides[:, 1])[:, None] * self.blocks + torch.arange(self.blocks)) * 5
        noise = 2 * shared_noise(words[..., None] + torch.arange(5)).float() - 1  # (G, L, 5), from -1 to 1
        shifts, each, common = noise.tensor_split([2, 4], dim=-1)
        return (jitter * each + rescale * common).exp(), shift * shifts

    def _tables(self, grids: list[tuple[int, int]]) -> tuple[Tensor, list[int]]:
        """Return the sines and cosines of all `grids`: (L, 2, R, d / 2), and the first row of each grid.

        Row 0 of the result holds the rotation by the angle 0, for prefix tokens.
        """
        drawn, device = self.draw(grids), self.periods.device
        count, half = (1 if drawn is None else self.blocks), 2 * len(self.periods)
        zero_and_one = torch.arange(2, dtype=torch.float32, device=device)
        tables, starts = [zero_and_one.view(1, 2, 1, 1).expand(count, 2, 1, half)], [1]
        for i, grid in enumerate(grids):
            if drawn is None:
                factors, shifts = torch.ones(1, 2, device=device), torch.zeros(1, 2, device=device)
            else:
                factors, shifts = (copy_to_device(numbers, device) for numbers in (drawn[0][i], drawn[1][i]))
            tables.append(self.table(grid, factors, shifts))
            starts.append(starts[-1] + grid[0] * grid[1])
        return torch.cat(tables, 2), starts
