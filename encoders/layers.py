"""Functions and modules that several encoders use: MLP, norms, layer scale, initial values and position tables.

Letters in shapes: N tokens of an image; D width of a token; r x c grid of a position table.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tessera.encoders.drop_path import DropPath, branch_scales
from tessera.encoders.errors import EncoderError
from tessera.encoders.segments import Segments

Interpolation = Literal["dino", "mae", "antialias"]
Init = Literal["trunc_normal", "xavier"]
Recompute = bool | Literal["selective"]
"""Parts of an encoder that the backward pass recomputes to save memory: nothing (False), blocks (True), or norms and
activation functions ("selective")."""
Module = TypeVar("Module", bound=nn.Module)


class MLP(nn.Module):
    """Two linear layers with an exact GELU between them: (..., D) -> (..., D)."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.fc2 = ScalableLinear(hidden, dim)

    @property
    def last(self) -> nn.Module:
        return self.fc2

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return self.contract(self.expand(x), scale)

    def expand(self, x: Tensor) -> Tensor:
        """Return the input of the GELU."""
        return self.fc1(x)

    def contract(self, hidden: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return the output of the MLP, given the input of the GELU, times `scale` (D,) if it is not None."""
        return self.fc2(self.act(hidden), scale)


class ScalableLinear(nn.Linear):
    """Linear layer: (..., d) -> (..., D). If `scale` (D,) is not None, the output is multiplied by it.

    The factors multiply weight and bias, so the product is the only operation that writes the output, and the gradient
    of the factors needs no tensor of all tokens.
    """

    def forward(self, input: Tensor, scale: Tensor | None = None) -> Tensor:
        if scale is None:
            return super().forward(input)
        return F.linear(input, self.weight * scale[:, None], None if self.bias is None else self.bias * scale)


class LayerScale(nn.Module):
    """Learned factor for each channel of a residual branch (2103.17239): (..., D) -> (..., D).

    With `same_dtype`, the output has the dtype of the input. Otherwise, under autocast, the output is in float32 even
    if the input is in bf16.
    """

    def __init__(self, dim: int, value: float, *, same_dtype: bool = False):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), value))
        self.same_dtype = same_dtype

    def early_factors(self, x: Tensor, last: nn.Module) -> Tensor | None:
        """Return the factors (D,) if `last`, the last linear layer of the branch of `x`, is to apply them, else None.

        That is so in training. In float16, products of small factors and weights would be rounded to 0. Without
        `same_dtype`, the output has to be more precise than that of the linear layer. A forward hook of the layer, such
        as that of LoRA or of ZeRO-3, gets the output without the factors.
        """
        enabled = not x.is_meta and torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if enabled else x.dtype
        if not self.training or last._forward_hooks or dtype == torch.float16 or (enabled and not self.same_dtype):
            return None
        return self.gamma

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.gamma.to(x.dtype) if self.same_dtype else at_least_float32(self.gamma))


def at_least_float32(parameter: Tensor) -> Tensor:
    """Under autocast, convert a parameter in half precision to float32. Otherwise, return it unchanged.

    Under autocast, some training engines gather float32 parameters in half precision. Without autocast, the encoder
    computes in the precision of its parameters.
    """
    if parameter.dtype not in (torch.bfloat16, torch.float16) or parameter.is_meta:
        return parameter
    return parameter.float() if torch.is_autocast_enabled(parameter.device.type) else parameter


class LayerNorm(nn.LayerNorm):
    """Layer norm: (..., D) -> (..., D). Under autocast, the input may be float32 while the parameters are bf16."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dtype == self.weight.dtype:
            return super().forward(input)
        bias = None if self.bias is None else at_least_float32(self.bias)
        return F.layer_norm(input, self.normalized_shape, at_least_float32(self.weight), bias, self.eps)


class SameDtypeLayerNorm(LayerNorm):
    """Layer norm whose output has the dtype of its input: (..., D) -> (..., D).

    Under autocast, torch's layer norm returns float32 even if the input is in bf16. Both norms compute means and
    variances in float32.
    """

    def forward(self, input: Tensor) -> Tensor:
        if input.dtype == torch.float32:
            return super().forward(input)
        with torch.autocast(input.device.type, enabled=False):
            weight, bias = self.weight.to(input.dtype), self.bias.to(input.dtype)
            return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class PreNormBlock(nn.Module):
    """Pre-norm transformer block with attention and an MLP as residual branches: (..., D) -> (..., D).

    Drop path multiplies the branches of an image by the factors `scales` (2, B). If `context` is not None, it is the
    second argument of `attn`: the windows of a grid, or the boundaries of packed images.
    """

    def __init__(
        self, dim: int, attn: nn.Module, mlp: nn.Module, *, norm_eps: float, drop_path: float, norm_bias: bool = True
    ):
        super().__init__()
        self.norm1 = LayerNorm(dim, eps=norm_eps, bias=norm_bias)
        self.attn: Any = attn
        self.norm2 = LayerNorm(dim, eps=norm_eps, bias=norm_bias)
        self.mlp: Any = mlp
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, context: Any = None, scales: Tensor | None = None) -> Tensor:
        first, second = branch_scales(scales)
        segments = context if isinstance(context, Segments) else None
        normed = self.norm1(x)
        branch = self.attn(normed) if context is None else self.attn(normed, context)
        x = x + self.drop_path(branch, segments, first)
        return x + self.drop_path(self.mlp(self.norm2(x)), segments, second)


