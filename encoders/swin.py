"""Swin Transformer (2103.14030): attention in windows that shift from block to block, and stages of ever coarser grids.

B images, C channels, H x W pixels; h x w grid of tokens of a stage, D its width, d width of one head; n windows of
r x c tokens, N = r * c. Parameters have the published names.
"""

from collections.abc import Iterable
from functools import lru_cache, partial
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from encoders.base import Encoder, Features
from encoders.images import Images, Mask
from encoders.layers import MLP, DropPath, attention, check_counts, init_linear, learned, resize_table

VARIANTS = {
    "swin_micro": {"dim": 48, "depths": (2, 2), "heads": (2, 4), "patch_size": 2, "window_size": 4, "image_size": 16},
    "swin_tiny": {"dim": 96, "depths": (2, 2, 6, 2), "heads": (3, 6, 12, 24)},
    "swin_small": {"dim": 96, "depths": (2, 2, 18, 2), "heads": (3, 6, 12, 24)},
    "swin_base": {"dim": 128, "depths": (2, 2, 18, 2), "heads": (4, 8, 16, 32)},
    "swin_large": {"dim": 192, "depths": (2, 2, 18, 2), "heads": (6, 12, 24, 48)},
}


class Windows(NamedTuple):
    """How a block cuts a grid in windows."""

    size: tuple[int, int]
    """rows and columns of a window, r x c"""
    shift: tuple[int, int]
    """rows and columns by which the windows are shifted"""
    padding: tuple[int, int]
    """rows and columns added, below and right, to make whole windows"""
    offsets: Tensor
    """(N * N,): the row of the bias table for each query and key of a window"""
    mask: Tensor | None
    """(n, N, N), added to the logits; None when all windows are alike"""


def window_sizes(grid: tuple[int, int], window_size: int) -> tuple[int, int]:
    """Rows and columns of the windows of a grid: a side that is not longer than a window is one window."""
    return min(grid[0], window_size), min(grid[1], window_size)


