"""The image encoder of Segment Anything (2304.02643): a vision transformer with windows and decomposed positions.

Most blocks attend within windows, a few to the whole image (2203.16527); logits get a term for the rows and one for the
columns between query and key (2112.01526, 2111.11429); a neck of two convolutions ends it.

B images, C channels, H x W pixels; h x w grid, N = h * w tokens; D width of the blocks, d width of one head; M width of
the neck, which is the encoder's `dim`. Parameters have published names.
"""

from collections import OrderedDict
from collections.abc import Iterable
from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from encoders.base import Encoder, Features
from encoders.images import Images, Mask
from encoders.layers import DropPath, attention, check_counts, init_linear, learned, resize_table, table_grid
from encoders.vit import PatchEmbed

VARIANTS = {
    "sam_vit_micro": {
        "dim": 96,
        "depth": 4,
        "heads": 3,
        "out_dim": 96,
        "patch_size": 4,
        "image_size": 16,
        "window_size": 3,
        "global_blocks": (1, 3),
    },
    "sam_vit_b": {"dim": 768, "depth": 12, "heads": 12, "global_blocks": (2, 5, 8, 11)},
    "sam_vit_l": {"dim": 1024, "depth": 24, "heads": 16, "global_blocks": (5, 11, 17, 23)},
    "sam_vit_h": {"dim": 1280, "depth": 32, "heads": 16, "global_blocks": (7, 15, 23, 31)},
}
NECK_EPS = 1e-6


class LayerNorm2d(nn.LayerNorm):
    """Layer norm over the channels of maps: (B, M, h, w) -> (B, M, h, w)."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def resize_relative(table: Tensor, size: int) -> Tensor:
    """A table of positions between `size` rows or columns from one of any length: (L, d) -> (2 * size - 1, d)."""
    length = 2 * size - 1
    if len(table) == length:
        return table
    stretched = F.interpolate(table.float().T[None], size=length, mode="linear", align_corners=False)  # (1, d, length)
    return stretched[0].T.to(table.dtype)


def between(table: Tensor, size: int) -> Tensor:
    """Entry q - k + size - 1 of the table for each query q and key k: (L, d) -> (size q, d, size k)."""
    return resize_relative(table, size).unfold(0, size, 1).flip(2)


class Attention(nn.Module):
    """Self-attention over a grid, with positions between tokens: (B, h, w, D) -> (B, h, w, D).

    `size`: rows and columns for which the tables of positions are made, None for no tables.
    """

    def __init__(self, dim: int, heads: int, *, qkv_bias: bool, size: tuple[int, int] | None):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.rel_pos_h = None if size is None else nn.Parameter(torch.zeros(2 * size[0] - 1, dim // heads))
        self.rel_pos_w = None if size is None else nn.Parameter(torch.zeros(2 * size[1] - 1, dim // heads))

    def forward(self, x: Tensor) -> Tensor:
        grid = x.shape[1:3]
        qkv = rearrange(self.qkv(x), "b h w (three heads d) -> three b heads (h w) d", three=3, heads=self.heads)
        q, k, v = qkv.unbind()
        x = attention(q, k, v, bias=self._bias(q.unflatten(2, grid)))
        return self.proj(rearrange(x, "b heads (h w) d -> b h w (heads d)", h=grid[0]))

    def _bias(self, q: Tensor) -> Tensor | None:
        """What the positions add to the logits, from the unscaled queries: (B, heads, h, w, d) -> (B, heads, N, N)."""
        if self.rel_pos_h is None or self.rel_pos_w is None:
            return None
        rows = torch.einsum("bnhwd,hdk->bnhwk", q, between(self.rel_pos_h, q.shape[2]))
        columns = torch.einsum("bnhwd,wdk->bnhwk", q, between(self.rel_pos_w, q.shape[3]))
        # contiguous, so that the sum, by far the largest tensor here, is made in the order in which it is read
        bias = rows.contiguous()[..., :, None] + columns.contiguous()[..., None, :]  # (B, heads, h, w, h, w)
        return bias.flatten(4).flatten(2, 3)


class Block(nn.Module):
    """Attention and MLP, each a residual branch with its norm in front: (B, h, w, D) -> (B, h, w, D).

    With a `window`, attention stays within windows of so many tokens a side. Windows that hang over the edge, below and
    to the right, are filled up with zeros after the norm, and these places take part unmasked, as published.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        window: int,
        mlp_ratio: float,
        qkv_bias: bool,
        norm_eps: float,
        size: tuple[int, int] | None,
        drop_path: float,
    ):
        super().__init__()
        self.window = window
        hidden = int(dim * mlp_ratio)
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.attn = Attention(dim, heads, qkv_bias=qkv_bias, size=size)
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        lin1, lin2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.mlp = nn.Sequential(OrderedDict(lin1=lin1, act=nn.GELU(), lin2=lin2))
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.drop_path(self._in_windows(y) if self.window else self.attn(y))
        return x + self.drop_path(self.mlp(self.norm2(x)))

    def _in_windows(self, x: Tensor) -> Tensor:
        h, w = x.shape[1:3]
        x = F.pad(x, (0, 0, 0, -w % self.window, 0, -h % self.window))
        rows, columns = x.shape[1] // self.window, x.shape[2] // self.window
        x = rearrange(x, "b (r p) (c q) d -> (b r c) p q d", r=rows, c=columns)
        x = rearrange(self.attn(x), "(b r c) p q d -> b (r p) (c q) d", r=rows, c=columns)
        return x[:, :h, :w]


