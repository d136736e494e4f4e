"""Vision transformer with rotary positions, as in DINOv3 (2508.10104).

Letters in shapes: B images; C channels, H x W pixels; N patches of an image; T patches of all images (only the visible
patches, if hidden tokens are dropped); S prefix tokens before the patches (class token and registers); D width of a
token; d width of one head; L blocks with rotations of their own (all blocks, or 1 if they share the rotations); G
different grids of a batch; R rows of a table of rotations.
"""

import math
from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tessera.encoders.base import Encoder, Features
from tessera.encoders.blocks import Block, MLPKind, PatchEmbed
from tessera.encoders.errors import EncoderError
from tessera.encoders.images import Images, Mask, PackedImages
from tessera.encoders.layers import (
    Init,
    LayerNorm,
    Recompute,
    check_block_count,
    check_choices,
    check_counts,
    check_heads,
    in_bf16,
    init_linear,
    modules_of,
)
from tessera.encoders.randomness import shared_noise
from tessera.encoders.segments import Segments, copy_to_device, image_means, insert_prefix, split_prefix
from tessera.encoders.subsets import BranchScales, draw_branch_scales

Pool = Literal["class", "mean"]
Coordinates = Literal["separate", "max", "min"]
Rotations = Iterator[Tensor]
"""Iterator that yields the sines and cosines of one block after the other: (2, N, d / 2) for the N tokens of an image,
or (2, T, d / 2) for the tokens of all packed images."""

_DINOV3: dict[str, Any] = {"mask_token": True, "layer_scale": 1e-5, "rope_rescale": 2.0}
_GATED: dict[str, Any] = {"mlp": "swiglu", "mlp_ratio": 6.0}

VARIANTS: dict[str, dict[str, Any]] = {
    "rope_vit_micro": {"dim": 96, "depth": 4, "heads": 3, "patch_size": 4, "image_size": 16, "registers": 1},
    "rope_vit_small": {"dim": 384, "depth": 12, "heads": 6} | _DINOV3,
    "rope_vit_small_plus": {"dim": 384, "depth": 12, "heads": 6} | _GATED | _DINOV3,
    "rope_vit_base": {"dim": 768, "depth": 12, "heads": 12} | _DINOV3,
    "rope_vit_large": {"dim": 1024, "depth": 24, "heads": 16} | _DINOV3,
    "rope_vit_large_plus": {"dim": 1024, "depth": 24, "heads": 16} | _GATED | _DINOV3,
    "rope_vit_huge_plus": {"dim": 1280, "depth": 32, "heads": 20} | _GATED | _DINOV3,
    "rope_vit_7b": {"dim": 4096, "depth": 40, "heads": 32, "qkv_bias": False, "local_cls_norm": True}
    | {"mlp": "swiglu", "mlp_ratio": 3.0, "swiglu_multiple": 64}
    | _DINOV3,
}