@lru_cache(maxsize=32)
def cut(grid: tuple[int, int], window_size: int, shifted: bool, device: torch.device) -> Windows:
    """Windows of a grid, made once for each device. A side that is one window is not shifted.

    Tokens that only the roll of the shift brought together have -100 added, as published; padding is shut out with
    -inf, so that it cannot leak.
    """
    size = window_sizes(grid, window_size)
    shift = tuple(window_size // 2 if shifted and side > window_size else 0 for side in grid)
    padding = tuple(-side % window for side, window in zip(grid, size, strict=True))
    with torch.inference_mode(False):  # what is made in inference could not serve in training
        row, column = (torch.arange(window, device=device) for window in size)
        down = row[:, None, None, None] - row[:, None] + window_size - 1  # (r, 1, r, 1): query minus key
        right = column[:, None, None] - column + window_size - 1  # (c, 1, c)
        offsets = (down * (2 * window_size - 1) + right).flatten()  # (N * N,)
        mask = None
        if any(shift) or any(padding):
            rolled, padded = _sides(grid, shift, padding, device)
            part = partial(rearrange, pattern="(y r) (x c) -> (y x) (r c)", r=size[0], c=size[1])
            regions, outside = part(rolled[0][:, None] * 2 + rolled[1]), part(padded[0][:, None] | padded[1])
            mask = torch.zeros(*regions.shape, regions.shape[1], device=device)  # (n, N, N)
            mask = mask.masked_fill(regions[:, :, None] != regions[:, None], -100.0)
            mask = mask.masked_fill(outside[:, None], -torch.inf)
    return Windows(size, cast(tuple[int, int], shift), cast(tuple[int, int], padding), offsets, mask)


def _sides(
    grid: tuple[int, int], shift: tuple[int, ...], padding: tuple[int, ...], device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """Rows and columns of the padded and rolled grid: whether the roll took them round, whether they are padding."""
    rolled, padded = [], []
    for side, by, more in zip(grid, shift, padding, strict=True):
        place = torch.arange(side + more, device=device).roll(-by)
        rolled.append(place < by)
        padded.append(place >= side)
    return rolled, padded


class PatchEmbed(nn.Module):
    """A linear map of each patch, zeros beyond the image: (B, C, H, W) -> (B, h, w, D)."""

    def __init__(self, channels: int, dim: int, patch_size: int, *, norm_eps: float | None):
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv2d(channels, dim, kernel_size=patch_size, stride=patch_size)
        self.norm = nn.Identity() if norm_eps is None else nn.LayerNorm(dim, eps=norm_eps)

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        images = F.pad(images, (0, -width % self.patch_size, 0, -height % self.patch_size))
        return self.norm(self.proj(images).permute(0, 2, 3, 1))


class WindowAttention(nn.Module):
    """Self-attention in each window, with a bias for each relative position: (B, h, w, D) -> (B, h, w, D)."""

    def __init__(self, dim: int, heads: int, *, window_size: int, qkv_bias: bool, qk_scale: float | None):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5 if qk_scale is None else qk_scale
        table = torch.empty((2 * window_size - 1) ** 2, heads)
        self.relative_position_bias_table = nn.Parameter(nn.init.trunc_normal_(table, std=0.02))
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, windows: Windows) -> Tensor:
        """`x` is padded and rolled already."""
        r, c = windows.size
        bias = self.relative_position_bias_table.index_select(0, windows.offsets)  # (N * N, heads)
        bias = rearrange(bias, "(q k) heads -> 1 heads q k", q=r * c)
        # Windows lie with the images if they are alike, else with the heads: so one bias serves the whole batch, and
        # there are no more than the four dimensions that fused kernels take.
        order = "(b y x) heads"
        if windows.mask is not None:
            bias = (bias + windows.mask[:, None]).flatten(0, 1)[None]  # (1, n * heads, N, N)
            order = "b (y x heads)"
        sides = {"y": x.shape[1] // r, "x": x.shape[2] // c, "r": r, "heads": self.heads}
        pattern = f"b (y r) (x c) (three heads d) -> three {order} (r c) d"
        q, k, v = rearrange(self.qkv(x), pattern, three=3, **sides)
        out = attention(q, k, v, scale=self.scale, bias=bias.to(q.dtype))
        return self.proj(rearrange(out, f"{order} (r c) d -> b (y r) (x c) (heads d)", **sides))


class Block(nn.Module):
    """Attention in windows and an MLP, each a residual branch with its norm in front: (B, h, w, D) -> (B, h, w, D)."""

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        shifted: bool,
        window_size: int,
        mlp_ratio: float,
        qkv_bias: bool,
        qk_scale: float | None,
        norm_eps: float,
        drop_path: float,
    ):
        super().__init__()
        self.shifted = shifted
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.attn = WindowAttention(dim, heads, window_size=window_size, qkv_bias=qkv_bias, qk_scale=qk_scale)
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = MLP(dim, int(dim * mlp_ratio))
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, windows: Windows) -> Tensor:
        x = x + self.drop_path(self._attend(self.norm1(x), windows))
        return x + self.drop_path(self.mlp(self.norm2(x)))

    def _attend(self, x: Tensor, windows: Windows) -> Tensor:
        height, width = x.shape[1:3]
        (below, right), (down, across) = windows.padding, windows.shift
        if below or right:
            x = F.pad(x, (0, 0, 0, right, 0, below))
        if down or across:
            x = x.roll((-down, -across), (1, 2))
        x = self.attn(x, windows)
        if down or across:
            x = x.roll((down, across), (1, 2))
        return x[:, :height, :width]


class PatchMerging(nn.Module):
    """Four neighbours into one token, zeros beyond an odd grid: (B, h, w, D) -> (B, ceil(h / 2), ceil(w / 2), 2 D)."""

    def __init__(self, dim: int, *, norm_eps: float):
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim, eps=norm_eps)
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
        x = rearrange(x, "b (h r) (w c) d -> b h w (c r d)", r=2, c=2)  # the row changes faster than the column
        return self.reduction(self.norm(x))


