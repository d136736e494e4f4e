"""Base of encoders with stages, each on a coarser grid of tokens than the stage before (Swin, Twins-SVT).

Letters in shapes: B images; C channels; h x w token grid and width D of a stage.
"""

from collections.abc import Iterator

from einops import repeat
from torch import Tensor, nn

from tessera.encoders.base import Encoder, Features
from tessera.encoders.images import Images, Mask


class StagedEncoder(Encoder):
    """Encoder with stages. Each stage after the first halves both sides of the grid.

    `Features.tokens` are the normed tokens of the last stage, and `Features.pooled` is their mean. `mask` marks hidden
    output tokens. The mask token replaces the embeddings of all patches that a hidden token covers. `intermediate`
    returns the features of blocks of the last stage.
    """

    patch_size: int
    """Side of a patch of the first stage in pixels."""
    depths: tuple[int, ...]
    """Number of blocks of each stage, as in the settings."""
    norm: nn.Module
    """Norm after the last block of the last stage."""

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the number of token rows and columns for `height` x `width` pixels, both rounded up."""
        return self.stage_grid(len(self.depths) - 1, height, width)

    def stage_grid(self, stage: int, height: int, width: int) -> tuple[int, int]:
        """Return the token rows and columns in stage `stage` (0 is the first) for `height` x `width` pixels."""
        pixels = self.patch_size * 2**stage
        return -(-height // pixels), -(-width // pixels)

    def pyramid(self, images: Tensor) -> list[Tensor]:
        """Return one map (B, D, h, w) per stage, finest first, for images (B, C, H, W).

        A map is the output of the last block of a stage. Only the last map is normed.
        """
        maps = dict(self._outputs(images))  # a dictionary keeps only the last output of each stage
        maps[len(maps) - 1] = self.norm(maps[len(maps) - 1])
        return [x.permute(0, 3, 1, 2) for x in maps.values()]

    def _outputs(self, images: Images, mask: Mask | None = None, drop: bool = False) -> Iterator[tuple[int, Tensor]]:
        """For each block, yield the index of its stage and its output (B, h, w, D)."""
        raise NotImplementedError

    def _features(self, output: tuple[int, Tensor], grids: Tensor) -> Features:
        x = self.norm(output[1])
        return Features(x.mean((1, 2)), x.flatten(0, 2), grids)  # (B, D), (B * h * w, D)

    def _hide(self, x: Tensor, mask: Mask, grid: tuple[int, int]) -> Tensor:
        """Replace embeddings (B, h, w, D) of patches that hidden output tokens cover by the mask token."""
        side = self.stride // self.patch_size
        hidden = repeat(mask.hidden.view(len(x), *grid), "b h w -> b (h i) (w j) 1", i=side, j=side)
        return self.replace_hidden(x, hidden[:, : x.shape[1], : x.shape[2]]).to(x.dtype)
