"""NaViT (2307.06304): a vision transformer for packed images of any size and aspect ratio.

Letters in shapes: B images; C channels; P = patch * patch * C values of a patch; T tokens of the batch, image after
image and row by row (only the visible tokens if hidden tokens are dropped); Q queries; D width of a token; d width of
one head.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from tessera.encoders.attention import attention
from tessera.encoders.base import Encoder, Features
from tessera.encoders.checks import check_counts, check_heads
from tessera.encoders.errors import EncoderError
from tessera.encoders.images import Images, Mask, PackedImages, pack, patchify
from tessera.encoders.layers import MLP, LayerNorm, PreNormBlock, at_least_float32, init_linear, learned, table_grid
from tessera.encoders.randomness import next_keys, token_noise
from tessera.encoders.segments import Segments, copy_to_device, token_positions

Pool = Literal["attention", "mean"]
Positions = Literal["absolute", "fractional"]

VARIANTS = {
    "navit_micro": {"dim": 96, "depth": 4, "heads": 3, "head_dim": 32, "patch_size": 4, "image_size": 16},
    "navit_tiny": {"dim": 192, "depth": 12, "heads": 3, "head_dim": 64},
    "navit_small": {"dim": 384, "depth": 12, "heads": 6, "head_dim": 64},
    "navit_base": {"dim": 768, "depth": 12, "heads": 12, "head_dim": 64},
    "navit_large": {"dim": 1024, "depth": 24, "heads": 16, "head_dim": 64},
}


class PatchEmbed(nn.Module):
    """Linear projection of each patch, with a norm before and a norm after the projection: (T, P) -> (T, D)."""

    def __init__(self, values: int, dim: int, norm_eps: float):
        super().__init__()
        self.norm1 = LayerNorm(values, eps=norm_eps, bias=False)
        self.proj = nn.Linear(values, dim)
        self.norm2 = LayerNorm(dim, eps=norm_eps, bias=False)

    def forward(self, patches: Tensor) -> Tensor:
        return self.norm2(self.proj(self.norm1(patches)))


class HeadNorm(nn.Module):
    """RMS norm over the channels of each head, with learned gains: (heads, T, d) -> (heads, T, d)."""

    def __init__(self, heads: int, head_dim: int):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(heads, 1, head_dim))

    def forward(self, x: Tensor) -> Tensor:
        gamma = at_least_float32(self.gamma)
        return F.normalize(x.type_as(gamma), dim=-1) * (x.shape[-1] ** 0.5 * gamma)


class Attention(nn.Module):
    """Attention from the queries of an image to the tokens of the same image: (Q, D) and (T, D) -> (Q, D).

    By default, all tokens are queries. Without `segments`, images have one more axis: (B, Q, D) and (B, N, D) ->
    (B, Q, D). Queries and keys are normalised, so the logits are not divided by sqrt(d)
    (ViT-22B, 2302.05442).
    """

    def __init__(self, dim: int, heads: int, head_dim: int):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, heads * head_dim, bias=False)
        self.kv = nn.Linear(dim, 2 * heads * head_dim, bias=False)
        self.q_norm = HeadNorm(heads, head_dim)
        self.k_norm = HeadNorm(heads, head_dim)
        self.proj = nn.Linear(heads * head_dim, dim, bias=False)

    def forward(self, queries: Tensor, segments: Segments | None = None, tokens: Tensor | None = None) -> Tensor:
        tokens = queries if tokens is None else tokens
        q = rearrange(self.q(queries), "... q (heads d) -> ... heads q d", heads=self.heads)
        k, v = rearrange(self.kv(tokens), "... t (two heads d) -> two ... heads t d", two=2, heads=self.heads)
        # Autocast computes the norms in float32, but the fused attention kernels need half precision.
        q, k = self.q_norm(q).type_as(v), self.k_norm(k).type_as(v)
        out = attention(q, k, v, scale=1.0, segments=segments)
        return self.proj(rearrange(out, "... heads q d -> ... q (heads d)"))


class AttentionPool(nn.Module):
    """Attention pooling: (T, D) -> (B, D).

    A learned query attends to the tokens of each image. The query is added to the result.
    """

    def __init__(self, dim: int, heads: int, head_dim: int, norm_eps: float):
        super().__init__()
        self.query = learned(dim)
        self.norm = LayerNorm(dim, eps=norm_eps, bias=False)
        self.attn = Attention(dim, heads, head_dim)

    def forward(self, tokens: Tensor, segments: Segments | None) -> Tensor:
        if segments is None:  # (B, N, D) -> (B, D)
            queries = self.norm(self.query).expand(tokens.shape[0], 1, -1)
            return self.query + self.attn(queries, None, tokens)[:, 0]
        queries = self.norm(self.query).expand(len(segments.lengths), -1)  # (B, D)
        return self.query + self.attn(queries, replace(segments, queries=torch.ones_like(segments.lengths)), tokens)


class NaViT(Encoder):
    """Vision transformer for images of any size. Each image attends only to itself.

    The input is `PackedImages`, or a tensor (B, C, H, W) whose H and W are multiples of the patch size. The
    architecture is vit-pytorch's NaViT: factorised positions (one table for rows and one table for columns), layer
    norms without bias, normalised queries and keys, and attention pooling. If hidden tokens are replaced, the mask
    token replaces them before positions are added.

    With `positions="absolute"`, the row of a token is the index into the table for rows, and an image must not have
    more rows than this table. With `positions="fractional"`, as in the paper, the position of a token depends on the
    fraction (row of the token) / (number of rows of the image). Entry k of a table with n entries belongs to the
    fraction k / n. Between two entries, the table is interpolated linearly. Fractions beyond the last entry use the
    last entry. The table for columns is used in the same way.

    In training, a fraction `token_drop` of the tokens of each image is dropped at random. Each image keeps at least one
    token. `Features.tokens` (V, D) then holds the V remaining tokens, in order. The tokens are chosen on the CPU,
    because the number of remaining tokens determines tensor shapes. Masks cannot be combined with `token_drop`.

    Args:
        dim: width of a token.
        depth: number of blocks.
        heads: number of attention heads of a block.
        head_dim: width of a head. None means `dim` / `heads`.
        mlp_ratio: hidden width of the MLP divided by `dim`.
        patch_size: side of a patch in pixels.
        image_size: image size in pixels for which the position tables are made, one side or (height, width).
        channels: number of channels of an image.
        positions: lookup in the position tables, by row and column ("absolute") or by their fractions ("fractional").
        pool: rule for `Features.pooled`, pooling with a learned query ("attention") or mean of the tokens ("mean").
        token_drop: fraction of the tokens of each image that is dropped in training.
        token_drop_full: fraction at `image_size`. It changes linearly with the image area. None means `token_drop`.
        drop_path: drop path rate of the last block. The rate rises linearly from 0 at the first block.
        mask_token: add a learned token that replaces hidden tokens.
        norm_eps: epsilon of all layer norms.
        checkpoint_activations: recompute each block in the backward pass to save memory.
    """

    can_drop = True
    takes_packed = True
    # These gains of norms have several dimensions, so they would otherwise get weight decay like matrices.
    no_weight_decay = ("q_norm.gamma", "k_norm.gamma")

    def __init__(
        self,
        *,
        dim: int = 384,
        depth: int = 12,
        heads: int = 6,
        head_dim: int | None = None,
        mlp_ratio: float = 4.0,
        patch_size: int = 16,
        image_size: int | tuple[int, int] = 256,
        channels: int = 3,
        positions: Positions = "absolute",
        pool: Pool = "attention",
        token_drop: float = 0.0,
        token_drop_full: float | None = None,
        drop_path: float = 0.0,
        mask_token: bool = False,
        norm_eps: float = 1e-5,
        checkpoint_activations: bool = False,
    ):
        super().__init__()
        check_counts(depth=depth, patch_size=patch_size, channels=channels)
        check_heads(dim, heads, head_dim)
        _check_fractions(token_drop=token_drop, token_drop_full=token_drop_full)
        head_dim = dim // heads if head_dim is None else head_dim
        self.dim, self.stride, self.channels = dim, patch_size, channels
        self.fractional = positions == "fractional"
        self.token_drop, self.token_drop_full = token_drop, token_drop if token_drop_full is None else token_drop_full
        self.checkpoint_activations = checkpoint_activations

        self.patch_embed = PatchEmbed(patch_size**2 * channels, dim, norm_eps)
        rows, columns = table_grid(image_size, patch_size)
        self.pos_embed_rows = learned(rows, dim)
        self.pos_embed_columns = learned(columns, dim)
        self.mask_token = learned(1, dim) if mask_token else None
        self.blocks = nn.ModuleList()
        for i in range(depth):
            attn, mlp, rate = Attention(dim, heads, head_dim), MLP(dim, round(dim * mlp_ratio)), i / max(depth - 1, 1)
            block = PreNormBlock(dim, attn, mlp, norm_eps=norm_eps, drop_path=drop_path * rate, norm_bias=False)
            self.blocks.append(block)
        self.norm = LayerNorm(dim, eps=norm_eps, bias=False)
        self.attn_pool = AttentionPool(dim, heads, head_dim, norm_eps) if pool == "attention" else None
        self.apply(lambda layer: init_linear(layer, "trunc_normal"))

    def _outputs(
        self, images: Images, mask: Mask | None = None, drop: bool = False
    ) -> Iterator[tuple[Tensor, Segments | None]]:
        x, segments = self._embed(images, mask, drop)
        scales = self.draw_drop_path(images.shape[0] if isinstance(images, Tensor) else len(images), x.device)
        for block in self.blocks:
            x = self.run_block(block, x, segments, next(scales))
            yield x, segments

    def _embed(self, images: Images, mask: Mask | None = None, drop: bool = False) -> tuple[Tensor, Segments | None]:
        """Return the input (T, D) of the first block, and the boundaries of the images in this input.

        `torch.export` cannot follow boundaries of a dynamic number of images. It gets the input (B, N, D) and None.
        """
        self._check(images, mask, drop)
        if torch.compiler.is_exporting() and isinstance(images, Tensor):
            return self._embed_grid(images), None
        packed = images if isinstance(images, PackedImages) else pack([images], self.stride)
        patches, device = packed.patches, packed.patches.device
        visible, lengths = None, packed.lengths
        if mask is not None and drop:
            visible, lengths = mask.visible, mask.lengths
        elif self._drops_tokens():
            visible, lengths = _random_tokens(lengths, self._drop_rates(lengths), next_keys(len(lengths)))
            visible = copy_to_device(visible, device)

        segments = Segments(lengths, device, sequences=packed.sequences).prepared()
        indices, sides = token_positions(packed.grids, segments, visible)  # (2, T) each
        if visible is not None:
            patches = patches.index_select(0, visible)  # (V, P)
        x = self.patch_embed(patches)  # (T, D)
        if mask is not None and not drop:
            x = self.replace_hidden(x, mask.hidden[:, None])
        for axis, table in enumerate((self.pos_embed_rows, self.pos_embed_columns)):
            x = x + self._positions(table, indices[axis], sides[axis])
        return x, segments

    def _embed_grid(self, images: Tensor) -> Tensor:
        """Return the input of the first block for images of one size, without masks: (B, C, H, W) -> (B, N, D)."""
        x = self.patch_embed(patchify(images, self.stride).unflatten(0, (images.shape[0], -1)))
        rows, columns = self.grid(images.shape[-2], images.shape[-1])
        row, column = (torch.arange(side, device=x.device) for side in (rows, columns))
        x = x + self._positions(self.pos_embed_rows, row[:, None].expand(rows, columns).flatten(), rows)
        return x + self._positions(self.pos_embed_columns, column.expand(rows, columns).flatten(), columns)

    def _positions(self, table: Tensor, indices: Tensor, sides: Tensor | int) -> Tensor:
        """Look up the position embeddings (T, D) of tokens in a table (n, D).

        Args:
            indices: row of each token, or column of each token: (T,).
            sides: number of rows, or number of columns, of the image to which each token belongs: (T,).
        """
        if not self.fractional:
            return F.embedding(indices, table)
        scaled = indices * len(table)  # integers, because float rounding could move the fraction k / n below entry k
        before = scaled // sides
        after = (before + 1).clamp(max=len(table) - 1)
        rest = ((scaled % sides) / sides).to(table.dtype)
        return torch.lerp(F.embedding(before, table), F.embedding(after, table), rest[:, None])

    def _drops_tokens(self) -> bool:
        return self.training and max(self.token_drop, self.token_drop_full) > 0

    def _drop_rates(self, lengths: Tensor) -> Tensor:
        """Return the fraction of tokens to drop from each image, given the token count of each image: (B,) -> (B,)."""
        full = len(self.pos_embed_rows) * len(self.pos_embed_columns)
        fill = (lengths.double() / full).clamp(max=1)
        return self.token_drop + (self.token_drop_full - self.token_drop) * fill

    def _features(self, output: tuple[Tensor, Segments | None], grids: Tensor) -> Features:
        x, segments = output
        tokens = self.norm(x)
        if segments is None:
            pooled = tokens.mean(1) if self.attn_pool is None else self.attn_pool(tokens, None)
            return Features(pooled, tokens.flatten(0, 1), grids)
        pooled = _mean(tokens, segments) if self.attn_pool is None else self.attn_pool(tokens, segments)  # (B, D)
        return Features(pooled, tokens, grids)

    def _check(self, images: Images, mask: Mask | None, drop: bool):
        """Check the arguments of `forward`, including patch sizes, position table sizes and token dropping."""
        self.check(images, mask, drop=drop)
        side = self.stride
        if isinstance(images, Tensor) and (images.shape[-2] % side or images.shape[-1] % side):
            fitting = [sorted({size // side * side, -(-size // side) * side}) for size in images.shape[-2:]]
            rows, columns = (" or ".join(map(str, sizes)) for sizes in fitting)
            raise EncoderError(
                f"Images of {images.shape[-2]} x {images.shape[-1]} pixels do not divide into patches of "
                f"{side} x {side} pixels. Make the images {rows} pixels high and {columns} pixels wide."
            )
        packed = isinstance(images, PackedImages)
        rows, columns = images.grids.amax(0).tolist() if packed else self.grid(*images.shape[-2:])
        table = len(self.pos_embed_rows), len(self.pos_embed_columns)
        if not self.fractional and (rows > table[0] or columns > table[1]):
            raise EncoderError(
                f"Images of up to {rows} x {columns} patches do not fit position tables of {table[0]} rows and "
                f"{table[1]} columns. Build the encoder with image_size="
                f'({max(rows, table[0]) * side}, {max(columns, table[1]) * side}), or with positions="fractional".'
            )
        if mask is not None and self._drops_tokens():
            raise EncoderError("A mask cannot be combined with token_drop. Set token_drop and token_drop_full to 0.")


def _check_fractions(**fractions: float | None):
    for name, value in fractions.items():
        if value is not None and not 0 <= value < 1:
            raise EncoderError(f"{name} is a fraction of tokens. It must be at least 0 and less than 1, not {value}.")


def _random_tokens(lengths: Tensor, rates: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose the tokens that remain when a fraction of the tokens of each image is dropped at random.

    Args:
        lengths: number of tokens of each image: (B,).
        rates: fraction of tokens to drop from each image: (B,). The number of remaining tokens is rounded.
        keys: random key of each image: (B,). If None, the tokens are chosen with torch's generator.

    Returns:
        Ascending indices (V,) of the remaining tokens among all tokens, and the number of remaining tokens per image
        (B,).
    """
    kept = (lengths * (1 - rates)).round().long().clamp(min=1)
    image_ids = torch.repeat_interleave(lengths)  # (T,)
    rank = torch.arange(len(image_ids)) - (lengths.cumsum(0) - lengths)[image_ids]
    drawn = None if keys is None else token_noise(keys, image_ids, rank)
    noise = torch.rand(len(image_ids), dtype=torch.float64) if drawn is None else drawn
    order = (image_ids + noise).argsort(stable=True)  # random order of the tokens of each image
    return order[rank < kept[image_ids]].sort().values, kept


def _mean(tokens: Tensor, segments: Segments) -> Tensor:
    """Return the mean of the tokens of each image: (T, D) -> (B, D). The sum is computed in at least float32."""
    wide = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
    sums = wide.new_zeros(len(segments.lengths), tokens.shape[-1]).index_add(0, segments.image_ids, wide)  # (B, D)
    return (sums / copy_to_device(segments.lengths, tokens.device)[:, None]).to(tokens.dtype)