class SAMViT(Encoder):
    """The image encoder of Segment Anything, for images of any size.

    `Features.tokens` are the map after the neck, `Features.pooled` its mean. Sides that the patch does not divide lose
    their last pixels, right and below. On another grid than that of `image_size`, tables of relative positions are
    stretched linearly, as published; for the absolute table no rule is published, and it is resized by that of MAE.

    Without a mask token for hidden places, nothing can be hidden; windows need a full grid, so nothing can be dropped.

    Args:
        dim: width of the blocks.
        depth: number of blocks.
        heads: attention heads of a block.
        out_dim: width of the neck, and so of what the encoder returns.
        mlp_ratio: hidden width of the MLP over `dim`.
        patch_size: side of a patch in pixels.
        image_size: pixels, one side or (rows, columns), for which the tables of positions are made.
        channels: channels of an image.
        window_size: side of a window in tokens, 0 for attention to the whole image in all blocks.
        global_blocks: numbers, from 0, of the blocks that attend to the whole image.
        qkv_bias: have a bias in the queries, keys and values.
        relative_positions: have tables of the rows and of the columns between two tokens in each block.
        absolute_positions: have a table of positions that is added to the patches.
        mask_token: have a learned token to put in place of hidden ones.
        norm_eps: epsilon of the layer norms in the blocks (those of the neck have 1e-6).
        drop_path: share of residual branches left out in training at the last block, rising linearly from 0.
        checkpoint_activations: recompute each block in the backward pass, which saves memory.
    """

    undecayed = ("pos_embed", "rel_pos_h", "rel_pos_w")  # as in MViTv2 (2112.01526), whence the relative positions are

    def __init__(
        self,
        *,
        dim: int = 768,
        depth: int = 12,
        heads: int = 12,
        out_dim: int = 256,
        mlp_ratio: float = 4.0,
        patch_size: int = 16,
        image_size: int | tuple[int, int] = 1024,
        channels: int = 3,
        window_size: int = 14,
        global_blocks: tuple[int, ...] = (2, 5, 8, 11),
        qkv_bias: bool = True,
        relative_positions: bool = True,
        absolute_positions: bool = True,
        mask_token: bool = False,
        norm_eps: float = 1e-6,
        drop_path: float = 0.0,
        checkpoint_activations: bool = False,
    ):
        super().__init__()
        check_counts(dim=dim, depth=depth, heads=heads, out_dim=out_dim, patch_size=patch_size, channels=channels)
        if dim % heads:
            raise ValueError(f"a width (dim) of {dim} does not split into {heads} heads")
        if window_size < 0:
            raise ValueError(f"window_size must be tokens of a side, or 0 for no windows, not {window_size}")
        if window_size and not set(global_blocks) <= set(range(depth)):
            raise ValueError(f"global_blocks must be numbers of blocks, 0 to {depth - 1}, not {tuple(global_blocks)}")
        self.dim, self.stride, self.channels = out_dim, patch_size, channels
        self.checkpoint_activations = checkpoint_activations
        self.table_grid = table_grid(image_size, patch_size)

        self.patch_embed = PatchEmbed(channels, dim, patch_size, "trunc_normal")
        self.pos_embed = learned(1, *self.table_grid, dim) if absolute_positions else None
        self.mask_token = learned(1, dim) if mask_token else None
        block = partial(Block, dim, heads, mlp_ratio=mlp_ratio, qkv_bias=qkv_bias, norm_eps=norm_eps)
        self.blocks = nn.ModuleList()
        for i in range(depth):
            window = 0 if i in global_blocks else window_size
            size = (window, window) if window else self.table_grid
            rate = drop_path * i / max(depth - 1, 1)
            self.blocks.append(block(window=window, size=size if relative_positions else None, drop_path=rate))
        self.neck = nn.Sequential(
            nn.Conv2d(dim, out_dim, 1, bias=False),
            LayerNorm2d(out_dim, eps=NECK_EPS),
            nn.Conv2d(out_dim, out_dim, 3, padding=1, bias=False),
            LayerNorm2d(out_dim, eps=NECK_EPS),
        )
        self.apply(lambda layer: init_linear(layer, "trunc_normal"))

    def forward(self, images: Images, mask: Mask | None = None, *, drop: bool = False) -> Features:
        """Encode `images` (B, C, H, W), normalised floats.

        With `mask`, hidden tokens are replaced by the mask token, which gets their positions.

        Raises:
            ValueError: the images or the mask do not fit the encoder, or `drop`.
        """
        self.check(images, mask, drop=drop)
        maps = self._neck(self._run(self.blocks, self._embed(images, mask)))
        tokens = rearrange(maps, "b m h w -> b (h w) m")
        return Features(tokens.mean(1), tokens.flatten(0, 1), self.grids(images))

    def feature_map(self, images: Tensor) -> Tensor:
        """What SAM's mask decoder takes: (B, C, H, W) -> (B, M, h, w).

        Raises:
            ValueError: the images do not fit the encoder.
        """
        self.check(images)
        return self._neck(self._run(self.blocks, self._embed(images)))

    def block_maps(self, images: Tensor, blocks: int = 1) -> list[Tensor]:
        """What comes out of each of the last `blocks` blocks, without norm or neck, the last one last.

        (B, C, H, W) -> `blocks` of (B, D, h, w).

        Raises:
            ValueError: the images do not fit the encoder, or it has fewer blocks.
        """
        self.check(images)
        if not 1 <= blocks <= len(self.blocks):
            raise ValueError(f"{blocks} blocks asked of an encoder that has {len(self.blocks)}")
        x = self._run(self.blocks[:-blocks], self._embed(images))
        maps = []
        for block in self.blocks[-blocks:]:
            x = self._run([block], x)
            maps.append(x.permute(0, 3, 1, 2))
        return maps

    def intermediate(self, images: Images, blocks: int = 1) -> list[Features]:
        raise NotImplementedError(
            "SAMViT has no final norm that its blocks could share: only the neck, trained on the last block, leads to "
            f"{self.dim} channels; block_maps(images, blocks) gives what comes out of the blocks, without the neck"
        )

    def _embed(self, images: Images, mask: Mask | None = None) -> Tensor:
        """What the first block gets: (B, C, H, W) -> (B, h, w, D)."""
        assert isinstance(images, Tensor)
        grid = self.grid(images.shape[-2], images.shape[-1])
        x = self.patch_embed(images).unflatten(1, grid)  # (B, h, w, D)
        if mask is not None:
            assert self.mask_token is not None
            x = torch.where(mask.hidden.view(len(x), *grid, 1), self.mask_token, x)
        if self.pos_embed is None:
            return x
        table = self.pos_embed
        if grid != self.table_grid:
            table = resize_table(table.flatten(1, 2), self.table_grid, grid, "mae").unflatten(1, grid)
        return x + table

    def _run(self, blocks: Iterable[nn.Module], x: Tensor) -> Tensor:
        """(B, h, w, D) -> (B, h, w, D)."""
        for block in blocks:
            recompute = self.checkpoint_activations and self.training
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        return x

    def _neck(self, x: Tensor) -> Tensor:
        """(B, h, w, D) -> (B, M, h, w)."""
        return self.neck(x.permute(0, 3, 1, 2))
