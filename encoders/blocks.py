"""Parts of ViT and RoPE-ViT: patch embedding, self-attention, SwiGLU and the transformer block.

Letters in shapes: B images; C channels, H x W pixels of an image; N tokens of an image; T tokens of all packed images;
P values of a patch; D width of a token; d width of one head.
"""

from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from tessera.encoders.attention import attention, self_attention
from tessera.encoders.drop_path import DropPath, Subset, branch_scales
from tessera.encoders.images import Images, PackedImages, patchify
from tessera.encoders.layers import (
    MLP,
    Init,
    LayerNorm,
    LayerScale,
    SameDtypeLayerNorm,
    ScalableLinear,
    recomputed,
)
from tessera.encoders.segments import Segments

MLPKind = Literal["gelu", "swiglu"]


class PatchProjection(nn.Conv2d):
    """Convolution whose stride equals its kernel size, so that it projects each patch linearly.

    Images (B, C, H, W) -> (B, D, h, w), or flat patches (T, P) -> (T, D), with values in (row, column, channel) order.
    """

    def forward(self, input: Tensor) -> Tensor:
        if input.ndim == 2:
            return F.linear(input, self.weight.permute(0, 2, 3, 1).flatten(1), self.bias)
        return super().forward(input)


class PatchEmbed(nn.Module):
    """Cropping of images to whole patches, then linear projection of each patch.

    (B, C, H, W) -> (B, N, D), or packed images -> (T, D).
    """

    def __init__(self, channels: int, dim: int, patch_size: int, init: Init):
        super().__init__()
        self.proj = PatchProjection(channels, dim, kernel_size=patch_size, stride=patch_size)
        if init == "xavier":  # otherwise the layer keeps torch's default initialisation, as in DINO
            nn.init.xavier_uniform_(self.proj.weight.detach().flatten(1))

    def forward(self, images: Images) -> Tensor:
        if isinstance(images, PackedImages):
            return self.proj(images.patches)
        return self.proj(images).flatten(2).transpose(1, 2)


class NormedPatchEmbed(nn.Module):
    """`PatchEmbed` with a norm before and after the projection, as in vit-pytorch.

    (B, C, H, W) -> (B, N, D), or packed images -> (T, D).
    """

    def __init__(self, channels: int, dim: int, patch_size: int, norm_eps: float):
        super().__init__()
        self.patch_size = patch_size
        self.norm1 = LayerNorm(channels * patch_size**2, eps=norm_eps)
        self.proj = nn.Linear(channels * patch_size**2, dim)
        self.norm2 = LayerNorm(dim, eps=norm_eps)

    def forward(self, images: Images) -> Tensor:
        if isinstance(images, PackedImages):
            return self._project(images.patches)
        height, width = (side - side % self.patch_size for side in images.shape[-2:])
        patches = patchify(images[..., :height, :width], self.patch_size)  # (B * N, P)
        return self._project(patches).unflatten(0, (len(images), -1))

    def _project(self, patches: Tensor) -> Tensor:
        return self.norm2(self.proj(self.norm1(patches)))


class MaskedKeyBiasLinear(nn.Linear):
    """Linear layer for queries, keys and values in which the bias of the keys counts as 0 (DINOv3, 2508.10104).

    The bias has entries for the keys, as in the published weights, but their values have no effect.
    """

    def forward(self, input: Tensor) -> Tensor:
        queries, _, values = self.bias.chunk(3)
        return F.linear(input, self.weight, torch.cat([queries, torch.zeros_like(queries), values]))


