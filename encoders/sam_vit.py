"""The image encoder of Segment Anything (2304.02643): a vision transformer with attention in windows.

In most blocks, tokens attend within windows. In a few blocks, tokens attend to the full image (2203.16527). Decomposed
relative positions add one term for rows and one term for columns to the attention logits (2112.01526, 2111.11429). A
neck of two convolutions follows the last block.

Letters in shapes: B images; C channels and H x W pixels of an image; h x w grid of N = h * w tokens; D width of the
blocks; d width of one head; M width of the neck, equal to `SAMViT.dim`. Parameters have the names of the published
weights.
"""

from collections import OrderedDict
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from tessera.encoders.attention import attention
from tessera.encoders.base import Encoder, Features
from tessera.encoders.blocks import PatchEmbed
from tessera.encoders.checks import check_block_count, check_counts, check_heads
from tessera.encoders.errors import EncoderError
from tessera.encoders.images import Images, Mask
from tessera.encoders.layers import LayerNorm, PreNormBlock, init_linear, interpolate, learned, resize_table, table_grid

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


class LayerNorm2d(LayerNorm):
    """Layer norm over the channels of maps: (B, M, h, w) -> (B, M, h, w)."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def resize_relative(table: Tensor, size: int) -> Tensor:
    """Resize the relative position table of one image axis to `size` tokens: (L, d) -> (2 * size - 1, d).

    The axis is the height or the width. L is the number of rows of the given table. Rows are interpolated linearly.
    """
    length = 2 * size - 1
    if len(table) == length:
        return table
    stretched = interpolate(table.float().T[None, :, :, None], size=(length, 1), mode="bilinear")  # (1, d, length, 1)
    return stretched[0, :, :, 0].T.to(table.dtype)


def relative_positions(table: Tensor, size: int) -> Tensor:
    """Return the entry of a relative position table for each pair of a query and a key: (L, d) -> (size, d, size).

    The table is first resized to `size` tokens. Query q and key k then use entry q - k + size - 1.
    """
    return resize_relative(table, size).unfold(0, size, 1).flip(2)


class Attention(nn.Module):
    """Self-attention over a grid with relative positions: (B, h, w, D) -> (B, h, w, D).

    With `window` > 0, tokens attend only within windows of `window` x `window` tokens. To fill the last windows, the
    grid is padded with zeros, below and to the right. Tokens also attend to padding, as in the published code.

    `size` holds the numbers of token rows and token columns for which the relative position tables are made. None means
    no tables.
    """

    def __init__(self, dim: int, heads: int, *, window: int, qkv_bias: bool, size: tuple[int, int] | None):
        super().__init__()
        self.heads, self.window = heads, window
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.rel_pos_h = None if size is None else nn.Parameter(torch.zeros(2 * size[0] - 1, dim // heads))
        self.rel_pos_w = None if size is None else nn.Parameter(torch.zeros(2 * size[1] - 1, dim // heads))

    def forward(self, x: Tensor) -> Tensor:
        if not self.window:
            return self._attend(x)
        h, w = x.shape[1:3]
        x = F.pad(x, (0, 0, 0, -w % self.window, 0, -h % self.window))
        rows, columns = x.shape[1] // self.window, x.shape[2] // self.window
        x = rearrange(x, "b (r p) (c q) d -> (b r c) p q d", r=rows, c=columns)
        x = rearrange(self._attend(x), "(b r c) p q d -> b (r p) (c q) d", r=rows, c=columns)
        return x[:, :h, :w]

    def _attend(self, x: Tensor) -> Tensor:
        grid = x.shape[1:3]
        qkv = rearrange(self.qkv(x), "b h w (three heads d) -> three b heads (h w) d", three=3, heads=self.heads)
        q, k, v = qkv.unbind()
        x = attention(q, k, v, bias=self._bias(q.unflatten(2, grid)))
        return self.proj(rearrange(x, "b heads (h w) d -> b h w (heads d)", h=grid[0]))

    def _bias(self, q: Tensor) -> Tensor | None:
        """Return the relative position bias, given unscaled queries: (B, heads, h, w, d) -> (B, heads, N, N)."""
        if self.rel_pos_h is None or self.rel_pos_w is None:
            return None
        rows = torch.einsum("bnhwd,hdk->bnhwk", q, relative_positions(self.rel_pos_h, q.shape[2]))
        columns = torch.einsum("bnhwd,wdk->bnhwk", q, relative_positions(self.rel_pos_w, q.shape[3]))
        # Both terms of the sum are made contiguous, so that the sum is contiguous.
        # Otherwise, `flatten` would copy the sum, which is the largest tensor of this function.
        bias = rows.contiguous()[..., :, None] + columns.contiguous()[..., None, :]  # (B, heads, h, w, h, w)
        return bias.flatten(4).flatten(2, 3)


class SAMViT(Encoder):
    """The image encoder of Segment Anything, for images of any size.

    `Features.tokens` holds the tokens of the map after the neck, and `Features.pooled` is the mean of these tokens. If
    a side of the image is not a multiple of the patch, the last pixels of that side are cropped. If the grid of the
    image differs from the grid for `image_size`, the position tables are resized: the relative tables linearly, as in
    the published code, and the absolute table by MAE's rule, because the published code has no rule for this table.

    The encoder cannot drop hidden tokens, because windows need the full grid of tokens. The mask token replaces hidden
    tokens before positions are added.

    Args:
        dim: width of the blocks.
        depth: number of blocks.
        heads: number of attention heads of a block.
        out_dim: width of the neck and of the features.
        mlp_ratio: hidden width of the MLP divided by `dim`.
        patch_size: side of a patch in pixels.
        image_size: image size in pixels for which the position tables are made, one side or (height, width).
        channels: number of channels of an image.
        window_size: side of a window in tokens. 0 means attention to the full image in all blocks.
        global_blocks: indices, starting with 0, of the blocks in which tokens attend to the full image.
        qkv_bias: add a bias to queries, keys and values.
        relative_positions: add relative position tables for rows and columns to each block.
        absolute_positions: add a learned position table to the patch embeddings.
        mask_token: add a learned token that replaces hidden tokens.
        norm_eps: epsilon of the layer norms in the blocks. The norms of the neck always have an epsilon of 1e-6.
        drop_path: drop path rate of the last block. The rate rises linearly from 0 at the first block.
        checkpoint_activations: recompute each block in the backward pass to save memory.
    """

    no_weight_decay = ("pos_embed", "rel_pos_h", "rel_pos_w")  # as in MViTv2 (2112.01526)

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
        check_counts(depth=depth, out_dim=out_dim, patch_size=patch_size, channels=channels)
        check_heads(dim, heads)
        if window_size < 0:
            raise EncoderError(f"window_size must be at least 0 (0 means no windows), not {window_size}.")
        if window_size and not set(global_blocks) <= set(range(depth)):
            raise EncoderError(
                f"global_blocks must be block indices from 0 to {depth - 1}, not {tuple(global_blocks)}."
            )
        self.dim, self.stride, self.channels = out_dim, patch_size, channels
        self.checkpoint_activations = checkpoint_activations
        self.table_grid = table_grid(image_size, patch_size)

        self.patch_embed = PatchEmbed(channels, dim, patch_size, "trunc_normal")
        self.pos_embed = learned(1, *self.table_grid, dim) if absolute_positions else None
        self.mask_token = learned(1, dim) if mask_token else None
        hidden = int(dim * mlp_ratio)
        self.blocks = nn.ModuleList()
        for i in range(depth):
            window = 0 if i in global_blocks else window_size
            size = (window, window) if window else self.table_grid
            size = size if relative_positions else None
            attn = Attention(dim, heads, window=window, qkv_bias=qkv_bias, size=size)
            mlp = OrderedDict(lin1=nn.Linear(dim, hidden), act=nn.GELU(), lin2=nn.Linear(hidden, dim))
            rate = drop_path * i / max(depth - 1, 1)
            self.blocks.append(PreNormBlock(dim, attn, nn.Sequential(mlp), norm_eps=norm_eps, drop_path=rate))
        self.neck = nn.Sequential(
            nn.Conv2d(dim, out_dim, 1, bias=False),
            LayerNorm2d(out_dim, eps=NECK_EPS),
            nn.Conv2d(out_dim, out_dim, 3, padding=1, bias=False),
            LayerNorm2d(out_dim, eps=NECK_EPS),
        )
        self.apply(lambda layer: init_linear(layer, "trunc_normal"))

    def feature_map(self, images: Tensor) -> Tensor:
        """Return the output of the neck, which is the input of SAM's mask decoder: (B, C, H, W) -> (B, M, h, w).

        Raises:
            EncoderError: the images do not fit the encoder.
        """
        return self._neck(self._last_outputs(1, images)[0])

    def block_maps(self, images: Tensor, blocks: int = 1) -> list[Tensor]:
        """Return the outputs of the last `blocks` blocks in order, before any norm or neck.

        The images are (B, C, H, W). The output of each block is a map (B, D, h, w).

        Raises:
            EncoderError: the images do not fit the encoder, or the encoder has fewer than `blocks` blocks.
        """
        check_block_count(blocks, len(self.blocks))
        return [x.permute(0, 3, 1, 2) for x in self._last_outputs(blocks, images)]

    def intermediate(self, images: Images, blocks: int = 1) -> list[Features]:
        raise NotImplementedError(
            f"SAMViT has no intermediate features, because features have {self.dim} channels only after the neck, "
            "which follows the last block. Use block_maps(images, blocks) for the outputs of the blocks."
        )

    def _outputs(self, images: Images, mask: Mask | None = None, drop: bool = False) -> Iterator[Tensor]:
        x = self._embed(self.checked(images, mask, drop=drop), mask)  # (B, h, w, D)
        scales = self.draw_drop_path(x.shape[0], x.device)
        for block in self.blocks:
            x = self.run_block(block, x, None, next(scales))
            yield x

    def _features(self, output: Tensor, grids: Tensor) -> Features:
        tokens = rearrange(self._neck(output), "b m h w -> b (h w) m")
        return Features(tokens.mean(1), tokens.flatten(0, 1), grids)

    def _embed(self, images: Tensor, mask: Mask | None) -> Tensor:
        """Return the input of the first block: (B, C, H, W) -> (B, h, w, D)."""
        grid = self.grid(images.shape[-2], images.shape[-1])
        x = self.patch_embed(images).unflatten(1, grid)  # (B, h, w, D)
        if mask is not None:
            x = self.replace_hidden(x, mask.hidden.view(len(x), *grid, 1))
        if self.pos_embed is None:
            return x
        table = self.pos_embed
        if grid != self.table_grid:
            table = resize_table(table.flatten(1, 2), self.table_grid, grid, "mae").unflatten(1, grid)
        return x + table

    def _neck(self, x: Tensor) -> Tensor:
        """Apply the neck: (B, h, w, D) -> (B, M, h, w)."""
        return self.neck(x.permute(0, 3, 1, 2))