class Stage(nn.Module):
    """Blocks on one grid, and the way to the next one; the last stage has none."""

    def __init__(self, blocks: Iterable[Block], downsample: PatchMerging | None):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.downsample = downsample


class Swin(Encoder):
    """Swin Transformer for images of any size from one patch on.

    Images are padded to whole patches and grids to whole windows and to even sides, with zeros below and right; padding
    of windows is shut out of the attention. Where a side of a grid is not longer than a window, one window of that
    length takes it all and is not shifted, as published for square grids; it takes the biases of the same relative
    positions. `Features.pooled` is the mean of the normed tokens of the last stage, and one of these stands for
    `stride` = patch_size * 2 ** (stages - 1) pixels a side.

    Ask for `mask_token` only to hide tokens, otherwise it is left without gradient.

    Args:
        dim: width of the first stage; each further one is twice as wide.
        depths: blocks of each stage.
        heads: attention heads of each stage.
        window_size: tokens of a side of a window.
        patch_size: pixels of a side of a patch.
        image_size: pixels of a side of the images that positions and exports to timm are for, or (height, width).
        mlp_ratio: width of the hidden layer of an MLP, as a multiple of the stage's width.
        channels: channels of an image.
        qkv_bias: give queries, keys and values a bias.
        qk_scale: factor of the attention logits, (width of a head) ** -0.5 when none.
        absolute_positions: add a learned position to each patch, resized to other grids.
        patch_norm: norm after the patch embedding.
        norm_eps: epsilon of the layer norms.
        drop_path: stochastic depth of the last block, rising from 0 at the first one.
        mask_token: learn a token that stands for hidden patches.
        checkpoint_activations: compute the blocks' activations again in the backward pass, to save memory.
    """

    undecayed = ("relative_position_bias_table", "absolute_pos_embed")

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
        block = partial(Block, window_size=window_size, mlp_ratio=mlp_ratio, qkv_bias=qkv_bias, qk_scale=qk_scale)
        block = partial(block, norm_eps=norm_eps)
        self.layers = nn.ModuleList()
        for stage, depth in enumerate(depths):
            rates = [drop_path * (sum(depths[:stage]) + i) / max(sum(depths) - 1, 1) for i in range(depth)]
            wide, last = dim * 2**stage, stage == len(depths) - 1
            blocks = [block(wide, heads[stage], shifted=i % 2 == 1, drop_path=rate) for i, rate in enumerate(rates)]
            self.layers.append(Stage(blocks, None if last else PatchMerging(wide, norm_eps=norm_eps)))
        self.norm = nn.LayerNorm(self.dim, eps=norm_eps)
        self.apply(lambda layer: init_linear(layer, "trunc_normal"))

    @property
    def stages(self) -> list[Stage]:
        return [cast(Stage, stage) for stage in self.layers]

    @property
    def blocks(self) -> nn.ModuleList:  # pyright: ignore[reportIncompatibleVariableOverride]
        """All blocks in their order; the stages own them."""
        return nn.ModuleList(block for stage in self.stages for block in stage.blocks)

    def stage_grid(self, stage: int, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tokens in a stage, 0 the first, of an image of `height` x `width` pixels."""
        pixels = self.patch_size * 2**stage
        return -(-height // pixels), -(-width // pixels)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tokens of an image of `height` x `width` pixels, parts of a token counted in full."""
        return self.stage_grid(len(self.depths) - 1, height, width)

    def forward(self, images: Images, mask: Mask | None = None, *, drop: bool = False) -> Features:
        """Encode `images` (B, C, H, W), normalised floats.

        With `mask`, each hidden token hides all patches under it: the mask token takes their place, before positions
        are added.

        Raises:
            ValueError: the images or the mask do not fit the encoder, or `drop`, which a full grid rules out.
        """
        return self._features(self._run(self.stages[-1].blocks, self._enter_last_stage(images, mask, drop)), images)

    def intermediate(self, images: Images, blocks: int = 1) -> list[Features]:
        """Features after each of the last `blocks` blocks, all of the last stage, final norm applied, the last last.

        Raises:
            ValueError: the last stage has fewer blocks, or the images do not fit the encoder.
        """
        own = self.stages[-1].blocks
        if not 1 <= blocks <= len(own):
            raise ValueError(f"{blocks} blocks asked of an encoder that has {len(own)} in its last stage")
        x = self._run(own[:-blocks], self._enter_last_stage(images))
        features = []
        for block in own[-blocks:]:
            x = self._run([block], x)
            features.append(self._features(x, images))
        return features

    def pyramid(self, images: Images) -> list[Tensor]:
        """Maps of all stages, the finest first: (B, C, H, W) -> (B, D, h, w) each.

        Each is the output of its stage's blocks, before tokens are merged for the next stage. The last one has the
        final norm, the others have none.
        """
        x, maps = self._embed(images), []
        for stage in self.stages:
            x = self._run(stage.blocks, x)
            maps.append(x if stage.downsample else self.norm(x))
            x = stage.downsample(x) if stage.downsample else x
        return [x.permute(0, 3, 1, 2) for x in maps]

    def _embed(self, images: Images, mask: Mask | None = None, drop: bool = False) -> Tensor:
        """What the first block gets: (B, C, H, W) -> (B, h, w, D)."""
        self.check(images, mask, drop=drop)
        assert isinstance(images, Tensor)
        if min(images.shape[-2:]) < self.patch_size:
            raise ValueError(
                f"images of {images.shape[-2]} x {images.shape[-1]} pixels are smaller than one patch of "
                f"{self.patch_size} x {self.patch_size}"
            )
        x = self.patch_embed(images)
        grid = (x.shape[1], x.shape[2])
        if mask is not None:
            assert self.mask_token is not None
            times = self.stride // self.patch_size
            hidden = mask.hidden.view(len(x), *self.grid(*images.shape[-2:]))
            hidden = hidden.repeat_interleave(times, 1).repeat_interleave(times, 2)[:, : grid[0], : grid[1]]
            x = torch.where(hidden[..., None], self.mask_token.to(x.dtype), x)
        if self.absolute_pos_embed is not None:
            table = self.absolute_pos_embed
            if grid != self.table_grid:
                table = resize_table(table, self.table_grid, grid, "mae")
            x = x + table.unflatten(1, grid)
        return x

    def _enter_last_stage(self, images: Images, mask: Mask | None = None, drop: bool = False) -> Tensor:
        """What the first block of the last stage gets: (B, C, H, W) -> (B, h, w, D)."""
        x = self._embed(images, mask, drop)
        for stage in self.stages[:-1]:
            assert stage.downsample is not None
            x = stage.downsample(self._run(stage.blocks, x))
        return x

    def _run(self, blocks: Iterable[nn.Module], x: Tensor) -> Tensor:
        """Blocks of one stage: (B, h, w, D) -> (B, h, w, D)."""
        recompute = self.checkpoint_activations and self.training
        for block in blocks:
            windows = cut((x.shape[1], x.shape[2]), self.window_size, cast(Block, block).shifted, x.device)
            x = checkpoint(block, x, windows, use_reentrant=False) if recompute else block(x, windows)
        return x

    def _features(self, x: Tensor, images: Images) -> Features:
        """From the last block's output (B, h, w, D)."""
        x = self.norm(x)
        return Features(x.mean((1, 2)), x.flatten(0, 2), self.grids(images))  # (B, D), (B * h * w, D)


def _check_stages(dim: int, depths: tuple[int, ...], heads: tuple[int, ...]):
    if len(depths) != len(heads) or not depths:
        raise ValueError(f"depths and heads have one entry for each stage, not {len(depths)} and {len(heads)}")
    check_counts(dim=dim, depths=min(depths), heads=min(heads))
    for stage, count in enumerate(heads):
        if dim * 2**stage % count:
            raise ValueError(f"stage {stage + 1} is {dim * 2**stage} wide, which does not split into {count} heads")
