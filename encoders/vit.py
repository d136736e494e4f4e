"""Vision transformer (2010.11929) as in DINO (2104.14294), MAE (2111.06377), DeiT (2012.12877), registers (2309.16588).

Letters in shapes: B images; C channels, H x W pixels; h x w grid; N = h * w patches of an image (only the visible
patches, if hidden tokens are dropped); D width of a token; d width of one head; S prefix tokens before the patches
(class, distillation and register tokens), of which the first K (class and distillation) have positions. Parameters have
the names of the published weights.
"""

from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from typing import Literal

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from encoders.base import Encoder, Features
from encoders.errors import EncoderError
from encoders.images import Images, Mask, patchify
from encoders.layers import (
    MLP,
    DropPath,
    Init,
    Interpolation,
    LayerScale,
    Scales,
    attention,
    branch_scales,
    check_block_count,
    check_choices,
    check_counts,
    check_heads,
    init_linear,
    learned,
    modules_of,
    resize_table,
    sincos_table,
    table_grid,
)
from encoders.segments import Segments

Pool = Literal["class", "mean", "all"]
Positions = Literal["learned", "sincos"]
PositionInit = Literal["normal", "sincos"]

VARIANTS = {
    "vit_micro": {"dim": 96, "depth": 4, "heads": 3, "patch_size": 4, "image_size": 16},
    "vit_mini": {"dim": 128, "depth": 4, "heads": 4, "patch_size": 8, "image_size": 64},
    "vit_tiny": {"dim": 192, "depth": 12, "heads": 3},
    "vit_small": {"dim": 384, "depth": 12, "heads": 6},
    "vit_base": {"dim": 768, "depth": 12, "heads": 12},
    "vit_large": {"dim": 1024, "depth": 24, "heads": 16},
    "vit_huge": {"dim": 1280, "depth": 32, "heads": 16, "patch_size": 14},
}


class PatchEmbed(nn.Module):
    """Cropping of images to whole patches, then linear projection of each patch: (B, C, H, W) -> (B, N, D)."""

    def __init__(self, channels: int, dim: int, patch_size: int, init: Init):
        super().__init__()
        self.proj = nn.Conv2d(channels, dim, kernel_size=patch_size, stride=patch_size)
        if init == "xavier":  # otherwise the layer keeps torch's default initialisation, as in DINO
            nn.init.xavier_uniform_(self.proj.weight.detach().flatten(1))

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images).flatten(2).transpose(1, 2)


class NormedPatchEmbed(nn.Module):
    """`PatchEmbed` with a norm before and after the projection, as in vit-pytorch: (B, C, H, W) -> (B, N, D)."""

    def __init__(self, channels: int, dim: int, patch_size: int, norm_eps: float):
        super().__init__()
        self.patch_size = patch_size
        self.norm1 = nn.LayerNorm(channels * patch_size**2, eps=norm_eps)
        self.proj = nn.Linear(channels * patch_size**2, dim)
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)

    def forward(self, images: Tensor) -> Tensor:
        height, width = (side - side % self.patch_size for side in images.shape[-2:])
        patches = patchify(images[..., :height, :width], self.patch_size)  # (B * N, P)
        return self.norm2(self.proj(self.norm1(patches))).unflatten(0, (len(images), -1))