class SwiGLU(nn.Module):
    """MLP with a gate, w3(silu(gate) * value), as in DINOv2 and DINOv3 (2002.05202): (..., D) -> (..., D).

    The first half of the outputs of `w12` is the gate, and the second half is the value.
    """

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.w12 = nn.Linear(dim, 2 * hidden)
        self.w3 = ScalableLinear(hidden, dim)

    @property
    def last(self) -> nn.Module:
        return self.w3

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return self.contract(self.expand(x), scale)

    def expand(self, x: Tensor) -> Tensor:
        """Return gate and value in one tensor."""
        return self.w12(x)

    def contract(self, hidden: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return the output of the MLP, given gate and value in one tensor, times `scale` (D,) if it is not None."""
        gate, value = hidden.chunk(2, dim=-1)
        return self.w3(F.silu(gate) * value, scale)


def swiglu_width(dim: int, mlp_ratio: float, multiple: int = 8) -> int:
    """Return the hidden width of a SwiGLU: two thirds of `dim` * `mlp_ratio`, rounded up to a multiple of `multiple`.

    A SwiGLU of this width has about as many parameters as an MLP with the hidden width `dim` * `mlp_ratio`.
    """
    return -(-int(int(dim * mlp_ratio) * 2 / 3) // multiple) * multiple


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate queries or keys by the angles of their positions (RoFormer, 2104.09864): (..., N, d) -> (..., N, d).

    Channel k and channel k + d / 2 form a pair. The product is computed in at least the precision of `rope`.

    Args:
        rope: sines and cosines of the angles of all pairs: (2, N, d / 2).
    """
    sin, cos = rope
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).type_as(x)