class RotaryPositions(nn.Module):
    """Sines and cosines of rotary positions (2104.09864), for the rows and columns of a grid of patches.

    The centre of patch (i, j) of a grid of h x w patches has the coordinates (i + 0.5) / h and (j + 0.5) / w, mapped to
    the range -1 to 1. With `coordinates="max"` or `"min"`, both are divided by the longer or the shorter side instead.
    An angle is 2 pi * coordinate / period. Each head has d / 4 angles of the row, then d / 4 angles of the column.

    The d / 4 `periods` are a buffer, so that the weights of an encoder include the periods that it was trained with.
    """

    def __init__(self, head_dim: int, base: float, coordinates: Coordinates):
        super().__init__()
        self.coordinates = coordinates
        self.periods: Tensor
        self.register_buffer("periods", base ** (2 * torch.arange(head_dim // 4) / (head_dim // 2)))

    def forward(self, grid: tuple[int, int], factors: Tensor, shifts: Tensor) -> Tensor:
        """Return the sines and cosines of all patches of a grid: (L, 2, N, d / 2) float32.

        Args:
            factors: factor of the coordinates of rows and columns: (L, 2).
            shifts: number that is added to the coordinates before they are multiplied by the factor: (L, 2).
        """
        h, w = grid
        rows, columns = {"separate": (h, w), "max": (max(grid),) * 2, "min": (min(grid),) * 2}[self.coordinates]
        device = self.periods.device
        places = torch.meshgrid(
            torch.arange(0.5, h, device=device) / rows, torch.arange(0.5, w, device=device) / columns, indexing="ij"
        )
        centres = 2 * torch.stack(places, -1).flatten(0, 1) - 1  # (N, 2)
        centres = (centres + shifts[:, None]) * factors[:, None]  # (L, N, 2)
        angles = (2 * math.pi * centres[..., None] / self.periods.float()).flatten(2)  # (L, N, d / 2)
        return torch.stack([angles.sin(), angles.cos()], 1)


class RoPEViT(Encoder):
    """Vision transformer with rotary positions, for images of any size.

    Positions are rotations of the queries and keys of patches (`RotaryPositions`). Prefix tokens, which are the class
    token and the registers (storage tokens in DINOv3), have no position. If a side of the image is not a multiple of
    the patch, the last pixels of that side are cropped. There is no position table, so `image_size` has no effect on
    the output.

    In training, the coordinates of the patches may change at random: first a shift for rows and one for columns, drawn
    from -`rope_shift` to `rope_shift`, is added to the coordinates. Then the coordinates are multiplied by a factor for
    rows and one for columns, drawn log-uniformly from 1 / `rope_jitter` to `rope_jitter`, and by a common factor, drawn
    log-uniformly from 1 / `rope_rescale` to `rope_rescale`. The numbers are drawn for each block and each size of
    images anew. All images of that size share them, on all processes.

    With `skip_dropped`, the branches of a block are computed only for the images that keep them. Factors are the same,
    and results differ by rounding. Every branch then gathers its images and adds its result to them, and the number of
    images changes from branch to branch. Without the context `encoders.randomness.random_keys`, which every training
    step opens, nothing is skipped. DINOv2 (2304.07193) skips a fixed number of images per process.

    With `local_cls_norm`, local crops are packed images that have fewer patches than the largest image of the batch.
    This norm gets a gradient only if a batch has such images.

    Set `mask_token` only if training replaces hidden tokens. Otherwise the mask token gets no gradient.

    Args:
        dim: width of a token.
        depth: number of blocks.
        heads: number of attention heads of a block.
        patch_size: side of a patch in pixels.
        image_size: image size in pixels that the encoder is trained with, one side or (height, width).
        channels: number of channels of an image.
        registers: number of register tokens.
        mask_token: add a learned token that replaces hidden tokens.
        pool: rule for `Features.pooled`: class token ("class") or mean of patch tokens ("mean").
        mlp: MLP of a block, two layers with a GELU ("gelu") or a gated MLP ("swiglu").
        mlp_ratio: hidden width of the MLP divided by `dim`. A SwiGLU has two thirds of this width (`swiglu_width`).
        swiglu_multiple: number of which the hidden width of a SwiGLU is a multiple.
        qkv_bias: add a bias to queries, keys and values.
        mask_key_bias: let the bias of keys count as 0, although `qkv_bias` has entries for it.
        norm_eps: epsilon of all layer norms.
        layer_scale: initial value of the layer scale. None means no layer scale.
        drop_path: drop path rate of the last block. The rate rises linearly from 0 at the first block.
        skip_dropped: compute a branch only for the images that keep it. This saves time if `drop_path` is high.
        bf16_residuals: under autocast to bf16, keep the tokens between blocks in bf16, and not in float32.
        cls_norm: normalise the class token with a layer norm of its own, not with the one of the patches.
        local_cls_norm: normalise the class tokens of local crops with another layer norm, in training.
        rope_base: base of the periods, which rise from 1 to nearly `rope_base`.
        rope_coordinates: divisor of coordinates, each its own side ("separate"), the longer ("max") or shorter ("min").
        rope_shift: largest random shift of coordinates in training. None means no shift.
        rope_jitter: largest random factor for each axis in training. None means no such factor.
        rope_rescale: largest random common factor in training. None means no such factor.
        init: initialisation of linear layers, truncated normal ("trunc_normal") or Xavier uniform ("xavier").
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
        patch_size: int = 16,
        image_size: int | tuple[int, int] = 224,
        channels: int = 3,
        registers: int = 4,
        mask_token: bool = False,
        pool: Pool = "class",
        mlp: MLPKind = "gelu",
        mlp_ratio: float = 4.0,
        swiglu_multiple: int = 8,
        qkv_bias: bool = True,
        mask_key_bias: bool = True,
        norm_eps: float = 1e-5,
        layer_scale: float | None = None,
        drop_path: float = 0.0,
        skip_dropped: bool = False,
        bf16_residuals: bool = False,
        cls_norm: bool = False,
        local_cls_norm: bool = False,
        rope_base: float = 100.0,
        rope_coordinates: Coordinates = "separate",
        rope_shift: float | None = None,
        rope_jitter: float | None = None,
        rope_rescale: float | None = None,
        init: Init = "trunc_normal",
        checkpoint_activations: Recompute = False,
    ):
        super().__init__()
        del image_size  # only `settings` holds it
        check_choices(pool=(pool, Pool), rope_coordinates=(rope_coordinates, Coordinates), mlp=(mlp, MLPKind))
        check_choices(init=(init, Init))
        check_counts(depth=depth, patch_size=patch_size, channels=channels, swiglu_multiple=swiglu_multiple)
        check_heads(dim, heads)
        _check_rope(dim // heads, rope_shift, rope_jitter, rope_rescale)
        self.dim, self.stride, self.channels, self.pool = dim, patch_size, channels, pool
        self.rope_ranges = (rope_shift or 0.0, math.log(rope_jitter or 1.0), math.log(rope_rescale or 1.0))
        self.checkpoint_activations, self.skip_dropped = checkpoint_activations, skip_dropped
        self.bf16_residuals = bf16_residuals

        self.patch_embed = PatchEmbed(channels, dim, patch_size, init)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.reg_token = nn.Parameter(torch.randn(1, registers, dim) * 0.02) if registers else None
        self.mask_token = nn.Parameter(torch.zeros(1, dim)) if mask_token else None
        self.num_prefix_tokens = 1 + registers
        self.rope_embed = RotaryPositions(dim // heads, rope_base, rope_coordinates)
        block: dict[str, Any] = {"mlp": mlp, "mlp_ratio": mlp_ratio, "swiglu_multiple": swiglu_multiple}
        block |= {"qkv_bias": qkv_bias, "mask_key_bias": mask_key_bias, "layer_scale": layer_scale}
        block |= {"bf16_residuals": bf16_residuals, "selective": checkpoint_activations == "selective"}
        rates = [drop_path * i / max(depth - 1, 1) for i in range(depth)]
        self.blocks = nn.ModuleList(Block(dim, heads, norm_eps=norm_eps, drop_path=rate, **block) for rate in rates)
        self.norm = LayerNorm(dim, eps=norm_eps)
        self.cls_norm = LayerNorm(dim, eps=norm_eps) if cls_norm else None
        self.local_cls_norm = LayerNorm(dim, eps=norm_eps) if local_cls_norm else None
        self.apply(lambda layer: init_linear(layer, init))

    def forward(self, images: Images, mask: Mask | None = None, *, drop: bool = False) -> Features:
        """Encode normalised images: (B, C, H, W), or packed images.

        If `mask` is given, the mask token replaces each hidden token. With `drop=True`, the encoder processes only the
        visible tokens: `Features.tokens` (V, D) are in the order of `mask.visible`, and each image must have a visible
        token.

        Raises:
            EncoderError: the images or the mask do not fit the encoder.
        """
        x, segments, rotations = self._embed(images, mask, drop)
        scales = draw_branch_scales(self, x, segments, skip=self.skip_dropped)
        x = self._run(self.blocks, x, segments, rotations, scales)
        return self._features(x, segments, self.grids(images))

    def intermediate(self, images: Images, blocks: int = 1) -> list[Features]:
        check_block_count(blocks, len(self.blocks))
        x, segments, rotations = self._embed(images)
        scales = self.draw_drop_path(len(images), x.device)
        x = self._run(self.blocks[:-blocks], x, segments, rotations, scales)
        features = []
        for block in self.blocks[-blocks:]:
            x = self._run([block], x, segments, rotations, scales)
            features.append(self._features(x, segments, self.grids(images)))
        return features

    def last_attention(self, images: Tensor) -> Tensor:
        """Return the attention weights of the last block between all tokens: (B, C, H, W) -> (B, heads, S + N, S + N).

        Each row sums to 1.
        """
        last = modules_of(self.blocks, Block)[-1]
        x, _, rotations = self._embed(self.checked(images))
        x = self._run(self.blocks[:-1], x, None, rotations, self.draw_drop_path(len(x), x.device))
        return last.attn.weights(last.norm1(x), next(rotations))

    def _embed(
        self, images: Images, mask: Mask | None = None, drop: bool = False
    ) -> tuple[Tensor, Segments | None, Rotations]:
        """Return the input of the first block, the boundaries of images in this input, and the rotations.

        The input is (B, S + N, D), or (T + B * S, D) if the images are packed or hidden tokens are dropped.
        """
        self.check(images, mask, drop=drop)
        x = self.patch_embed(images)  # (B, N, D) or (T, D)
        if mask is not None and not drop:
            x = self.replace_hidden(x, mask.hidden.view(*x.shape[:-1], 1))
        tokens: list[Tensor] = [token for token in (self.cls_token, self.reg_token) if token is not None]
        prefix = torch.cat(tokens, 1)  # (1, S, D)
        grids = self.grids(images)
        if isinstance(images, Tensor) and not drop:
            x = torch.cat([prefix.expand(len(x), -1, -1), x], 1)
            return x, None, self._rotations(grids[:1], None, x.device)
        lengths, visible = grids.prod(1), None
        if mask is not None and drop:
            if int(mask.lengths.min()) < 1:
                raise EncoderError(
                    "With drop=True each image must keep at least one token. "
                    f"The mask hides all tokens of image {int(mask.lengths.argmin())}."
                )
            x, lengths, visible = x.reshape(-1, self.dim).index_select(0, mask.visible), mask.lengths, mask.visible
        sequences = images.sequences if isinstance(images, PackedImages) else None
        segments = Segments(lengths + self.num_prefix_tokens, x.device, sequences=sequences)
        rotations = self._rotations(grids, (lengths, visible), x.device)
        return insert_prefix(x, prefix, lengths), segments, rotations

    def _rotations(self, grids: Tensor, packed: tuple[Tensor, Tensor | None] | None, device: torch.device) -> Rotations:
        """Return the rotations of each block for images with these `grids` (B, 2).

        Args:
            packed: number of patch tokens of each image (B,), and the indices (T,) of these tokens among all tokens of
                the images, or None for all tokens. If `packed` is None, `grids` has one row, and the rotations are
                those of one image.
        """
        shapes, which = grids.unique(dim=0, return_inverse=True)  # (G, 2), (B,)
        tables, starts = self._tables([(h, w) for h, w in shapes.tolist()], device)  # (L, 2, R, d / 2)
        sizes = grids.prod(1)
        rows = torch.cat(
            [torch.arange(size) + starts[i] for i, size in zip(which.tolist(), sizes.tolist(), strict=True)]
        )
        rows, prefix = (copy_to_device(x, device) for x in (rows, rows.new_zeros(1, self.num_prefix_tokens, 1)))
        lengths, visible = (grids.prod(1), None) if packed is None else packed
        if visible is not None:
            rows = rows.index_select(0, visible)
        rows = insert_prefix(rows[:, None], prefix, lengths)[:, 0]
        if len(tables) == 1:
            return repeat(tables[0].index_select(1, rows))
        return (table.index_select(1, rows) for table in tables)

    def _tables(self, grids: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, list[int]]:
        """Return the sines and cosines of all `grids`: (L, 2, R, d / 2), and the first row of each grid.

        Row 0 is the rotation by 0, which belongs to prefix tokens.
        """
        drawn = self._draw(grids)
        count, half = (1 if drawn is None else len(self.blocks)), 2 * len(self.rope_embed.periods)
        still = torch.tensor([0.0, 1.0], device=device).view(1, 2, 1, 1).expand(count, 2, 1, half)
        tables, starts = [still], [1]
        for i, grid in enumerate(grids):
            if drawn is None:
                factors, shifts = torch.ones(1, 2, device=device), torch.zeros(1, 2, device=device)
            else:
                factors, shifts = (copy_to_device(numbers, device) for numbers in (drawn[0][i], drawn[1][i]))
            tables.append(self.rope_embed(grid, factors, shifts))
            starts.append(starts[-1] + grid[0] * grid[1])
        return torch.cat(tables, 2), starts

    def _draw(self, grids: list[tuple[int, int]]) -> tuple[Tensor, Tensor] | None:
        """Draw factors and shifts of the coordinates for each grid and block: two tensors (G, L, 2) on the CPU.

        Return None in evaluation mode, or if no random change of coordinates is set.
        """
        shift, jitter, rescale = self.rope_ranges
        if not self.training or not any(self.rope_ranges):
            return None
        sides = torch.tensor(grids)  # (G, 2)
        words = ((sides[:, 0] * 1024 + sides[:, 1])[:, None] * len(self.blocks) + torch.arange(len(self.blocks))) * 5
        noise = 2 * shared_noise(words[..., None] + torch.arange(5)).float() - 1  # (G, L, 5), from -1 to 1
        shifts, each, common = noise.tensor_split([2, 4], dim=-1)
        return (jitter * each + rescale * common).exp(), shift * shifts

    def _run(
        self,
        blocks: Iterable[nn.Module],
        x: Tensor,
        segments: Segments | None,
        rotations: Rotations,
        scales: BranchScales,
    ) -> Tensor:
        """Apply blocks. The shape of `x` does not change. With `bf16_residuals`, its dtype may."""
        x = in_bf16(x) if self.bf16_residuals else x
        for block in blocks:
            recompute = self.checkpoint_activations not in (False, "selective") and self.training
            arguments = (x, segments, next(scales), next(rotations))
            x = checkpoint(block, *arguments, use_reentrant=False) if recompute else block(*arguments)
        return x

    def _features(self, x: Tensor, segments: Segments | None, grids: Tensor) -> Features:
        """Return the `Features` computed from the output (B, S + N, D) or (T + B * S, D) of a block."""
        x = x.float() if self.bf16_residuals else x
        if segments is None:
            first, patches = x[:, 0], x[:, self.num_prefix_tokens :]  # (B, D), (B, N, D)
            tokens = self.norm(patches.flatten(0, 1))  # (B * N, D)
            pooled = tokens.view(patches.shape).mean(1) if self.pool == "mean" else self._normed_class(first, None)
        else:
            lengths = segments.lengths - self.num_prefix_tokens
            prefix, patches = split_prefix(x, self.num_prefix_tokens, lengths)  # (B, S, D), (T, D)
            tokens = self.norm(patches)
            means = self.pool == "mean"
            pooled = image_means(tokens, lengths) if means else self._normed_class(prefix[:, 0], grids.prod(1))
        return Features(pooled, tokens, grids)

    def _normed_class(self, x: Tensor, sizes: Tensor | None) -> Tensor:
        """Normalise class tokens (B, D). `sizes` (B,) is the number of patches of each packed image, on the CPU."""
        normed = (self.cls_norm or self.norm)(x)
        if self.local_cls_norm is None or sizes is None or not self.training:
            return normed
        local = copy_to_device(sizes < sizes.max(), x.device)[:, None]
        return torch.where(local, self.local_cls_norm(x), normed)


def _check_rope(head_dim: int, shift: float | None, jitter: float | None, rescale: float | None) -> None:
    """Raise `EncoderError` if rotary positions cannot have these settings."""
    if head_dim % 4:
        raise EncoderError(f"Rotary positions need heads whose width is a multiple of 4, not {head_dim}.")
    if shift is not None and shift < 0:
        raise EncoderError(f"rope_shift must be at least 0, not {shift}.")
    for name, factor in (("rope_jitter", jitter), ("rope_rescale", rescale)):
        if factor is not None and factor < 1:
            raise EncoderError(f"{name} is the largest factor of coordinates. It must be at least 1, not {factor}.")
