"""Swin Transformer (2103.14030): attention in shifted windows, in stages with successively coarser token grids.

Letters in shapes: B images; C channels, H x W pixels; h x w token grid and width D of a stage; d width of one head; n
windows of N = r x c tokens. Parameters have the names of the published weights.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from tessera.encoders.attention import attention
from tessera.encoders.checks import check_counts
from tessera.encoders.errors import EncoderError
from tessera.encoders.images import Images, Mask
from tessera.encoders.layers import MLP, LayerNorm, PreNormBlock, init_linear, learned, modules_of, resize_table
from tessera.encoders.stages import StagedEncoder

VARIANTS = {
    "swin_micro": {"dim": 48, "depths": (2, 2), "heads": (2, 4), "patch_size": 2, "window_size": 4, "image_size": 16},
    "swin_tiny": {"dim": 96, "depths": (2, 2, 6, 2), "heads": (3, 6, 12, 24)},
    "swin_small": {"dim": 96, "depths": (2, 2, 18, 2), "heads": (3, 6, 12, 24)},
    "swin_base": {"dim": 128, "depths": (2, 2, 18, 2), "heads": (4, 8, 16, 32)},
    "swin_large": {"dim": 192, "depths": (2, 2, 18, 2), "heads": (6, 12, 24, 48)},
}


class Windows(NamedTuple):
    """Division of a grid into the windows of one block."""

    size: tuple[int, int]
    """Rows and columns of a window, r x c."""
    shift: tuple[int, int]
    """Rows and columns by which the windows are shifted."""
    padding: tuple[int, int]
    """Number of padding rows below the grid and of padding columns to the right. The padding fills the last windows."""
    offsets: Tensor
    """Row index in the relative position bias table for each pair of a query and a key in a window: (N * N,)."""
    mask: Tensor | None
    """Mask that is added to the attention logits: (n, N, N). None if all tokens of each window attend to each other."""


def window_sizes(grid: tuple[int, int], window_size: int) -> tuple[int, int]:
    """Return the rows and columns of a window. A grid side of at most `window_size` tokens is covered by one window."""
    return min(grid[0], window_size), min(grid[1], window_size)


@lru_cache(maxsize=32)
def make_windows(grid: tuple[int, int], window_size: int, shifted: bool, device: torch.device) -> Windows:
    """Divide a grid into windows. Windows are not shifted along a side of the grid that one window covers.

    The mask holds -100, as in the published code, for pairs of tokens that share a window only because of the cyclic
    shift. The mask holds -inf for keys that are padding, so that padding never influences a token.
    """
    rows, columns = grid
    size = window_sizes(grid, window_size)
    by = window_size // 2 if shifted else 0
    shift = (by if rows > window_size else 0, by if columns > window_size else 0)
    padding = (-rows % size[0], -columns % size[1])
    with torch.inference_mode(False):  # autograd would reject cached inference tensors in later training steps
        row, column = (torch.arange(window, device=device) for window in size)
        down = row[:, None, None, None] - row[:, None] + window_size - 1  # (r, 1, r, 1): query minus key
        right = column[:, None, None] - column + window_size - 1  # (c, 1, c)
        offsets = (down * (2 * window_size - 1) + right).flatten()  # (N * N,)
        mask = None
        if any(shift) or any(padding):
            sides = [_side(*side, device) for side in zip(grid, shift, padding, strict=True)]
            (row_wraps, row_pads), (column_wraps, column_pads) = sides
            in_windows = partial(rearrange, pattern="(y r) (x c) -> (y x) (r c)", r=size[0], c=size[1])
            regions = in_windows(row_wraps[:, None] * 2 + column_wraps)  # (n, N)
            padded = in_windows(row_pads[:, None] | column_pads)  # (n, N)
            mask = torch.zeros(*regions.shape, regions.shape[1], device=device)  # (n, N, N)
            mask = mask.masked_fill(regions[:, :, None] != regions[:, None], -100.0)
            mask = mask.masked_fill(padded[:, None], -torch.inf)
    return Windows(size, shift, padding, offsets, mask)


def _side(length: int, shift: int, padding: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return two bool masks over one side of the padded and shifted grid: wrapped positions, and padding."""
    index = torch.arange(length + padding, device=device).roll(-shift)
    return index < shift, index >= length


class PatchEmbed(nn.Module):
    """Zero padding of images to whole patches, then linear projection of each patch: (B, C, H, W) -> (B, h, w, D)."""

    def __init__(self, channels: int, dim: int, patch_size: int, *, norm_eps: float | None):
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv2d(channels, dim, kernel_size=patch_size, stride=patch_size)
        self.norm = nn.Identity() if norm_eps is None else LayerNorm(dim, eps=norm_eps)

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        images = F.pad(images, (0, -width % self.patch_size, 0, -height % self.patch_size))
        return self.norm(self.proj(images).permute(0, 2, 3, 1))