class Attention(nn.Module):
    """Self-attention: (B, N, D) -> (B, N, D), or (T, D) -> (T, D) for packed images with `segments`.

    With `rope` (2, N, d / 2), or (2, T, d / 2) for packed images, queries and keys are rotated by their positions.
    """

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
        mask_key_bias: bool = False,
    ):
        super().__init__()
        head_dim = dim // heads if head_dim is None else head_dim
        self.heads = heads
        self.scale = head_dim**-0.5 if qk_scale is None else qk_scale
        linear = MaskedKeyBiasLinear if mask_key_bias and qkv_bias else nn.Linear
        self.qkv = linear(dim, 3 * heads * head_dim, bias=qkv_bias)
        self.qk_norm = qk_norm
        self.q_norm = LayerNorm(head_dim, eps=norm_eps) if qk_norm else nn.Identity()
        self.k_norm = LayerNorm(head_dim, eps=norm_eps) if qk_norm else nn.Identity()
        self.proj = ScalableLinear(heads * head_dim, dim)

    def forward(
        self,
        x: Tensor,
        segments: Segments | None = None,
        rope: Tensor | None = None,
        scale: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        return self.attend(self.project(x), segments, rope, scale, rows)

    def project(self, x: Tensor) -> Tensor:
        """Return queries, keys and values in one tensor: (..., N, D) -> (..., N, 3, heads, d)."""
        return rearrange(self.qkv(x), "... n (three heads d) -> ... n three heads d", three=3, heads=self.heads)

    def attend(
        self,
        qkv: Tensor,
        segments: Segments | None = None,
        rope: Tensor | None = None,
        scale: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the output for queries, keys and values in one tensor: (..., N, 3, heads, d) -> (..., N, D).

        If `scale` (D,) is not None, the output is multiplied by it. If `rows` (R,) is not None, only the output of the
        tokens with these indices among all tokens is returned, (R, D).
        """
        if rope is None and not self.qk_norm:
            out = self_attention(qkv, scale=self.scale, segments=segments)
        else:
            q, k, v = self._split(qkv, rope)
            out = attention(q, k, v, scale=self.scale, segments=segments)
        return self.proj(_rows(rearrange(out, "... heads n d -> ... n (heads d)"), rows), scale)

    def _split(self, qkv: Tensor, rope: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values: (..., N, 3, heads, d) -> three tensors (..., heads, N, d)."""
        q, k, v = (part.transpose(-3, -2) for part in qkv.unbind(-3))
        q, k = self.q_norm(q), self.k_norm(k)
        return (q, k, v) if rope is None else (rotate(q, rope), rotate(k, rope), v)

    def weights(self, x: Tensor, rope: Tensor | None = None) -> Tensor:
        """Return the attention weight of each query for each key: (B, N, D) -> (B, heads, N, N). Rows sum to 1."""
        q, k, _ = self._split(self.project(x), rope)
        return (self.scale * q @ k.mT).softmax(-1)


class Block(nn.Module):
    """Pre-norm transformer block: (B, N, D) -> (B, N, D), or (T, D) -> (T, D) for packed images with `segments`.

    With `bf16_residuals`, the output of the block and of its norms has the dtype of the input. With `selective`, the
    outputs of the norms and of the activation function are not stored, and the backward pass recomputes these outputs.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        mlp_ratio: float,
        qkv_bias: bool,
        norm_eps: float,
        layer_scale: float | None,
        drop_path: float,
        qk_norm: bool = False,
        qk_scale: float | None = None,
        head_dim: int | None = None,
        mask_key_bias: bool = False,
        mlp: MLPKind = "gelu",
        swiglu_multiple: int = 8,
        bf16_residuals: bool = False,
        selective: bool = False,
    ):
        super().__init__()
        norm = SameDtypeLayerNorm if bf16_residuals else LayerNorm
        scale = partial(LayerScale, dim, same_dtype=bf16_residuals)
        attn = partial(Attention, dim, heads, qkv_bias=qkv_bias, qk_norm=qk_norm, qk_scale=qk_scale)
        hidden = swiglu_width(dim, mlp_ratio, swiglu_multiple) if mlp == "swiglu" else int(dim * mlp_ratio)
        self.norm1 = norm(dim, eps=norm_eps)
        self.attn = attn(norm_eps=norm_eps, head_dim=head_dim, mask_key_bias=mask_key_bias)
        self.ls1 = nn.Identity() if layer_scale is None else scale(layer_scale)
        self.norm2 = norm(dim, eps=norm_eps)
        self.mlp = SwiGLU(dim, hidden) if mlp == "swiglu" else MLP(dim, hidden)
        self.ls2 = nn.Identity() if layer_scale is None else scale(layer_scale)
        self.drop_path = DropPath(drop_path)
        self.selective = selective

    def forward(
        self,
        x: Tensor,
        segments: Segments | None = None,
        scales: Tensor | tuple[Subset, Subset] | None = None,
        rope: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the tokens after the block.

        If `rows` (B,) holds the index of one token of each image among all tokens, return only these tokens, (B, D).
        Only keys, values and queries are then computed for the other tokens.
        """
        if isinstance(scales, tuple):
            return _rows(self._forward_subsets(x, scales, rope), rows)
        first, second = branch_scales(scales)
        branch = self._attention(x, segments, rope, rows)
        if rows is not None:
            x, segments = _rows(x, rows), None
        x = self.drop_path.add(x, branch, segments, first)
        return self.drop_path.add(x, self._mlp(x), segments, second)

    def _forward_subsets(self, x: Tensor, subsets: tuple[Subset, Subset], rope: Tensor | None) -> Tensor:
        """Apply attention to the images of the first subset only, and the MLP to those of the second only."""
        first, second = subsets
        rope = first.rotations(rope)
        x = first.add(x, lambda kept: self._attention(kept, first.segments, rope))
        return second.add(x, self._mlp)

    def _attention(
        self, x: Tensor, segments: Segments | None, rope: Tensor | None, rows: Tensor | None = None
    ) -> Tensor:
        """Return the residual branch of attention, of all tokens or of `rows`."""
        scale = _early_factors(self.ls1, x, self.attn.proj)
        if not (self.selective and self.training):
            branch = self.attn(self.norm1(x), segments, rope, scale, rows)
        else:
            qkv = recomputed(lambda x: self.attn.project(self.norm1(x)), x)
            branch = self.attn.attend(qkv, segments, rope, scale, rows)
        return branch if scale is not None else self.ls1(branch)

    def _mlp(self, x: Tensor) -> Tensor:
        """Return the residual branch of the MLP."""
        scale = _early_factors(self.ls2, x, self.mlp.last)
        if not (self.selective and self.training):
            branch = self.mlp(self.norm2(x), scale)
        else:
            hidden = recomputed(lambda x: self.mlp.expand(self.norm2(x)), x)
            branch = recomputed(lambda hidden: self.mlp.contract(hidden, scale), hidden)
        return branch if scale is not None else self.ls2(branch)


def _early_factors(layer_scale: nn.Module, x: Tensor, last: nn.Module) -> Tensor | None:
    return layer_scale.early_factors(x, last) if isinstance(layer_scale, LayerScale) else None


def _rows(x: Tensor, rows: Tensor | None) -> Tensor:
    """Return the tokens with the indices `rows` (R,) among all tokens: (..., D) -> (R, D). None selects all tokens."""
    return x if rows is None else x.flatten(0, -2).index_select(0, rows)
