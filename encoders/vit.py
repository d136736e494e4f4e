"""Vision transformer (2010.11929) as in DINO (2104.14294), MAE (2111.06377), DeiT (2012.12877), DINOv2 (2304.07193).

Letters in shapes: B images; C channels, H x W pixels; h x w grid; N = h * w patches of an image (only the visible
patches, if hidden tokens are dropped); T patches of all packed images; D width of a token; S prefix tokens before the
patches (class, distillation and register tokens), of which the first K (class and distillation) have positions.
Parameters have the names of the published weights.
"""

from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tessera.encoders.base import Encoder, Features
from tessera.encoders.blocks import Block, MLPKind, NormedPatchEmbed, PatchEmbed
from tessera.encoders.errors import EncoderError
from tessera.encoders.images import Images, Mask, PackedImages
from tessera.encoders.layers import (
    Init,
    Interpolation,
    LayerNorm,
    Recompute,
    check_block_count,
    check_choices,
    check_counts,
    check_heads,
    in_bf16,
    init_linear,
    learned,
    modules_of,
    resize_table,
    sincos_table,
    table_grid,
)
from tessera.encoders.segments import Segments, image_means, insert_prefix, split_prefix
from tessera.encoders.subsets import BranchScales, draw_branch_scales

Pool = Literal["class", "mean", "all"]
Positions = Literal["learned", "sincos"]
PositionInit = Literal["normal", "sincos"]
TokenInit = Literal["normal", "dinov2"]

_DINOV2 = {"patch_size": 14, "image_size": 518, "layer_scale": 1e-5, "mask_token": True, "token_init": "dinov2"}
_GIANT = {"dim": 1536, "depth": 40, "heads": 24, "mlp": "swiglu"}
_REGISTERS = {"registers": 4, "interpolation": "antialias"}

VARIANTS: dict[str, dict[str, Any]] = {
    "vit_micro": {"dim": 96, "depth": 4, "heads": 3, "patch_size": 4, "image_size": 16},
    "vit_mini": {"dim": 128, "depth": 4, "heads": 4, "patch_size": 8, "image_size": 64},
    "vit_tiny": {"dim": 192, "depth": 12, "heads": 3},
    "vit_small": {"dim": 384, "depth": 12, "heads": 6},
    "vit_base": {"dim": 768, "depth": 12, "heads": 12},
    "vit_large": {"dim": 1024, "depth": 24, "heads": 16},
    "vit_huge": {"dim": 1280, "depth": 32, "heads": 16, "patch_size": 14},
    "vit_small_14_dinov2": {"dim": 384, "depth": 12, "heads": 6} | _DINOV2,
    "vit_base_14_dinov2": {"dim": 768, "depth": 12, "heads": 12} | _DINOV2,
    "vit_large_14_dinov2": {"dim": 1024, "depth": 24, "heads": 16} | _DINOV2,
    "vit_giant_14_dinov2": _GIANT | _DINOV2,
    "vit_small_14_dinov2_registers": {"dim": 384, "depth": 12, "heads": 6} | _DINOV2 | _REGISTERS,
    "vit_base_14_dinov2_registers": {"dim": 768, "depth": 12, "heads": 12} | _DINOV2 | _REGISTERS,
    "vit_large_14_dinov2_registers": {"dim": 1024, "depth": 24, "heads": 16} | _DINOV2 | _REGISTERS,
    "vit_giant_14_dinov2_registers": _GIANT | _DINOV2 | _REGISTERS,
}