class Attention(nn.Module):
    """Self-attention: (B, N, D) -> (B, N, D), or (T, D) -> (T, D) for packed images with `segments`."""

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        qkv_bias: bool,
        qk_norm: bool,
        qk_scale: float | None,
        norm_eps: float,
        head_dim: int | None = None,
    ):
        super().__init__()
        head_dim = dim // heads if head_dim is None else head_dim
        self.heads = heads
        self.scale = head_dim**-0.5 if qk_scale is None else qk_scale
        self.qkv = nn.Linear(dim, 3 * heads * head_dim, bias=qkv_bias)
        self.q_norm = nn.LayerNorm(head_dim, eps=norm_eps) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(head_dim, eps=norm_eps) if qk_norm else nn.Identity()
        self.proj = nn.Linear(heads * head_dim, dim)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values: (..., N, D) -> three tensors (..., heads, N, d)."""
        q, k, v = rearrange(self.qkv(x), "... n (three heads d) -> three ... heads n d", three=3, heads=self.heads)
        return self.q_norm(q), self.k_norm(k), v

    def forward(self, x: Tensor, segments: Segments | None = None) -> Tensor:
        q, k, v = self._split(x)
        out = attention(q, k, v, scale=self.scale, segments=segments)
        return self.proj(rearrange(out, "... heads n d -> ... n (heads d)"))

    def weights(self, x: Tensor) -> Tensor:
        """Return the attention weight of each query for each key: (B, N, D) -> (B, heads, N, N). Rows sum to 1."""
        q, k, _ = self._split(x)
        return (self.scale * q @ k.mT).softmax(-1)


class Block(nn.Module):
    """Pre-norm transformer block: (B, N, D) -> (B, N, D), or (T, D) -> (T, D) for packed images with `segments`."""

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        mlp_ratio: float,
        qkv_bias: bool,
        norm_eps: float,
        qk_norm: bool,
        qk_scale: float | None,
        layer_scale: float | None,
        drop_path: float,
        head_dim: int | None = None,
    ):
        super().__init__()
        attn = partial(Attention, dim, heads, qkv_bias=qkv_bias, qk_norm=qk_norm, qk_scale=qk_scale)
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.attn = attn(norm_eps=norm_eps, head_dim=head_dim)
        self.ls1 = nn.Identity() if layer_scale is None else LayerScale(dim, layer_scale)
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = MLP(dim, int(dim * mlp_ratio))
        self.ls2 = nn.Identity() if layer_scale is None else LayerScale(dim, layer_scale)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, segments: Segments | None = None, scales: Tensor | None = None) -> Tensor:
        first, second = branch_scales(scales)
        x = x + self.drop_path(self.ls1(self.attn(self.norm1(x), segments)), segments, first)
        return x + self.drop_path(self.ls2(self.mlp(self.norm2(x))), segments, second)


class ViT(Encoder):
    """Vision transformer for images of any size. The position table is resized to the grid of the images.

    If a side of the image is not a multiple of the patch, the last pixels of that side are cropped. With `pool="mean"`,
    as in MAE's fine-tuning, the layer norm `fc_norm` replaces the final layer norm `norm`. `Features.pooled` is then
    `fc_norm` of the mean patch token, and `Features.tokens` is `fc_norm` of each patch token. With `pool="all"`, as in
    vit-pytorch, `Features.pooled` is the mean of all tokens after `norm`, prefix tokens included. `pos_embed` has rows
    for the class token, the distillation token and the patches, and no rows for register tokens.

    Set `mask_token` only if training replaces hidden tokens, and `classes` only if training uses `logits`. Otherwise
    the mask token or the class head gets no gradient.

    Args:
        dim: width of a token.
        depth: number of blocks.
        heads: number of attention heads of a block.
        head_dim: width of a head. None means `dim` / `heads`.
        mlp_ratio: hidden width of the MLP divided by `dim`.
        patch_size: side of a patch in pixels.
        image_size: image size in pixels for which the position table is made, one side or (height, width).
        patch_norm: normalise patches before and after their projection, as in vit-pytorch.
        channels: number of channels of an image.
        class_token: add a class token.
        registers: number of register tokens.
        distillation_token: add a distillation token after the class token (DeiT).
        mask_token: add a learned token that replaces hidden tokens.
        pool: rule for `Features.pooled`: class token ("class"), mean of patch tokens ("mean") or of all tokens ("all").
        qkv_bias: add a bias to queries, keys and values.
        norm_eps: epsilon of all layer norms.
        qk_norm: normalise queries and keys in each head.
        qk_scale: factor of the attention logits. None means 1 / sqrt(width of a head).
        layer_scale: initial value of the layer scale. None means no layer scale.
        drop_path: drop path rate of the last block. The rate rises linearly from 0 at the first block.
        positions: learned position table ("learned"), or the fixed sine-cosine table of MAE ("sincos").
        interpolation: rule that resizes the position table to another grid, DINO's ("dino") or MAE's ("mae").
        init: initialisation of weights, DINO's truncated normal ("trunc_normal") or MAE's Xavier uniform ("xavier").
        position_init: initial values of a learned table, truncated normal ("normal") or sine-cosine table ("sincos").
        representation_size: width of a linear layer with tanh before the class head. None means no such layer.
        classes: number of outputs of the class head and of the distillation head. 0 means no heads.
        checkpoint_activations: recompute each block in the backward pass to save memory.
    """

    can_drop = True

    def __init__(
        self,
        *,
        dim: int = 384,
        depth: int = 12,
        heads: int = 6,
        head_dim: int | None = None,
        mlp_ratio: float = 4.0,
        patch_size: int = 16,
        image_size: int | tuple[int, int] = 224,
        patch_norm: bool = False,
        channels: int = 3,
        class_token: bool = True,
        registers: int = 0,
        distillation_token: bool = False,
        mask_token: bool = False,
        pool: Pool = "class",
        qkv_bias: bool = True,
        norm_eps: float = 1e-6,
        qk_norm: bool = False,
        qk_scale: float | None = None,
        layer_scale: float | None = None,
        drop_path: float = 0.0,
        positions: Positions = "learned",
        interpolation: Interpolation = "dino",
        init: Init = "trunc_normal",
        position_init: PositionInit = "normal",
        representation_size: int | None = None,
        classes: int = 0,
        checkpoint_activations: bool = False,
    ):
        super().__init__()
        check_choices(pool=(pool, Pool), positions=(positions, Positions), position_init=(position_init, PositionInit))
        check_choices(interpolation=(interpolation, Interpolation), init=(init, Init))
        check_counts(depth=depth, patch_size=patch_size, channels=channels)
        check_heads(dim, heads, head_dim)
        if not class_token and (pool == "class" or distillation_token):
            raise EncoderError('class_token=False needs pool="mean" or pool="all", and distillation_token=False.')
        self.dim, self.stride, self.channels, self.pool = dim, patch_size, channels, pool
        self.interpolation: Interpolation = interpolation
        self.checkpoint_activations = checkpoint_activations

        embed = partial(NormedPatchEmbed, norm_eps=norm_eps) if patch_norm else partial(PatchEmbed, init=init)
        self.patch_embed = embed(channels, dim, patch_size)
        self.cls_token = learned(1, 1, dim) if class_token else None
        self.dist_token = learned(1, 1, dim) if distillation_token else None
        self.reg_token = learned(1, registers, dim) if registers else None
        self.mask_token = learned(1, dim) if mask_token else None
        self.num_positioned = class_token + distillation_token
        self.num_prefix_tokens = self.num_positioned + registers
        self.table_grid = table_grid(image_size, patch_size)
        self.pos_embed = _position_table(self.num_positioned, self.table_grid, dim, positions, position_init)
        block = partial(Block, dim, heads, mlp_ratio=mlp_ratio, qkv_bias=qkv_bias, norm_eps=norm_eps, qk_norm=qk_norm)
        block = partial(block, qk_scale=qk_scale, layer_scale=layer_scale, head_dim=head_dim)
        self.blocks = nn.ModuleList(block(drop_path=drop_path * i / max(depth - 1, 1)) for i in range(depth))
        self.norm = nn.Identity() if pool == "mean" else nn.LayerNorm(dim, eps=norm_eps)
        self.fc_norm = nn.LayerNorm(dim, eps=norm_eps) if pool == "mean" else nn.Identity()
        self._add_heads(representation_size, classes)
        self.apply(lambda layer: init_linear(layer, init))

    def _add_heads(self, representation_size: int | None, classes: int):
        if representation_size is not None and (not classes or self.dist_token is not None):
            raise EncoderError("representation_size needs classes > 0 and distillation_token=False.")
        width = representation_size or self.dim
        self.pre_logits = nn.Sequential()
        if representation_size is not None:
            self.pre_logits = nn.Sequential(OrderedDict(fc=nn.Linear(self.dim, width), act=nn.Tanh()))
        self.head = nn.Linear(width, classes) if classes else None
        self.head_dist = nn.Linear(width, classes) if classes and self.dist_token is not None else None

    def forward(self, images: Images, mask: Mask | None = None, *, drop: bool = False) -> Features:
        """Encode normalised images (B, C, H, W).

        If `mask` is given, the mask token replaces each hidden token before positions are added. With `drop=True`, the
        encoder processes only the visible tokens: `Features.tokens` (V, D) are in the order of `mask.visible`, and all
        images must have the same number of visible tokens.

        Raises:
            EncoderError: the images or the mask do not fit the encoder.
        """
        x = self._embed(images, mask, drop)
        return self._features(self._run(self.blocks, x, self.draw_drop_path(len(x), x.device)), images)

    def intermediate(self, images: Images, blocks: int = 1) -> list[Features]:
        check_block_count(blocks, len(self.blocks))
        x = self._embed(images)
        scales = self.draw_drop_path(len(x), x.device)
        x = self._run(self.blocks[:-blocks], x, scales)
        features = []
        for block in self.blocks[-blocks:]:
            x = self._run([block], x, scales)
            features.append(self._features(x, images))
        return features

    def last_attention(self, images: Tensor) -> Tensor:
        """Return the attention weights of the last block between all tokens: (B, C, H, W) -> (B, heads, S + N, S + N).

        Each row sums to 1.
        """
        last = modules_of(self.blocks, Block)[-1]
        x = self._embed(images)
        x = self._run(self.blocks[:-1], x, self.draw_drop_path(len(x), x.device))
        return last.attn.weights(last.norm1(x))

    def logits(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return class scores: (B, C, H, W) -> (B, classes).

        If the encoder has a distillation token, return the scores of both heads as a pair in training mode, and the
        mean of both scores in evaluation mode.

        Raises:
            EncoderError: the encoder has no class head.
        """
        if self.head is None:
            raise EncoderError("The encoder has no class head. Build it with classes=N.")
        x = self._embed(images)
        x = self._run(self.blocks, x, self.draw_drop_path(len(x), x.device))
        scores = self.head(self.pre_logits(self._features(x, images).pooled))
        if self.head_dist is None:
            return scores
        distilled = self.head_dist(self.fc_norm(self.norm(x[:, 1])))
        return (scores, distilled) if self.training else (scores + distilled) / 2

    def _embed(self, images: Images, mask: Mask | None = None, drop: bool = False) -> Tensor:
        """Return the input of the first block: (B, C, H, W) -> (B, S + N, D)."""
        images = self.checked(images, mask, drop=drop)
        positions = self._positions(images.shape[-2], images.shape[-1])  # (1, K + N, D)
        prefix_positions, patch_positions = positions.tensor_split([self.num_positioned], dim=1)
        x = self.patch_embed(images)  # (B, N, D)
        if mask is not None and not drop:
            x = self.replace_hidden(x, mask.hidden.view(len(x), -1, 1))
        x = x + patch_positions
        if mask is not None and drop:
            x = _visible(x, mask)  # (B, V / B, D)
        tokens: list[Tensor] = [
            token for token in (self.cls_token, self.dist_token, self.reg_token) if token is not None
        ]
        if not tokens:
            return x
        positioned, registers = torch.cat(tokens, 1).tensor_split([self.num_positioned], dim=1)
        prefix = torch.cat([positioned + prefix_positions, registers], 1)  # (1, S, D)
        return torch.cat([prefix.expand(len(x), -1, -1), x], 1)  # (B, S + N, D)

    def _positions(self, height: int, width: int) -> Tensor:
        """Return the position embeddings of class token, distillation token and patches: (1, K + N, D)."""
        grid = self.grid(height, width)
        fits = grid == self.table_grid
        if self.interpolation == "dino" and self.table_grid[0] == self.table_grid[1]:
            fits = fits and height == width  # the published code resizes the table for every image that is not square
        if fits:
            return self.pos_embed
        prefix, patches = self.pos_embed.tensor_split([self.num_positioned], dim=1)
        return torch.cat([prefix, resize_table(patches, self.table_grid, grid, self.interpolation)], 1)

    def _run(self, blocks: Iterable[nn.Module], x: Tensor, scales: Scales) -> Tensor:
        """Apply blocks: (B, S + N, D) -> (B, S + N, D)."""
        for block in blocks:
            recompute = self.checkpoint_activations and self.training
            arguments = (x, None, next(scales))
            x = checkpoint(block, *arguments, use_reentrant=False) if recompute else block(*arguments)
        return x

    def _features(self, x: Tensor, images: Images) -> Features:
        """Return the `Features` computed from the output (B, S + N, D) of a block."""
        x = self.norm(x)
        patches = x[:, self.num_prefix_tokens :]
        pooled = x[:, 0] if self.pool == "class" else (patches if self.pool == "mean" else x).mean(1)
        tokens = patches.flatten(0, 1)  # (B * N, D)
        return Features(self.fc_norm(pooled), self.fc_norm(tokens), self.grids(images))


def _visible(x: Tensor, mask: Mask) -> Tensor:
    """Return the visible tokens of each image: (B, N, D) -> (B, V / B, D).

    Raises:
        EncoderError: the numbers of visible tokens differ between images, or are 0.
    """
    fewest, most = int(mask.lengths.min()), int(mask.lengths.max())
    if not 0 < fewest == most:
        raise EncoderError(
            "With drop=True all images must keep the same number of tokens, at least one. "
            f"These images keep {fewest} to {most} tokens."
        )
    return x.flatten(0, 1).index_select(0, mask.visible).unflatten(0, (len(x), most))


def _position_table(
    prefix: int, grid: tuple[int, int], dim: int, positions: Positions, position_init: PositionInit
) -> nn.Parameter:
    """Return a new position table (1, K + N, D) with K = `prefix`. In a sine-cosine table, the first K rows are 0."""
    if positions == "sincos" or position_init == "sincos":
        table = torch.cat([torch.zeros(prefix, dim), sincos_table(*grid, dim)])[None]
    else:
        table = nn.init.trunc_normal_(torch.empty(1, prefix + grid[0] * grid[1], dim), std=0.02)
    return nn.Parameter(table, requires_grad=positions == "learned")
