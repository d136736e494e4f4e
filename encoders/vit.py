"""Vision transformer (2010.11929) as in DINO (2104.14294), MAE (2111.06377), DeiT (2012.12877), DINOv2 (2304.07193) and
DINOv3 (2508.10104).

Letters in shapes: B images; C channels, H x W pixels; h x w grid; N = h * w patches of an image (only the visible
patches if hidden tokens are dropped); T patches of all packed images; D width of a token; S prefix tokens before the
patches (class, distillation and register tokens), of which the first K (class and distillation) have positions.
Parameters have the names of the published weights.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import repeat
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tessera.encoders.base import Encoder, Features
from tessera.encoders.blocks import Block, MLPKind, NormedPatchEmbed, PatchEmbed
from tessera.encoders.checks import check_block_count, check_counts, check_heads
from tessera.encoders.drop_path import BranchScales, kept_images
from tessera.encoders.errors import EncoderError
from tessera.encoders.images import Images, Mask, PackedImages
from tessera.encoders.layers import (
    Init,
    Interpolation,
    LayerNorm,
    Recompute,
    in_bf16,
    init_linear,
    learned,
    modules_of,
    resize_table,
    sincos_table,
    table_grid,
)
from tessera.encoders.rope import Coordinates, RotaryPositions, Rotations
from tessera.encoders.segments import Segments, copy_to_device, image_means, insert_prefix, split_prefix

Pool = Literal["class", "mean", "all"]
Positions = Literal["learned", "sincos", "rope"]
PositionInit = Literal["normal", "sincos"]
TokenInit = Literal["normal", "dinov2", "dinov3"]
Output = tuple[Tensor, Segments | None]
"""Output of a block: tokens (B, S + N, D) and None, or tokens (T + B * S, D) of packed images and the boundaries of the
images."""

OF_TABLES = ("interpolation", "position_init")
"""Settings that have no effect with rotary positions."""
OF_ROTATIONS = (
    "cls_norm",
    "local_cls_norm",
    "rope_base",
    "rope_coordinates",
    "rope_shift",
    "rope_jitter",
    "rope_rescale",
)
"""Settings that have an effect only with rotary positions."""

_SMALL = {"dim": 384, "depth": 12, "heads": 6}
_BASE = {"dim": 768, "depth": 12, "heads": 12}
_LARGE = {"dim": 1024, "depth": 24, "heads": 16}
_DINOV2 = {"patch_size": 14, "image_size": 518, "layer_scale": 1e-5, "mask_token": True, "token_init": "dinov2"}
_GIANT = {"dim": 1536, "depth": 40, "heads": 24, "mlp": "swiglu"}
_REGISTERS = {"registers": 4, "interpolation": "antialias"}
_ROPE = {"positions": "rope", "registers": 4, "mask_key_bias": True, "norm_eps": 1e-5, "token_init": "dinov3"}
_DINOV3 = _ROPE | {"mask_token": True, "layer_scale": 1e-5, "rope_rescale": 2.0}
_GATED = {"mlp": "swiglu", "mlp_ratio": 6.0}

VARIANTS: dict[str, dict[str, Any]] = {
    "vit_micro": {"dim": 96, "depth": 4, "heads": 3, "patch_size": 4, "image_size": 16},
    "vit_mini": {"dim": 128, "depth": 4, "heads": 4, "patch_size": 8, "image_size": 64},
    "vit_tiny": {"dim": 192, "depth": 12, "heads": 3},
    "vit_small": _SMALL,
    "vit_base": _BASE,
    "vit_large": _LARGE,
    "vit_huge": {"dim": 1280, "depth": 32, "heads": 16, "patch_size": 14},
    "vit_small_14_dinov2": _SMALL | _DINOV2,
    "vit_base_14_dinov2": _BASE | _DINOV2,
    "vit_large_14_dinov2": _LARGE | _DINOV2,
    "vit_giant_14_dinov2": _GIANT | _DINOV2,
    "vit_small_14_dinov2_registers": _SMALL | _DINOV2 | _REGISTERS,
    "vit_base_14_dinov2_registers": _BASE | _DINOV2 | _REGISTERS,
    "vit_large_14_dinov2_registers": _LARGE | _DINOV2 | _REGISTERS,
    "vit_giant_14_dinov2_registers": _GIANT | _DINOV2 | _REGISTERS,
    "rope_vit_micro": _ROPE | {"dim": 96, "depth": 4, "heads": 3, "patch_size": 4, "image_size": 16, "registers": 1},
    "rope_vit_small": _SMALL | _DINOV3,
    "rope_vit_small_plus": _SMALL | _GATED | _DINOV3,
    "rope_vit_base": _BASE | _DINOV3,
    "rope_vit_large": _LARGE | _DINOV3,
    "rope_vit_large_plus": _LARGE | _GATED | _DINOV3,
    "rope_vit_huge_plus": {"dim": 1280, "depth": 32, "heads": 20} | _GATED | _DINOV3,
    "rope_vit_7b": {"dim": 4096, "depth": 40, "heads": 32, "qkv_bias": False, "local_cls_norm": True}
    | {"mlp": "swiglu", "mlp_ratio": 3.0, "swiglu_multiple": 64}
    | _DINOV3,
}


class ViT(Encoder):
    """Vision transformer for images of any size.

    Positions are a table that is added to the patches and resized to the grid of the images (`positions="learned"` or
    `"sincos"`), or rotations of the queries and keys of patches (`"rope"`, see `encoders.rope`). The table `pos_embed`
    has rows for the class token, the distillation token and the patches, and no rows for register tokens. Rotations do
    not change prefix tokens and do not depend on `image_size`. `encoders.build` raises an error if a setting that
    has no effect with the chosen positions differs from its default.

    If a side of the image is not a multiple of the patch, the last pixels of that side are cropped. If hidden tokens
    are replaced, the mask token replaces them before positions are added.

    With `pool="mean"` and a position table, as in MAE's fine-tuning, the layer norm `fc_norm` replaces the final layer
    norm `norm`. `Features.pooled` is then `fc_norm` of the mean patch token, and `Features.tokens` is `fc_norm` of each
    patch token. With rotary positions, `Features.pooled` is the mean of the normed patch tokens. With `pool="all"`, as
    in vit-pytorch, `Features.pooled` is the mean of all tokens after `norm`, prefix tokens included.

    With `skip_dropped`, each branch of a block is computed only for the images that keep the branch. The drop path
    factors do not change, so results differ only by rounding. Each branch gathers its images and adds its result to
    their tokens, and the number of gathered images varies from branch to branch. Outside of the context
    `encoders.randomness.random_keys`, which every training step opens, no image is skipped. DINOv2 (2304.07193) skips a
    fixed number of images per process.

    With `local_cls_norm`, packed images that have fewer patches than the largest image of the batch count as local
    crops. This norm gets a gradient only if a batch has such images. Set `mask_token` only if training replaces hidden
    tokens, and `classes` only if training uses `logits`. Otherwise the mask token or the class head gets no gradient.

    Args:
        dim: width of a token.
        depth: number of blocks.
        heads: number of attention heads of a block.
        head_dim: width of a head. None means `dim` / `heads`.
        mlp: MLP of a block, two layers with a GELU ("gelu") or a gated MLP ("swiglu").
        mlp_ratio: hidden width of the MLP divided by `dim`. A SwiGLU has two thirds of this width (`swiglu_width`).
        swiglu_multiple: divisor of the hidden width of a SwiGLU. The width is rounded up to a multiple of this number.
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
        mask_key_bias: treat the bias of keys as 0, although the bias vector has entries for keys (DINOv3).
        norm_eps: epsilon of all layer norms.
        qk_norm: normalise queries and keys in each head.
        qk_scale: factor of the attention logits. None means 1 / sqrt(width of a head).
        layer_scale: initial value of the layer scale. None means no layer scale.
        drop_path: drop path rate of the last block. The rate rises linearly from 0 at the first block.
        skip_dropped: compute a branch only for the images that keep it. This saves time if `drop_path` is high.
        bf16_residuals: under autocast to bf16, keep the tokens between blocks in bf16, and not in float32.
        positions: learned table ("learned"), fixed sine-cosine table of MAE ("sincos") or rotary positions ("rope").
        interpolation: rule to resize the position table: DINO's ("dino"), MAE's ("mae") or antialiased ("antialias").
        cls_norm: normalise the class token with a separate layer norm instead of that of the patches.
        local_cls_norm: normalise the class tokens of local crops with another layer norm, in training.
        rope_base: base of the periods of rotary positions, which rise from 1 to nearly `rope_base`.
        rope_coordinates: divisor of coordinates: own side ("separate"), longer side ("max") or shorter side ("min").
        rope_shift: largest random shift of coordinates in training. None means no shift.
        rope_jitter: largest random factor for each axis in training. None means no such factor.
        rope_rescale: largest random common factor in training. None means no such factor.
        init: initialisation of weights, DINO's truncated normal ("trunc_normal") or MAE's Xavier uniform ("xavier").
        token_init: std of tokens, 0.02 ("normal", "dinov3") or 1e-6 ("dinov2"). "dinov2", "dinov3": mask token 0.
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
        swiglu_multiple: int = 8,
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
        mask_key_bias: bool = False,
        norm_eps: float = 1e-6,
        qk_norm: bool = False,
        qk_scale: float | None = None,
        layer_scale: float | None = None,
        drop_path: float = 0.0,
        skip_dropped: bool = False,
        bf16_residuals: bool = False,
        positions: Positions = "learned",
        interpolation: Interpolation = "dino",
        cls_norm: bool = False,
        local_cls_norm: bool = False,
        rope_base: float = 100.0,
        rope_coordinates: Coordinates = "separate",
        rope_shift: float | None = None,
        rope_jitter: float | None = None,
        rope_rescale: float | None = None,
        init: Init = "trunc_normal",
        token_init: TokenInit = "normal",
        position_init: PositionInit = "normal",
        representation_size: int | None = None,
        classes: int = 0,
        checkpoint_activations: Recompute = False,
    ):
        super().__init__()
        check_counts(depth=depth, patch_size=patch_size, channels=channels, swiglu_multiple=swiglu_multiple)
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
        self.pos_embed: nn.Parameter | None = None
        self.rope_embed: RotaryPositions | None = None
        if positions == "rope":
            ranges = {"shift": rope_shift, "jitter": rope_jitter, "rescale": rope_rescale}
            rope = partial(RotaryPositions, base=rope_base, coordinates=rope_coordinates, **ranges)
            self.rope_embed = rope(dim // heads if head_dim is None else head_dim, depth)
        else:
            self.table_grid = table_grid(image_size, patch_size)
            self.pos_embed = _position_table(self.num_positioned, self.table_grid, dim, positions, position_init)
        block = partial(Block, dim, heads, mlp_ratio=mlp_ratio, mlp=mlp, swiglu_multiple=swiglu_multiple)
        block = partial(block, head_dim=head_dim, norm_eps=norm_eps, mask_key_bias=mask_key_bias)
        block = partial(block, qkv_bias=qkv_bias, qk_norm=qk_norm, qk_scale=qk_scale, layer_scale=layer_scale)
        block = partial(block, bf16_residuals=bf16_residuals, selective=checkpoint_activations == "selective")
        self.blocks = nn.ModuleList(block(drop_path=drop_path * i / max(depth - 1, 1)) for i in range(depth))
        norm = partial(LayerNorm, dim, eps=norm_eps)
        replaced = pool == "mean" and positions != "rope"
        self.norm = nn.Identity() if replaced else norm()
        self.cls_norm = norm() if cls_norm else None
        self.local_cls_norm = norm() if local_cls_norm else None
        self.fc_norm = norm() if replaced else nn.Identity()
        self._add_heads(representation_size, classes)
        self.apply(lambda layer: init_linear(layer, init))

    @classmethod
    def unused_settings(cls, settings: Mapping[str, Any]) -> dict[str, str]:
        return dict.fromkeys(OF_TABLES if settings.get("positions") == "rope" else OF_ROTATIONS, "positions")

    def _add_tokens(self, init: TokenInit, class_token: bool, distillation_token: bool, registers: int, mask: bool):
        new = _normal if init == "dinov3" else learned
        self.cls_token = new(1, 1, self.dim) if class_token else None
        self.dist_token = new(1, 1, self.dim) if distillation_token else None
        self.reg_token = new(1, registers, self.dim) if registers else None
        self.mask_token = (_zeros if init == "dinov3" else learned)(1, self.dim) if mask else None
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

    def last_attention(self, images: Tensor) -> Tensor:
        """Return the attention weights of the last block between all tokens: (B, C, H, W) -> (B, heads, S + N, S + N).

        Each row sums to 1.
        """
        x, _, rotations = self._embed(self.checked(images))
        scales, last = self._draw(x, None), modules_of(self.blocks, Block)[-1]
        for block in self.blocks[:-1]:
            x = self.run_block(block, x, None, next(scales), next(rotations))
        return last.attn.weights(last.norm1(x), next(rotations))

    def logits(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return class scores: (B, C, H, W) -> (B, classes).

        If the encoder has a distillation token, return the scores of both heads as a pair in training mode, and the
        mean of both scores in evaluation mode.

        Raises:
            EncoderError: the encoder has no class head.
        """
        if self.head is None:
            raise EncoderError("The encoder has no class head. Build it with classes=N.")
        (output,) = self._last_outputs(1, self.checked(images))
        scores = self.head(self.pre_logits(self._features(output, self.grids(images)).pooled))
        if self.head_dist is None:
            return scores
        distilled = self.head_dist(self.fc_norm(self.norm(output[0][:, 1])))
        return (scores, distilled) if self.training else (scores + distilled) / 2

    @property
    def can_skip_tokens(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.pool == "class"

    def forward(
        self, images: Images, mask: Mask | None = None, *, drop: bool = False, pooled_only: bool = False
    ) -> Features:
        """Encode images as `Encoder.forward` does.

        If `pooled_only` is True, `can_skip_tokens` must be True, and `tokens` of the result is empty. The last block
        then computes only the output of the class tokens.
        """
        if not pooled_only:
            return super().forward(images, mask, drop=drop)
        x, segments, rotations = self._embed(images, mask, drop)
        scales = self._draw(x, segments)
        for block in self.blocks[:-1]:
            x = self.run_block(block, x, segments, next(scales), next(rotations))
        rows = torch.arange(len(x), device=x.device) * x.shape[1] if segments is None else segments.first_tokens
        x = self.run_block(self.blocks[-1], x, segments, next(scales), next(rotations), rows)  # (B, D)
        x = x.float() if self.bf16_residuals else x
        grids = self.grids(images)
        if self.rope_embed is not None:
            x = self._normed_class(x, None if segments is None else grids.prod(1))
        else:
            x = self.norm(x)
        return Features(x, x[:0], grids)

    def _outputs(self, images: Images, mask: Mask | None = None, drop: bool = False) -> Iterator[Output]:
        x, segments, rotations = self._embed(images, mask, drop)
        scales = self._draw(x, segments)
        for block in self.blocks:
            x = self.run_block(block, x, segments, next(scales), next(rotations))
            yield x, segments

    def _draw(self, x: Tensor, segments: Segments | None) -> BranchScales:
        """For each block, yield the drop path factors of the images in `x`. With `skip_dropped`, yield the images that
        keep each branch."""
        images = x.shape[0] if segments is None else len(segments.lengths)
        if not self.skip_dropped:
            return self.draw_drop_path(images, x.device)
        # Draw on the CPU, because the number of images that keep a branch determines tensor shapes.
        return kept_images(self.draw_drop_path(images, torch.device("cpu")), segments, x.device)

    def _embed(
        self, images: Images, mask: Mask | None = None, drop: bool = False
    ) -> tuple[Tensor, Segments | None, Rotations]:
        """Return the input of the first block, the boundaries of packed images in this input, and the rotations.

        For images (B, C, H, W), the input is (B, S + N, D). For packed images, it is (T + B * S, D). If hidden tokens
        are dropped, images (B, C, H, W) are also packed, unless the encoder has a position table and all images have
        the same number of visible tokens.
        """
        self.check(images, mask, drop=drop)
        x = self.patch_embed(images)  # (B, N, D) or (T, D)
        if mask is not None and not drop:
            x = self.replace_hidden(x, mask.hidden.view(*x.shape[:-1], 1))
        grids, prefix = self.grids(images), self._prefix()
        if self.pos_embed is not None:
            x = x + self._positions(images)
        kept = mask if drop else None
        in_batch = kept is None or (self.rope_embed is None and bool((kept.lengths == kept.lengths[0]).all()))
        if isinstance(images, Tensor) and in_batch:
            if kept is not None:
                x = x.flatten(0, 1).index_select(0, kept.visible).unflatten(0, (len(x), -1))  # (B, V / B, D)
            x = x if prefix is None else torch.cat([prefix.expand(x.shape[0], -1, -1), x], 1)
            segments, rotations = None, repeat(None)
            if self.rope_embed is not None:
                rotations = self.rope_embed.grid_rotations(self.grid(*images.shape[-2:]), self.num_prefix_tokens)
        else:
            lengths, visible = grids.prod(1), None
            if kept is not None:
                lengths, visible = kept.lengths, kept.visible
                x = x.reshape(-1, self.dim).index_select(0, visible)
            x = x if prefix is None else insert_prefix(x, prefix, lengths)
            sequences = images.sequences if isinstance(images, PackedImages) else None
            segments = Segments(lengths + self.num_prefix_tokens, x.device, sequences=sequences).prepared()
            rotations = self._rotations(grids, lengths, visible)
        return in_bf16(x) if self.bf16_residuals else x, segments, rotations

    def _prefix(self) -> Tensor | None:
        """Return the prefix tokens, with positions: (1, S, D). Return None if the encoder has no prefix tokens."""
        tokens: list[Tensor] = [
            token for token in (self.cls_token, self.dist_token, self.reg_token) if token is not None
        ]
        if not tokens:
            return None
        prefix = torch.cat(tokens, 1)
        if self.pos_embed is None:
            return prefix
        positioned, registers = prefix.tensor_split([self.num_positioned], dim=1)
        return torch.cat([positioned + self.pos_embed[:, : self.num_positioned], registers], 1)

    def _rotations(self, grids: Tensor, lengths: Tensor, visible: Tensor | None = None) -> Rotations:
        """Return the rotations of each block; see `RotaryPositions.rotations`."""
        if self.rope_embed is None:
            return repeat(None)
        return self.rope_embed.rotations(grids, self.num_prefix_tokens, lengths, visible)

    def _positions(self, images: Images) -> Tensor:
        """Return the position embeddings of patches: (1, N, D) for images of one size, (T, D) for packed images."""
        if isinstance(images, Tensor):
            height, width = images.shape[-2:]
            return self._resized(self.grid(height, width), square=height == width)
        shapes, counts = images.grids.unique_consecutive(dim=0, return_counts=True)
        grids = [(h, w) for h, w in shapes.tolist()]
        tables = {grid: self._resized(grid, square=grid[0] == grid[1])[0] for grid in set(grids)}
        return torch.cat([tables[grid].repeat(count, 1) for grid, count in zip(grids, counts.tolist(), strict=True)])

    def _resized(self, grid: tuple[int, int], *, square: bool) -> Tensor:
        """Return the rows of the position table for patches, resized to a grid: (1, N, D).

        `square` is True for square images. For images that are not square, DINO's published code always resizes a
        square table, even if the grid of the images equals the grid of the table.
        """
        assert self.pos_embed is not None
        patches = self.pos_embed[:, self.num_positioned :]
        # A trace with a dynamic size always resizes the table. At the size of the table, that changes nothing.
        fits = not isinstance(grid[0], torch.SymInt) and grid == self.table_grid
        if self.interpolation == "dino" and self.table_grid[0] == self.table_grid[1]:
            fits = fits and square
        return patches if fits else resize_table(patches, self.table_grid, grid, self.interpolation)

    def _features(self, output: Output, grids: Tensor) -> Features:
        x, segments = output
        x = x.float() if self.bf16_residuals else x
        # With rotary positions, class token and patches are normed in two calls, because each may have its own norm.
        apart = self.rope_embed is not None and self.pool != "all"
        x = x if apart else self.norm(x)
        lengths = patch_counts = x.shape[0]  # the number of images, because all have equal lengths
        if segments is None:
            x = x.flatten(0, 1)
        else:
            lengths, patch_counts = segments.lengths, segments.lengths - self.num_prefix_tokens
        prefix, patches = split_prefix(x, self.num_prefix_tokens, patch_counts)
        tokens = self.norm(patches) if apart else self.fc_norm(patches)  # (T, D)
        if self.pool == "class":
            pooled = prefix[:, 0]  # (B, D)
            pooled = self._normed_class(pooled, None if segments is None else grids.prod(1)) if apart else pooled
        elif self.pool == "all":
            pooled = image_means(x, lengths)
        elif apart:
            pooled = image_means(tokens, patch_counts)
        else:
            pooled = self.fc_norm(image_means(patches, patch_counts))
        return Features(pooled, tokens, grids)

    def register_tokens(self, images: Tensor, blocks: int = 1) -> list[Tensor]:
        """Return the features of the register tokens after each of the last `blocks` blocks, in order: (B, R, D) each.

        The final norm is applied to the output of each of these blocks.

        Raises:
            EncoderError: the images do not fit the encoder, or it has no register tokens or fewer than `blocks` blocks.
        """
        if self.reg_token is None:
            raise EncoderError("The encoder has no register tokens.")
        check_block_count(blocks, self._final_blocks())
        apart = self.rope_embed is not None and self.pool != "all"
        norm = (self.cls_norm or self.norm) if apart else nn.Sequential(self.norm, self.fc_norm)
        own = slice(self.num_positioned, self.num_prefix_tokens)
        # With `bf16_residuals`, the outputs (B, N, D) are bfloat16.
        return [norm(x[:, own].float()) for x, _ in self._last_outputs(blocks, images)]

    def _normed_class(self, x: Tensor, sizes: Tensor | None) -> Tensor:
        """Normalise class tokens (B, D). `sizes` (B,) is the number of patches of each packed image, on the CPU."""
        normed = (self.cls_norm or self.norm)(x)
        if self.local_cls_norm is None or sizes is None or not self.training:
            return normed
        local = copy_to_device(sizes < sizes.max(), x.device)[:, None]
        return torch.where(local, self.local_cls_norm(x), normed)


def _normal(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * 0.02)


def _zeros(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


def _position_table(
    prefix: int, grid: tuple[int, int], dim: int, positions: Positions, position_init: PositionInit
) -> nn.Parameter:
    """Return a new position table (1, K + N, D) with K = `prefix`. In a sine-cosine table, the first K rows are 0."""
    if positions == "sincos" or position_init == "sincos":
        table = torch.cat([torch.zeros(prefix, dim), sincos_table(*grid, dim)])[None]
    else:
        table = nn.init.trunc_normal_(torch.empty(1, prefix + grid[0] * grid[1], dim), std=0.02)
    return nn.Parameter(table, requires_grad=positions == "learned")