def recomputed(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return `function(x)`. Save only `x` for the backward pass, which calls `function` again.

    The second call stops before a matrix product at the end of `function`, because no gradient needs the product.
    """
    return checkpoint(function, x, use_reentrant=False, preserve_rng_state=False)  # pyright: ignore[reportReturnType]


def in_bf16(x: Tensor) -> Tensor:
    """Convert `x` to bf16 if autocast to bf16 is enabled on its device."""
    device = x.device.type
    enabled = not x.is_meta and torch.is_autocast_enabled(device)
    return x.bfloat16() if enabled and torch.get_autocast_dtype(device) == torch.bfloat16 else x


def sincos_table(rows: int, columns: int, dim: int) -> Tensor:
    """Return the fixed 2-d sine-cosine position table of MAE (2111.06377), row by row: (r * c, D) float32.

    The first half of the channels encodes the column, and the second half encodes the row. Each half holds first the
    sines, then the cosines.

    Raises:
        EncoderError: `dim` is not a multiple of 4.
    """
    if dim % 4:
        raise EncoderError(f"A sine-cosine position table needs a width (dim) that is a multiple of 4, not {dim}.")
    rates = 10000.0 ** -(torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))  # (D / 4,)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    angles = [index.flatten()[:, None] * rates for index in (column, row)]  # two of (r * c, D / 4)
    return torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], dim=1).float()


def resize_table(table: Tensor, old: tuple[int, int], new: tuple[int, int], interpolation: Interpolation) -> Tensor:
    """Resize a position table from the grid `old` to the grid `new`: (1, old r * c, D) -> (1, new r * c, D).

    The interpolation is bicubic. The rule "mae" uses the scale factor new / old, without antialiasing. The rule
    "antialias" uses the same factor with antialiasing, as in timm and in DINOv2's models with registers. The rule
    "dino" uses the scale factor (new + 0.1) / old without antialiasing, as the published DINO models and DINOv2's
    models without registers do. With "dino", the table changes even if the old grid and the new grid are equal.
    """
    maps = rearrange(table.float(), "1 (r c) d -> 1 d r c", r=old[0], c=old[1])
    if interpolation == "dino":
        scale = [(after + 0.1) / before for before, after in zip(old, new, strict=True)]
        maps = interpolate(maps, scales=scale)
    else:
        maps = interpolate(maps, size=new, antialias=interpolation == "antialias")
    return rearrange(maps, "1 d r c -> 1 (r c) d").to(table.dtype)


def interpolate(
    maps: Tensor,
    *,
    size: Sequence[int] | None = None,
    scales: Sequence[float] | None = None,
    mode: Literal["bilinear", "bicubic"] = "bicubic",
    antialias: bool = False,
) -> Tensor:
    """Resize float32 maps to `size` or by `scales`: (B, D, r, c) -> (B, D, R, C).

    This is `F.interpolate`, except where `torch.use_deterministic_algorithms` asks for a deterministic gradient, which
    CUDA's `F.interpolate` does not have. There, each axis is multiplied by the matrix of its interpolation.
    """
    # On the meta device only the shape counts, which torch finds in Python, within 0.07 s, except with antialiasing.
    antialias = antialias or maps.is_meta
    if not torch.are_deterministic_algorithms_enabled():
        return F.interpolate(maps, size, scales, mode, align_corners=False, antialias=antialias)
    resized = maps.double()  # autocast leaves float64 as it is
    for axis in (2, 3):
        length = maps.shape[axis]
        one = torch.eye(length, dtype=torch.float64, device=maps.device)[None, None]
        to = None if size is None else (size[axis - 2], length)
        by = None if scales is None else (scales[axis - 2], 1.0)
        matrix = F.interpolate(one, to, by, mode, align_corners=False, antialias=antialias)[0, 0]  # (R, r)
        resized = (resized.movedim(axis, -1) @ matrix.T).movedim(-1, axis)
    return resized.float()


def init_linear(layer: nn.Module, init: Init) -> None:
    """Initialise the weight and bias of `layer` if `layer` is an `nn.Linear`. Pass this function to `Module.apply`."""
    if isinstance(layer, nn.Linear):
        if init == "xavier":
            nn.init.xavier_uniform_(layer.weight)
        else:
            nn.init.trunc_normal_(layer.weight, std=0.02)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


def learned(*shape: int) -> nn.Parameter:
    """Return a new parameter, initialised from a truncated normal distribution with standard deviation 0.02."""
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(shape), std=0.02))


def table_grid(image_size: int | tuple[int, int], patch_size: int) -> tuple[int, int]:
    """Return the number of rows and columns of a position table for images of `image_size` pixels.

    `image_size` is one integer for square images, or (height, width).

    Raises:
        EncoderError: `image_size` is smaller than a patch.
    """
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    if min(height, width) < patch_size:
        raise EncoderError(
            f"An image_size of {height} x {width} pixels is smaller than a patch of {patch_size} x {patch_size} pixels."
        )
    return height // patch_size, width // patch_size


def modules_of(container: nn.ModuleList, kind: type[Module]) -> list[Module]:
    """Return a list of the modules of `container` that are instances of `kind`."""
    return [module for module in container if isinstance(module, kind)]