class ViT(Encoder):
    """Vision transformer for images of any size. The position table is resized to the grid of the images.

    If a side of the image is not a multiple of the patch, the last pixels of that side are cropped. With `pool="mean"`,
    as in MAE's fine-tuning, the layer norm `fc_norm` replaces the final layer norm `norm`. `Features.pooled` is then
    `fc_norm` of the mean patch token, and `Features.tokens` is `fc_norm` of each patch token. With `pool="all"`, as in
    vit-pytorch, `Features.pooled` is the mean of all tokens after `norm`, prefix tokens included. `pos_embed` has rows
    for the class token, the distillation token and the patches, and no rows for register tokens.

    With `skip_dropped`, the branches of a block are computed only for the images that keep them. Factors are the same,
    and results differ by rounding. Every branch then gathers its images and adds its result to them, and the number of
    images changes from branch to branch. Without the context `encoders.randomness.random_keys`, which every training
    step opens, nothing is skipped. DINOv2 (2304.07193) skips a fixed number of images per process.

    Set `mask_token` only if training replaces hidden tokens, and `classes` only if training uses `logits`. Otherwise
    the mask token or the class head gets no gradient.

    Args:
        dim: width of a token.
        depth: number of blocks.
        heads: number of attention heads of a block.
        head_dim: width of a head. None means `dim` / `heads`.
        mlp: MLP of a block, two layers with a GELU ("gelu") or a gated MLP ("swiglu").
        mlp_ratio: hidden width of the MLP divided by `dim`. A SwiGLU has two thirds of this width (`swiglu_width`).
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
        skip_dropped: compute a branch only for the images that keep it. This saves time if `drop_path` is high.
        bf16_residuals: under autocast to bf16, keep the tokens between blocks in bf16, and not in float32.
        positions: learned position table ("learned"), or the fixed sine-cosine table of MAE ("sincos").
        interpolation: resizing of the position table, DINO's ("dino"), MAE's ("mae") or antialiased ("antialias").
        init: initialisation of weights, DINO's truncated normal ("trunc_normal") or MAE's Xavier uniform ("xavier").
        token_init: initial values of tokens, truncated normal ("normal"), or mask token 0 and others near 0 ("dinov2").
        position_init: initial values of a learned table, truncated normal ("normal") or sine-cosine table ("sincos").
        representation_size: width of a linear layer with tanh before the class head. None means no such layer.
        classes: number of outputs of the class head and of the distillation head. 0 means no heads.
        checkpoint_activations: recompute blocks (true), or only their norms and GELU ("selective"), to save memory.
    """

    can_drop = True
    takes_packed = True

    def __init__(
        self,
        *,
        dim: int = 384,
        depth: int = 12,
        heads: int = 6,
        head_dim: int | None = None,
        mlp: MLPKind = "gelu",
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
        skip_dropped: bool = False,
        bf16_residuals: bool = False,
        positions: Positions = "learned",
        interpolation: Interpolation = "dino",
        init: Init = "trunc_normal",
        token_init: TokenInit = "normal",
        position_init: PositionInit = "normal",
        representation_size: int | None = None,
        classes: int = 0,
        checkpoint_activations: Recompute = False,
    ):
        super().__init__()
        check_choices(pool=(pool, Pool), positions=(positions, Positions), position_init=(position_init, PositionInit))
        check_choices(interpolation=(interpolation, Interpolation), init=(init, Init), mlp=(mlp, MLPKind))
        check_choices(token_init=(token_init, TokenInit))
        check_counts(depth=depth, patch_size=patch_size, channels=channels)
        check_heads(dim, heads, head_dim)
        if not class_token and (pool == "class" or distillation_token):
            raise EncoderError('class_token=False needs pool="mean" or pool="all", and distillation_token=False.')
        self.dim, self.stride, self.channels, self.pool = dim, patch_size, channels, pool
        self.interpolation: Interpolation = interpolation
        self.checkpoint_activations, self.skip_dropped = checkpoint_activations, skip_dropped
        self.bf16_residuals = bf16_residuals
        embed = partial(NormedPatchEmbed, norm_eps=norm_eps) if patch_norm else partial(PatchEmbed, init=init)
        self.patch_embed = embed(channels, dim, patch_size)
        self._add_tokens(token_init, class_token, distillation_token, registers, mask_token)
        self.table_grid = table_grid(image_size, patch_size)
        self.pos_embed = _position_table(self.num_positioned, self.table_grid, dim, positions, position_init)
        block = partial(Block, dim, heads, mlp_ratio=mlp_ratio, mlp=mlp, head_dim=head_dim, norm_eps=norm_eps)
        block = partial(block, qkv_bias=qkv_bias, qk_norm=qk_norm, qk_scale=qk_scale, layer_scale=layer_scale)
        block = partial(block, bf16_residuals=bf16_residuals, selective=checkpoint_activations == "selective")
        self.blocks = nn.ModuleList(block(drop_path=drop_path * i / max(depth - 1, 1)) for i in range(depth))
        self.norm = nn.Identity() if pool == "mean" else LayerNorm(dim, eps=norm_eps)
        self.fc_norm = LayerNorm(dim, eps=norm_eps) if pool == "mean" else nn.Identity()
        self._add_heads(representation_size, classes)
        self.apply(lambda layer: init_linear(layer, init))

    def _add_tokens(self, init: TokenInit, class_token: bool, distillation_token: bool, registers: int, mask: bool):
        self.cls_token = learned(1, 1, self.dim) if class_token else None
        self.dist_token = learned(1, 1, self.dim) if distillation_token else None
        self.reg_token = learned(1, registers, self.dim) if registers else None
        self.mask_token = learned(1, self.dim) if mask else None
        self.num_positioned = class_token + distillation_token
        self.num_prefix_tokens = self.num_positioned + registers
        for token in (self.cls_token, self.dist_token, self.reg_token):
            if init == "dinov2" and token is not None:
                nn.init.normal_(token, std=1e-6)
        if init == "dinov2" and self.mask_token is not None:
            nn.init.zeros_(self.mask_token)

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
        """Encode normalised images: (B, C, H, W), or packed images.

        If `mask` is given, the mask token replaces each hidden token before positions are added. With `drop=True`, the
        encoder processes only the visible tokens: `Features.tokens` (V, D) are in the order of `mask.visible`. Images
        of one size must then have the same number of visible tokens, and each packed image must have a visible token.

        Raises:
            EncoderError: the images or the mask do not fit the encoder.
        """
        x, segments = self._embed(images, mask, drop)
        x = self._run(self.blocks, x, segments, draw_branch_scales(self, x, segments, skip=self.skip_dropped))
        return self._features(x, segments, self.grids(images))

    def intermediate(self, images: Images, blocks: int = 1) -> list[Features]:
        check_block_count(blocks, len(self.blocks))
        x, segments = self._embed(images)
        scales = self.draw_drop_path(len(images), x.device)
        x = self._run(self.blocks[:-blocks], x, segments, scales)
        features = []
        for block in self.blocks[-blocks:]:
            x = self._run([block], x, segments, scales)
            features.append(self._features(x, segments, self.grids(images)))
        return features

    def last_attention(self, images: Tensor) -> Tensor:
        """Return the attention weights of the last block between all tokens: (B, C, H, W) -> (B, heads, S + N, S + N).

        Each row sums to 1.
        """
        last = modules_of(self.blocks, Block)[-1]
        x, _ = self._embed(self.checked(images))
        x = self._run(self.blocks[:-1], x, None, self.draw_drop_path(len(x), x.device))
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
        x, _ = self._embed(self.checked(images))
        x = self._run(self.blocks, x, None, draw_branch_scales(self, x, None, skip=self.skip_dropped))
        scores = self.head(self.pre_logits(self._features(x, None, self.grids(images)).pooled))
        if self.head_dist is None:
            return scores
        distilled = self.head_dist(self.fc_norm(self.norm(x[:, 1])))
        return (scores, distilled) if self.training else (scores + distilled) / 2

    def _embed(self, images: Images, mask: Mask | None = None, drop: bool = False) -> tuple[Tensor, Segments | None]:
        """Return the input of the first block, and the boundaries of packed images in this input.

        For images (B, C, H, W), the input is (B, S + N, D). For packed images, it is (T + B * S, D).
        """
        self.check(images, mask, drop=drop)
        x = self.patch_embed(images)  # (B, N, D) or (T, D)
        if mask is not None and not drop:
            x = self.replace_hidden(x, mask.hidden.view(*x.shape[:-1], 1))
        if isinstance(images, PackedImages):
            return self._embed_packed(x + self._packed_positions(images.grids), images, mask if drop else None)
        x = x + self._positions(self.grid(*images.shape[-2:]), square=images.shape[-2] == images.shape[-1])
        if mask is not None and drop:
            x = _visible(x, mask)  # (B, V / B, D)
        prefix = self._prefix()
        return (x if prefix is None else torch.cat([prefix.expand(len(x), -1, -1), x], 1)), None

    def _embed_packed(self, x: Tensor, images: PackedImages, mask: Mask | None) -> tuple[Tensor, Segments]:
        """Drop the hidden tokens of patch tokens (T, D), and insert the prefix tokens of each image."""
        lengths, prefix = images.lengths, self._prefix()
        if mask is not None:
            x, lengths = x.index_select(0, mask.visible), mask.lengths
        if prefix is not None:
            x = insert_prefix(x, prefix, lengths)
        return x, Segments(lengths + self.num_prefix_tokens, x.device, sequences=images.sequences)

    def _prefix(self) -> Tensor | None:
        """Return the prefix tokens, with positions: (1, S, D). Return None if the encoder has no prefix tokens."""
        tokens: list[Tensor] = [
            token for token in (self.cls_token, self.dist_token, self.reg_token) if token is not None
        ]
        if not tokens:
            return None
        positioned, registers = torch.cat(tokens, 1).tensor_split([self.num_positioned], dim=1)
        return torch.cat([positioned + self.pos_embed[:, : self.num_positioned], registers], 1)

    def _positions(self, grid: tuple[int, int], *, square: bool) -> Tensor:
        """Return the position embeddings of the patches of an image: (1, N, D). `square` is True for square images."""
        patches = self.pos_embed[:, self.num_positioned :]
        fits = grid == self.table_grid
        if self.interpolation == "dino" and self.table_grid[0] == self.table_grid[1]:
            fits = fits and square  # the published code resizes the table for every image that is not square
        return patches if fits else resize_table(patches, self.table_grid, grid, self.interpolation)

    def _packed_positions(self, grids: Tensor) -> Tensor:
        """Return the position embeddings of the patches of packed images with these `grids` (B, 2): (T, D)."""
        shapes, images = grids.unique_consecutive(dim=0, return_counts=True)
        keys = [(h, w) for h, w in shapes.tolist()]
        tables = {grid: self._positions(grid, square=grid[0] == grid[1])[0] for grid in set(keys)}
        return torch.cat([tables[key].repeat(count, 1) for key, count in zip(keys, images.tolist(), strict=True)])

    def _run(self, blocks: Iterable[nn.Module], x: Tensor, segments: Segments | None, scales: BranchScales) -> Tensor:
        """Apply blocks. The shape of `x` does not change. With `bf16_residuals`, its dtype may."""
        x = in_bf16(x) if self.bf16_residuals else x
        for block in blocks:
            recompute = self.checkpoint_activations not in (False, "selective") and self.training
            arguments = (x, segments, next(scales))
            x = checkpoint(block, *arguments, use_reentrant=False) if recompute else block(*arguments)
        return x

    def _features(self, x: Tensor, segments: Segments | None, grids: Tensor) -> Features:
        """Return the `Features` computed from the output (B, S + N, D) or (T + B * S, D) of a block."""
        x = self.norm(x.float() if self.bf16_residuals else x)
        if segments is None:
            patches = x[:, self.num_prefix_tokens :]
            pooled = x[:, 0] if self.pool == "class" else (patches if self.pool == "mean" else x).mean(1)
            tokens = patches.flatten(0, 1)  # (B * N, D)
        else:
            lengths = segments.lengths - self.num_prefix_tokens
            prefix, tokens = split_prefix(x, self.num_prefix_tokens, lengths)  # (B, S, D), (T, D)
            means = (tokens, lengths) if self.pool == "mean" else (x, segments.lengths)
            pooled = prefix[:, 0] if self.pool == "class" else image_means(*means)
        return Features(self.fc_norm(pooled), self.fc_norm(tokens), grids)


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