class WindowAttention(nn.Module):
    """Self-attention within each window, with relative position biases: (B, h, w, D) -> (B, h, w, D)."""

    def __init__(
        self, dim: int, heads: int, *, shifted: bool, window_size: int, qkv_bias: bool, qk_scale: float | None
    ):
        super().__init__()
        self.heads, self.shifted = heads, shifted
        self.scale = (dim // heads) ** -0.5 if qk_scale is None else qk_scale
        self.relative_position_bias_table = learned((2 * window_size - 1) ** 2, heads)
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, windows: Windows) -> Tensor:
        height, width = x.shape[1:3]
        (below, right), (down, across) = windows.padding, windows.shift
        if below or right:
            x = F.pad(x, (0, 0, 0, right, 0, below))
        if down or across:
            x = x.roll((-down, -across), (1, 2))
        x = self._attend(x, windows)
        if down or across:
            x = x.roll((down, across), (1, 2))
        return x[:, :height, :width]

    def _attend(self, x: Tensor, windows: Windows) -> Tensor:
        """Compute attention in the windows of `x`, a grid that is already padded and shifted."""
        r, c = windows.size
        bias = self.relative_position_bias_table.index_select(0, windows.offsets)  # (N * N, heads)
        bias = rearrange(bias, "(q k) heads -> 1 heads q k", q=r * c)
        # Fused kernels need tensors of four dimensions and one bias for all entries of the batch axis.
        # Windows belong to the batch axis or, if a mask makes the bias differ between windows, to the head axis.
        order = "(b y x) heads"
        if windows.mask is not None:
            bias = (bias + windows.mask[:, None]).flatten(0, 1)[None]  # (1, n * heads, N, N)
            order = "b (y x heads)"
        sides = {"y": x.shape[1] // r, "x": x.shape[2] // c, "r": r, "heads": self.heads}
        pattern = f"b (y r) (x c) (three heads d) -> three {order} (r c) d"
        q, k, v = rearrange(self.qkv(x), pattern, three=3, **sides)
        out = attention(q, k, v, scale=self.scale, bias=bias.type_as(q))
        return self.proj(rearrange(out, f"{order} (r c) d -> b (y r) (x c) (heads d)", **sides))


class PatchMerging(nn.Module):
    """Pad odd sides with zeros and merge groups of 2 x 2 tokens: (B, h, w, D) -> (B, ceil(h / 2), ceil(w / 2), 2 D)."""

    def __init__(self, dim: int, *, norm_eps: float):
        super().__init__()
        self.norm = LayerNorm(4 * dim, eps=norm_eps)
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
        x = rearrange(x, "b (h r) (w c) d -> b h w (c r d)", r=2, c=2)  # column by column
        return self.reduction(self.norm(x))


class Stage(nn.Module):
    """Blocks on one grid, followed by patch merging. The last stage has no patch merging."""

    def __init__(self, blocks: Iterable[PreNormBlock], downsample: PatchMerging | None):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.downsample = downsample


class Swin(StagedEncoder):
    """Swin Transformer for images of any size that is not smaller than one patch.

    Images are padded to whole patches, and grids to whole windows and even sides, with zeros below and to the right.
    Tokens never attend to padding. If a side of a grid is not longer than `window_size`, windows have the length of
    this side and are not shifted along this side. The published code applies this rule to square grids only, and timm
    applies it to each side of any grid. Smaller windows use the bias table entries of the same relative positions.

    The mask token replaces patches before position embeddings are added. Set `mask_token` only if training hides
    tokens. Without hidden tokens, the mask token gets no gradient.

    Args:
        dim: width of the first stage. The width doubles with each stage.
        depths: number of blocks of each stage.
        heads: number of attention heads of each stage.
        window_size: side of a window in tokens.
        patch_size: side of a patch in pixels.
        image_size: image size in pixels for the position table and exports to timm, one side or (height, width).
        mlp_ratio: hidden width of the MLP divided by the width of the stage.
        channels: number of channels of an image.
        qkv_bias: add a bias to queries, keys and values.
        qk_scale: factor of the attention logits. None means 1 / sqrt(width of a head).
        absolute_positions: add a learned position table to the patches. The table is resized to the grid of the image.
        patch_norm: apply a layer norm after the patch embedding.
        norm_eps: epsilon of the layer norms.
        drop_path: drop path rate of the last block. The rate rises linearly from 0 at the first block.
        mask_token: add a learned token that replaces hidden patches.
        checkpoint_activations: recompute each block in the backward pass to save memory.
    """

    no_weight_decay = ("relative_position_bias_table", "absolute_pos_embed")

    def __init__(
        self,
        *,
        dim: int = 96,
        depths: tuple[int, ...] = (2, 2, 6, 2),
        heads: tuple[int, ...] = (3, 6, 12, 24),
        window_size: int = 7,
        patch_size: int = 4,
        image_size: int | tuple[int, int] = 224,
        mlp_ratio: float = 4.0,
        channels: int = 3,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        absolute_positions: bool = False,
        patch_norm: bool = True,
        norm_eps: float = 1e-5,
        drop_path: float = 0.0,
        mask_token: bool = False,
        checkpoint_activations: bool = False,
    ):
        super().__init__()
        depths, heads = tuple(depths), tuple(heads)
        _check_stages(dim, depths, heads)
        height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
        check_counts(window_size=window_size, patch_size=patch_size, channels=channels, image_size=min(height, width))
        coarser = 2 ** (len(depths) - 1)
        self.dim, self.stride, self.channels = dim * coarser, patch_size * coarser, channels
        self.depths, self.heads, self.window_size, self.patch_size = depths, heads, window_size, patch_size
        self.image_size = (height, width)
        self.checkpoint_activations = checkpoint_activations

        self.patch_embed = PatchEmbed(channels, dim, patch_size, norm_eps=norm_eps if patch_norm else None)
        self.table_grid = self.stage_grid(0, height, width)
        positions = (1, self.table_grid[0] * self.table_grid[1], dim)
        self.absolute_pos_embed = learned(*positions) if absolute_positions else None
        self.mask_token = learned(1, dim) if mask_token else None
        attention = partial(WindowAttention, window_size=window_size, qkv_bias=qkv_bias, qk_scale=qk_scale)
        self.layers = nn.ModuleList()
        for stage, depth in enumerate(depths):
            rates = [drop_path * (sum(depths[:stage]) + i) / max(sum(depths) - 1, 1) for i in range(depth)]
            wide, last = dim * 2**stage, stage == len(depths) - 1
            blocks = []
            for i, rate in enumerate(rates):
                attn, mlp = attention(wide, heads[stage], shifted=i % 2 == 1), MLP(wide, int(wide * mlp_ratio))
                blocks.append(PreNormBlock(wide, attn, mlp, norm_eps=norm_eps, drop_path=rate))
            self.layers.append(Stage(blocks, None if last else PatchMerging(wide, norm_eps=norm_eps)))
        self.norm = LayerNorm(self.dim, eps=norm_eps)
        self.apply(lambda layer: init_linear(layer, "trunc_normal"))

    @property
    def stages(self) -> list[Stage]:
        """All stages, from the finest grid to the coarsest grid."""
        return modules_of(self.layers, Stage)

    @property
    def blocks(self) -> nn.ModuleList:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Blocks of all stages, in the order in which they are applied."""
        return nn.ModuleList(block for stage in self.stages for block in stage.blocks)

    def _final_blocks(self) -> int:
        return self.depths[-1]

    def _outputs(self, images: Images, mask: Mask | None = None, drop: bool = False) -> Iterator[tuple[int, Tensor]]:
        x = self._embed(images, mask, drop)
        scales = self.draw_drop_path(x.shape[0], x.device)
        for number, stage in enumerate(self.stages):
            for block in modules_of(stage.blocks, PreNormBlock):
                # The tensors of a trace must not be cached, because they have no values.
                windows_of = make_windows.__wrapped__ if torch.compiler.is_exporting() else make_windows
                windows = windows_of((x.shape[1], x.shape[2]), self.window_size, block.attn.shifted, x.device)
                x = self.run_block(block, x, windows, next(scales))
                yield number, x
            if stage.downsample is not None:
                x = stage.downsample(x)

    def _embed(self, images: Images, mask: Mask | None = None, drop: bool = False) -> Tensor:
        """Return the input of the first block: (B, C, H, W) -> (B, h, w, D)."""
        images = self.checked(images, mask, drop=drop)
        if min(images.shape[-2:]) < self.patch_size:
            raise EncoderError(
                f"Images of {images.shape[-2]} x {images.shape[-1]} pixels are smaller than one patch of "
                f"{self.patch_size} x {self.patch_size} pixels."
            )
        x = self.patch_embed(images)
        grid = (x.shape[1], x.shape[2])
        if mask is not None:
            x = self._hide(x, mask, self.grid(*images.shape[-2:]))
        if self.absolute_pos_embed is not None:
            table = self.absolute_pos_embed
            if grid != self.table_grid:
                table = resize_table(table, self.table_grid, grid, "mae")
            x = x + table.unflatten(1, grid)
        return x


def _check_stages(dim: int, depths: tuple[int, ...], heads: tuple[int, ...]):
    if len(depths) != len(heads) or not depths:
        raise EncoderError(f"depths has {len(depths)} entries, and heads has {len(heads)}. Give one entry per stage.")
    check_counts(dim=dim, depths=min(depths), heads=min(heads))
    for stage, count in enumerate(heads):
        if dim * 2**stage % count:
            raise EncoderError(f"The width {dim * 2**stage} of stage {stage + 1} does not split into {count} heads.")
