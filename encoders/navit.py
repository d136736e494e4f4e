"""NaViT (2307.06304): a vision transformer for images of any size and aspect ratio, packed in one flat batch.

B images, C channels; P = patch * patch * C values of a patch; T tokens of the batch, image after image and row by row
(or those of them that are visible); Q queries; D width, d width of one head.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from encoders.base import Encoder, Features
from encoders.images import Images, Layout, Mask, PackedImages, onto, pack, places
from encoders.layers import MLP, DropPath, attention, check_choices, check_counts, init_linear, learned, table_grid

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
    """A linear map of each patch between two norms: (T, P) -> (T, D)."""

    def __init__(self, values: int, dim: int, norm_eps: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(values, eps=norm_eps, bias=False)
        self.proj = nn.Linear(values, dim)
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps, bias=False)

    def forward(self, patches: Tensor) -> Tensor:
        return self.norm2(self.proj(self.norm1(patches)))


class HeadNorm(nn.Module):
    """Root mean square norm of each head with a gain of its own: (heads, T, d) -> (heads, T, d)."""

    def __init__(self, heads: int, head_dim: int):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(heads, 1, head_dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x.to(self.gamma.dtype), dim=-1) * (x.shape[-1] ** 0.5 * self.gamma)


class Attention(nn.Module):
    """Queries of an image to the context of that image: (Q, D) and (T, D) -> (Q, D).

    Queries and keys are normalised, so the logits have no other scale (ViT-22B, 2302.05442).
    """

    def __init__(self, dim: int, heads: int, head_dim: int):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, heads * head_dim, bias=False)
        self.kv = nn.Linear(dim, 2 * heads * head_dim, bias=False)
        self.q_norm = HeadNorm(heads, head_dim)
        self.k_norm = HeadNorm(heads, head_dim)
        self.proj = nn.Linear(heads * head_dim, dim, bias=False)

    def forward(self, x: Tensor, context: Tensor, layout: Layout) -> Tensor:
        q = rearrange(self.q(x), "q (heads d) -> heads q d", heads=self.heads)
        k, v = rearrange(self.kv(context), "t (two heads d) -> two heads t d", two=2, heads=self.heads)
        # back from float32, in which autocast leaves the norms: the fast kernels want half precision
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        out = attention(q, k, v, scale=1.0, packed=layout)
        return self.proj(rearrange(out, "heads q d -> q (heads d)"))


class Block(nn.Module):
    """Attention and MLP, each a residual branch with its norm in front: (T, D) -> (T, D)."""

    def __init__(self, dim: int, heads: int, head_dim: int, *, mlp_ratio: float, norm_eps: float, drop_path: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps, bias=False)
        self.attn = Attention(dim, heads, head_dim)
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps, bias=False)
        self.mlp = MLP(dim, round(dim * mlp_ratio))
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        inside = self.norm1(x)
        x = x + self.drop_path(self.attn(inside, inside, layout), layout)
        return x + self.drop_path(self.mlp(self.norm2(x)), layout)


class AttentionPool(nn.Module):
    """A learned query to the tokens of each image, added to what it finds: (T, D) -> (B, D)."""

    def __init__(self, dim: int, heads: int, head_dim: int, norm_eps: float):
        super().__init__()
        self.query = learned(dim)
        self.norm = nn.LayerNorm(dim, eps=norm_eps, bias=False)
        self.attn = Attention(dim, heads, head_dim)

    def forward(self, tokens: Tensor, layout: Layout) -> Tensor:
        queries = self.norm(self.query).expand(len(layout.lengths), -1)  # (B, D)
        return self.query + self.attn(queries, tokens, replace(layout, queries=torch.ones_like(layout.lengths)))


class NaViT(Encoder):
    """Vision transformer for images of any size: each attends to itself alone, at the price of its own tokens.

    Takes (B, C, H, W) or `PackedImages`. The architecture is that of vit-pytorch's NaViT: factorised positions (one
    table for rows, one for columns), layer norms without bias, normalised queries and keys, and a pooling by attention.
    With `positions="absolute"` a table is indexed by the row, and an image must not have more rows than the table has.
    With "fractional" it is indexed by row / rows, as in the paper: entry k of n stands at k / n, between two entries
    their values are mixed linearly, and past the last one it is the last; so any grid has positions.

    In training, `token_drop` leaves out tokens of each image at random, drawn by torch's generator of the CPU (counts
    decide shapes), at least one being kept: then `Features.tokens` (V, D) are those that were kept, in their order.

    Args:
        dim: width of a token.
        depth: number of blocks.
        heads: attention heads of a block.
        head_dim: width of one head, dim / heads when None.
        mlp_ratio: hidden width of the MLP over `dim`.
        patch_size: side of a patch in pixels.
        image_size: pixels of the largest image, one side or (rows, columns), for which the position tables are made.
        channels: channels of an image.
        positions: what indexes the position tables, the row and column or their fraction of the image's side.
        pool: what stands for the image, a learned query's attention to the tokens or their mean.
        token_drop: share of tokens left out of each image in training.
        token_drop_full: if set, the share at an image that fills the tables, rising linearly from token_drop at none.
        drop_path: share of residual branches left out in training at the last block, rising linearly from 0.
        mask_token: have a learned token to put in place of hidden ones.
        norm_eps: epsilon of all layer norms.
        checkpoint_activations: recompute each block in the backward pass, which saves memory.
    """

    can_drop = True
    takes_packed = True
    undecayed = ("q_norm.gamma", "k_norm.gamma")  # gains of norms, as vectors are

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
        check_choices(positions=(positions, Positions), pool=(pool, Pool))
        check_counts(dim=dim, depth=depth, heads=heads, patch_size=patch_size, channels=channels)
        _check_shares(token_drop=token_drop, token_drop_full=token_drop_full)
        if head_dim is None and dim % heads:
            raise ValueError(f"a width (dim) of {dim} does not split into {heads} heads: set head_dim")
        head_dim = dim // heads if head_dim is None else head_dim
        check_counts(head_dim=head_dim)
        self.dim, self.stride, self.channels = dim, patch_size, channels
        self.fractional = positions == "fractional"
        self.token_drop, self.token_drop_full = token_drop, token_drop if token_drop_full is None else token_drop_full
        self.checkpoint_activations = checkpoint_activations

        self.patch_embed = PatchEmbed(patch_size**2 * channels, dim, norm_eps)
        rows, columns = table_grid(image_size, patch_size)
        self.pos_embed_rows = learned(rows, dim)
        self.pos_embed_columns = learned(columns, dim)
        self.mask_token = learned(1, dim) if mask_token else None
        rates = [drop_path * i / max(depth - 1, 1) for i in range(depth)]
        self.blocks = nn.ModuleList(
            Block(dim, heads, head_dim, mlp_ratio=mlp_ratio, norm_eps=norm_eps, drop_path=rate) for rate in rates
        )
        self.norm = nn.LayerNorm(dim, eps=norm_eps, bias=False)
        self.attn_pool = AttentionPool(dim, heads, head_dim, norm_eps) if pool == "attention" else None
        self.apply(lambda layer: init_linear(layer, "trunc_normal"))

    def forward(self, images: Images, mask: Mask | None = None, *, drop: bool = False) -> Features:
        """Encode `images`, normalised floats: (B, C, H, W) whose sides the patch divides, or packed ones.

        With `mask`, hidden tokens are replaced by the mask token, which gets their positions. With `drop` they are left
        out: `tokens` (V, D) belong to `mask.visible`, and each image keeps as many as it has, at least one.

        Raises:
            ValueError: the images or the mask do not fit the encoder, or there is a mask while `token_drop` is at work.
        """
        x, layout = self._embed(images, mask, drop)
        return self._features(self._run(self.blocks, x, layout), layout, self.grids(images))

    def intermediate(self, images: Images, blocks: int = 1) -> list[Features]:
        if not 1 <= blocks <= len(self.blocks):
            raise ValueError(f"{blocks} blocks asked of an encoder that has {len(self.blocks)}")
        x, layout = self._embed(images)
        x = self._run(self.blocks[:-blocks], x, layout)
        features = []
        for block in self.blocks[-blocks:]:
            x = self._run([block], x, layout)
            features.append(self._features(x, layout, self.grids(images)))
        return features

    def _embed(self, images: Images, mask: Mask | None = None, drop: bool = False) -> tuple[Tensor, Layout]:
        """What the first block gets: B images -> (T, D)."""
        self._check(images, mask, drop)
        packed = images if isinstance(images, PackedImages) else pack([images], self.stride)
        patches, device = packed.patches, packed.patches.device
        visible, lengths = None, packed.lengths
        if mask is not None and drop:
            visible, lengths = mask.visible, mask.lengths
        elif self._drops_tokens():
            visible, lengths = _some(lengths, self._shares(lengths))
            visible = onto(visible, device)

        layout = Layout(lengths, device, sequences=packed.sequences)
        own, sides = places(packed.grids, layout, visible)  # (2, T) each
        if visible is not None:
            patches = patches.index_select(0, visible)  # (V, P)
        x = self.patch_embed(patches)  # (T, D)
        if mask is not None and not drop:
            assert self.mask_token is not None
            x = torch.where(mask.hidden[:, None], self.mask_token, x)
        for axis, table in enumerate((self.pos_embed_rows, self.pos_embed_columns)):
            x = x + self._positions(table, own[axis], sides[axis])
        return x, layout

    def _positions(self, table: Tensor, own: Tensor, sides: Tensor) -> Tensor:
        """Entries of a table (n, D) for tokens at place `own` (T,) along images of `sides` (T,) patches: (T, D)."""
        if not self.fractional:
            return F.embedding(own, table)
        own = own * len(table)  # over `sides`: in whole numbers, so that entries themselves are hit exactly
        before = own // sides
        after = (before + 1).clamp(max=len(table) - 1)
        rest = ((own % sides) / sides).to(table.dtype)
        return torch.lerp(F.embedding(before, table), F.embedding(after, table), rest[:, None])

    def _drops_tokens(self) -> bool:
        return self.training and max(self.token_drop, self.token_drop_full) > 0

    def _shares(self, lengths: Tensor) -> Tensor:
        """Share of tokens to leave out of images of so many: (B,) -> (B,)."""
        full = len(self.pos_embed_rows) * len(self.pos_embed_columns)
        fill = (lengths.double() / full).clamp(max=1)
        return self.token_drop + (self.token_drop_full - self.token_drop) * fill

    def _run(self, blocks: Iterable[nn.Module], x: Tensor, layout: Layout) -> Tensor:
        """(T, D) -> (T, D)."""
        for block in blocks:
            recompute = self.checkpoint_activations and self.training
            x = checkpoint(block, x, layout, use_reentrant=False) if recompute else block(x, layout)
        return x

    def _features(self, x: Tensor, layout: Layout, grids: Tensor) -> Features:
        """From the last block's output (T, D)."""
        tokens = self.norm(x)
        pooled = _mean(tokens, layout) if self.attn_pool is None else self.attn_pool(tokens, layout)  # (B, D)
        return Features(pooled, tokens, grids)

    def _check(self, images: Images, mask: Mask | None, drop: bool):
        """What the base asks, and what flat patches and factorised positions ask beyond it."""
        self.check(images, mask, drop=drop)
        side, grids = self.stride, self.grids(images)
        if isinstance(images, PackedImages):
            _check_packed(images, side, self.channels)
        elif images.shape[-2] % side or images.shape[-1] % side:
            fitting = [sorted({size // side * side, -(-size // side) * side}) for size in images.shape[-2:]]
            rows, columns = (" or ".join(map(str, sizes)) for sizes in fitting)
            raise ValueError(
                f"images of {images.shape[-2]} x {images.shape[-1]} pixels do not divide into patches of {side}: "
                f"make them {rows} pixels high and {columns} wide"
            )
        largest, table = grids.amax(0), torch.tensor([len(self.pos_embed_rows), len(self.pos_embed_columns)])
        if not self.fractional and bool((largest > table).any()):
            rows, columns = torch.maximum(largest, table).tolist()
            raise ValueError(
                f"images of up to {int(largest[0])} x {int(largest[1])} patches do not fit position tables of "
                f"{int(table[0])} rows and {int(table[1])} columns: build the encoder with image_size "
                f'({rows * side}, {columns * side}), or with positions="fractional"'
            )
        if mask is not None and self._drops_tokens():
            raise ValueError("a mask and token_drop both leave out tokens: set token_drop (and token_drop_full) to 0")
        if drop and mask is not None and int(mask.lengths.min()) < 1:
            raise ValueError(
                f"with drop=True each image must keep at least one token; image {int(mask.lengths.argmin())} keeps none"
            )


def _check_shares(**shares: float | None):
    for name, value in shares.items():
        if value is not None and not 0 <= value < 1:
            raise ValueError(f"{name} is a share of tokens left out, 0 <= {name} < 1, not {value}")


def _check_packed(images: PackedImages, side: int, channels: int):
    """Whether these are patches of `side` pixels with `channels` channels, and at least one of each image."""
    count, values = int(images.lengths.sum()), images.patches.shape[-1]
    if images.patch != side:
        raise ValueError(f"these images are packed in patches of {images.patch} pixels, not of {side}")
    if values != side**2 * channels:
        raise ValueError(
            f"these patches of {side} x {side} pixels have {values} values, not {channels} for each pixel; for another "
            "number of channels build the encoder with channels=N"
        )
    if len(images.patches) != count or int(images.grids.min()) < 1:
        raise ValueError(f"{len(images.patches)} packed patches do not make images of {images.grids.tolist()} patches")


def _some(lengths: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens that stay when a share of each image, rounded to whole tokens, is left out: their flat places (V,),
    ascending, and how many each image keeps (B,)."""
    kept = (lengths * (1 - shares)).round().long().clamp(min=1)
    owner = torch.repeat_interleave(lengths)  # (T,)
    order = (owner + torch.rand(len(owner), dtype=torch.float64)).argsort()  # shuffled within each image
    rank = torch.arange(len(owner)) - (lengths.cumsum(0) - lengths)[owner]
    return order[rank < kept[owner]].sort().values, kept


def _mean(tokens: Tensor, layout: Layout) -> Tensor:
    """Mean of the tokens of each image, summed in float32 at least: (T, D) -> (B, D)."""
    wide = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
    sums = wide.new_zeros(len(layout.lengths), tokens.shape[-1]).index_add(0, layout.owner, wide)  # (B, D)
    return (sums / onto(layout.lengths, tokens.device)[:, None]).to(tokens.dtype)
